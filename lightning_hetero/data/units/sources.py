"""Training data of one loader, seen as an order of units, and the set of all train loaders of a run."""

import zlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from lightning_hetero.core.validation import check_choice
from lightning_hetero.data.index_stream import IndexStream
from lightning_hetero.data.units.walk import MODES, Lane, Take

__all__ = ["BatchSource", "ItemSource", "LoaderSet", "SampleSource", "Source", "UnitOrder"]


class UnitOrder(Protocol):
    """Batches of each epoch."""

    def units(self, epoch: int) -> Sequence[Sequence[Any]]:
        """Return the batches of an epoch; may be collective."""

    def known(self, epoch: int) -> Sequence[Sequence[Any]]:
        """Return batches as many as those of an epoch, as far as they are known."""

    def draw(self, epoch: int) -> None:
        """Draw the batches of an epoch that begins; may be collective."""

    def fingerprint(self) -> int:
        """Return a number equal on ranks whose batches are equal."""


class Source(Protocol):
    """Training data of one loader."""

    counted: bool
    """``True`` if each rank knows the samples of its own batch only."""

    def lane(self, epoch: int) -> Lane:
        """Return the units of an epoch, and how many a step takes."""

    def draw(self, epoch: int) -> None:
        """Draw the order of an epoch; may be collective."""

    def samples(self, epoch: int, take: Take) -> Sequence[Any]:
        """Return the dataset indices of these units, in order."""

    def per_rank(self) -> int:
        """Return the samples of each rank and step on average."""

    def restore(self, per_rank: int) -> None:
        """Restore what :meth:`per_rank` returned when a checkpoint was saved, where it depends on what was drawn."""

    def describe(self) -> str:
        """Describe the data; equal on ranks with equal data."""


class SampleSource:
    """A plain loader: a step takes ``batch_size`` samples for each rank.

    Args:
        stream: order of the samples.
        batch_size: samples of each rank on average.
        drop_last: whether the ragged last batch is dropped.
    """

    counted = False

    def __init__(self, stream: IndexStream, batch_size: int, *, drop_last: bool = False) -> None:
        self.stream, self.batch_size, self.drop_last = stream, batch_size, drop_last
        self._order: tuple[int, Sequence[int]] = (-1, ())

    def lane(self, epoch: int) -> Lane:
        """Return the samples of an epoch, and how many a step takes."""
        return Lane(len(self.stream), lambda ranks: self.batch_size * ranks, self.drop_last)

    def draw(self, epoch: int) -> None:
        """Draw the order of an epoch; may be collective."""
        self._order = epoch, self.stream.indices(epoch)

    def samples(self, epoch: int, take: Take) -> Sequence[int]:
        """Return the dataset indices of these samples."""
        if self._order[0] != epoch:
            self.draw(epoch)
        return self._order[1][take.first : take.first + take.number]

    def per_rank(self) -> int:
        """Return the samples of each rank and step on average."""
        return self.batch_size

    def restore(self, per_rank: int) -> None:
        """Do nothing: the loader says how many samples there are."""

    def describe(self) -> str:
        """Describe the data."""
        order = self.stream.fingerprint()
        return f"{len(self.stream)} samples, order {order:08x}, batch_size={self.batch_size}, {self.drop_last=}"


class BatchSource:
    """A loader with a batch sampler of the user: a step takes one of its batches for each rank, or one for all.

    Args:
        order: batches of each epoch.
        for_all: ``True`` if one batch is that of all ranks together.
    """

    counted = False

    def __init__(self, order: UnitOrder, *, for_all: bool = False) -> None:
        self.order, self.for_all = order, for_all
        self._per_rank: int | None = None

    def lane(self, epoch: int) -> Lane:
        """Return the batches of an epoch, and how many a step takes; the last step takes what is left."""
        return Lane(len(self.order.known(epoch)), lambda ranks: 1 if self.for_all else ranks)

    def samples(self, epoch: int, take: Take) -> Sequence[Any]:
        """Return the dataset indices of these batches, in order."""
        units = self.order.units(epoch)[take.first : take.first + take.number]
        return [index for unit in units for index in unit]

    def draw(self, epoch: int) -> None:
        """Draw the batches of an epoch; may be collective."""
        self.order.draw(epoch)

    def per_rank(self) -> int:
        """Return the samples of one of its batches on average over the first epoch that was drawn."""
        if self._per_rank is None:
            units = self.order.known(0)
            self._per_rank = round(sum(map(len, units)) / len(units))
        return self._per_rank

    def restore(self, per_rank: int) -> None:
        """Restore what :meth:`per_rank` returned when a checkpoint was saved, so that the total stays."""
        self._per_rank = per_rank

    def describe(self) -> str:
        """Describe the data."""
        return f"batches of a batch sampler, order {self.order.fingerprint():08x}, {self.for_all=}"


class ItemSource:
    """A loader with ``batch_size=None``: the dataset yields batches, and a step takes one of them for each rank.

    Args:
        stream: order of the items.
        rows: returns the rows of an item, given its index; called for one item.
    """

    counted = True

    def __init__(self, stream: IndexStream, rows: Callable[[Any], int]) -> None:
        self.stream, self._rows = stream, rows
        self._per_rank: int | None = None
        self._order: tuple[int, Sequence[int]] = (-1, ())

    def lane(self, epoch: int) -> Lane:
        """Return the items of an epoch, and how many a step takes."""
        return Lane(len(self.stream), lambda ranks: ranks)

    def draw(self, epoch: int) -> None:
        """Draw the order of an epoch; may be collective."""
        self._order = epoch, self.stream.indices(epoch)

    def samples(self, epoch: int, take: Take) -> Sequence[Any]:
        """Return the indices of these items."""
        if self._order[0] != epoch:
            self.draw(epoch)
        return self._order[1][take.first : take.first + take.number]

    def per_rank(self) -> int:
        """Return the rows of the first item."""
        if self._per_rank is None:
            self._per_rank = max(1, self._rows(self.stream.indices(0)[0]))
        return self._per_rank

    def restore(self, per_rank: int) -> None:
        """Restore what :meth:`per_rank` returned when a checkpoint was saved."""
        self._per_rank = per_rank

    def describe(self) -> str:
        """Describe the data."""
        return f"{len(self.stream)} items that are batches, order {self.stream.fingerprint():08x}"


class LoaderSet:
    """All train loaders of a run, each with its units, and how a step combines them.

    Args:
        sources: training data of each loader.
        mode: mode of Lightning's ``CombinedLoader``.

    Raises:
        ValueError: if loaders of unknown counts are combined in one step.

    Example:
        >>> from lightning_hetero.data.units.orders import SeededUnits
        >>> LoaderSet([BatchSource(SeededUnits([[0, 1], [2, 3]], seed=0))]).total(world_size=2)
        4
    """

    def __init__(self, sources: Sequence[Source], mode: str = "min_size") -> None:
        self.sources, self.mode = tuple(sources), check_choice("mode", mode, MODES)
        if self.joint and any(source.counted for source in sources):
            raise ValueError(
                "one of several train loaders has batch_size=None, so that its rows are not known before they are "
                "loaded, and a loss of all loaders has no exact weight. Give it a batch_size."
            )

    @property
    def joint(self) -> bool:
        """True if a step has batches of several loaders."""
        return len(self.sources) > 1

    @property
    def own_batches(self) -> bool:
        """True if a loader has a batch sampler of the user."""
        return any(isinstance(source, BatchSource) for source in self.sources)

    @property
    def counted(self) -> bool:
        """True if each rank knows the samples of its own batch only."""
        return self.sources[0].counted

    def __len__(self) -> int:
        """Return the samples of an epoch, each unit counted with its mean number of samples."""
        return sum(source.lane(0).units * self._unit(source) for source in self.sources)

    def _unit(self, source: Source) -> int:
        return 1 if isinstance(source, SampleSource) else source.per_rank()

    def total(self, world_size: int) -> int:
        """Return the samples of a full step of all loaders, on average."""
        for_all = [isinstance(source, BatchSource) and source.for_all for source in self.sources]
        return sum(s.per_rank() * (1 if a else world_size) for s, a in zip(self.sources, for_all, strict=True))

    def describe(self) -> str:
        """Describe the data; equal on ranks with equal data."""
        return f"{'; '.join(source.describe() for source in self.sources)}; {self.mode}"

    def fingerprint(self) -> int:
        """Return a number equal on ranks with equal data."""
        return zlib.crc32(self.describe().encode())

    def compare_by(self, require_equal: Callable[[str, object], None]) -> None:
        """Compare orders that each rank draws by itself at the beginning of each epoch; see :class:`SeededUnits`."""
        for order in self._orders:
            if hasattr(order, "compare_by"):
                order.compare_by(require_equal)

    # state of orders that cannot be drawn again

    def state_dict(self, epoch: int) -> dict[str, Any]:
        """Return the orders of a pass that cannot be drawn again, and the mean samples of a batch."""
        orders = [order.state_dict(epoch) if _saved(order) else None for order in self._orders]
        return {"orders": orders, "per_rank": [source.per_rank() for source in self.sources]}

    def load_state_dict(self, state: dict[str, Any], epoch: int) -> None:
        """Restore the orders of the pass, and the mean samples of a batch."""
        for source, mean in zip(self.sources, state.get("per_rank", ()), strict=False):
            source.restore(mean)
        for order, saved in zip(self._orders, state.get("orders", ()), strict=False):
            if saved is not None and _saved(order):
                order.load_state_dict(saved, epoch)

    @property
    def _orders(self) -> list[Any]:
        return [s.order if isinstance(s, BatchSource) else getattr(s, "stream", None) for s in self.sources]


def _saved(order: Any) -> bool:
    return hasattr(order, "load_state_dict")
