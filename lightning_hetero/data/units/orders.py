"""Order of the batches of a user's own batch sampler, epoch by epoch, the same on every rank."""

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from lightning_hetero.data.index_stream import seeded

__all__ = ["BroadcastUnits", "SeededUnits"]

MOST_INDICES = 2**20
"""Indices of one epoch after which a batch sampler counts as one without an end, if the dataset is not larger."""
MOST_PASSES = 8
"""The same as a multiple of the dataset."""

Units = Sequence[Sequence[Any]]
"""Batches of an epoch: the indices of each."""


def drawn_units(batches: Iterable[Any], samples: int = 0) -> Units:
    """Return what a batch sampler yields in one pass: lists of indices; empty ones are left out.

    Args:
        batches: the batch sampler.
        samples: samples of the dataset, 0 if that is not known.

    Raises:
        TypeError: if a batch is not a list of indices.
        ValueError: if there is no batch, or no end of them.
    """
    name, units = type(batches).__name__, []
    number, most = 0, max(MOST_INDICES, MOST_PASSES * samples)
    for batch in batches:
        if isinstance(batch, str | bytes) or not isinstance(batch, Iterable):
            raise TypeError(f"the batch sampler {name} yielded {batch!r}; each batch has to be a list of indices.")
        units.append(list(batch))
        number += max(1, len(units[-1]))
        if number > most:
            raise ValueError(
                f"the batch sampler {name} has yielded {number} indices and not ended; the dataset has "
                f"{samples or 'fewer'} samples. An epoch is one pass over it, drawn in advance, whatever max_steps or "
                "limit_train_batches say: let it stop after the batches of an epoch (one line with itertools.islice)."
            )
    units = [unit for unit in units if unit]
    if not units:
        raise ValueError(f"the batch sampler {name} yields no batches; it needs at least one.")
    return units


class SeededUnits:
    """Batches of an epoch from the user's batch sampler, with random numbers seeded by ``(seed, epoch)``.

    All ranks draw the same batches, and a resumed epoch draws them again. ``set_epoch`` is called if the batch sampler
    or its ``sampler`` has it; the global generators are restored. The number of batches may differ between epochs.

    Args:
        batches: any iterable of lists of indices.
        seed: base seed.
        samples: samples of the dataset, 0 if that is not known.

    Raises:
        ValueError: if there are no batches.

    Example:
        >>> order = SeededUnits([[0, 1], [2]], seed=0)
        >>> order.units(0)
        [[0, 1], [2]]
    """

    def __init__(self, batches: Iterable[Any], *, seed: int, samples: int = 0) -> None:
        self.batches, self.seed, self._samples = batches, seed, samples
        self._require_equal: Callable[[str, object], None] | None = None
        self._compared = 0
        self._parts = [part for part in (batches, getattr(batches, "sampler", None)) if part is not None]
        generators = {id(g): g for part in self._parts if isinstance(g := getattr(part, "generator", None), _GENERATOR)}
        self._generators = [(generator, generator.initial_seed()) for generator in generators.values()]
        self._drawn: dict[int, Units] = {}

    def units(self, epoch: int) -> Units:
        """Return the batches of an epoch; the last two epochs are kept, so that each is drawn once."""
        if epoch not in self._drawn:
            for part in self._parts:
                if hasattr(part, "set_epoch"):
                    part.set_epoch(epoch)
            for generator, first in self._generators:
                generator.manual_seed(first + epoch)
            with seeded(self.seed + epoch):
                drawn = drawn_units(self.batches, self._samples)
            self._drawn = {**{e: u for e, u in self._drawn.items() if abs(e - epoch) == 1}, epoch: drawn}
        return self._drawn[epoch]

    def known(self, epoch: int) -> Units:
        """Return the batches of an epoch, as :meth:`units` does."""
        return self.units(epoch)

    def compare_by(self, require_equal: Callable[[str, object], None]) -> None:
        """Compare the batches of later epochs as well, by a collective call that raises an error if ranks differ."""
        self._require_equal = require_equal

    def draw(self, epoch: int) -> None:
        """Draw the batches of an epoch that begins; a collective call, as far as those of ranks are compared.

        Raises:
            PlanMismatchError: if ranks drew different batches.
        """
        if self._require_equal is not None and epoch > self._compared:
            self._compared = epoch
            self._require_equal(
                f"the batches of epoch {epoch} of {type(self.batches).__name__}, a batch sampler whose order has to "
                "depend on the epoch alone",
                f"{len(self.units(epoch))} batches, order {self.fingerprint(epoch):08x}",
            )
        self.units(epoch)

    def fingerprint(self, epoch: int = 0) -> int:
        """Return a number equal on ranks whose batches of an epoch are equal: a checksum."""
        return zlib.crc32(repr(self.units(epoch)).encode())


_GENERATOR = torch.Generator


class BroadcastUnits:
    """Batches of a pass in a custom training loop: those that rank 0's batch sampler yields when the pass begins.

    Args:
        batches: any iterable of lists of indices.
        share: hands rank 0's value to all ranks; called by all of them.
        rank: this rank.
        samples: samples of the dataset, 0 if that is not known.

    Example:
        >>> BroadcastUnits([[0, 1], [2]]).units(0)
        [[0, 1], [2]]
    """

    def __init__(
        self,
        batches: Iterable[Any],
        share: Callable[[Any], Any] = lambda value: value,
        rank: int = 0,
        samples: int = 0,
    ) -> None:
        self.batches, self.rank, self._share, self._samples = batches, rank, share, samples
        self._drawn: dict[int, Units] = {}

    def units(self, epoch: int) -> Units:
        """Return the batches of a pass; the first call for a pass draws them and is collective.

        Raises:
            ValueError: if rank 0 could not draw them; every rank raises it.
        """
        if epoch not in self._drawn:
            self._drawn = {epoch: self._draw(epoch)}
        return self._drawn[epoch]

    def known(self, epoch: int) -> Units:
        """Return the batches of a pass if they were drawn, else those of the pass drawn last; the first call draws."""
        return self.units(epoch) if epoch in self._drawn or not self._drawn else next(iter(self._drawn.values()))

    def _draw(self, epoch: int) -> Units:
        drawn: Any = None
        if self.rank == 0:
            try:
                for part in (self.batches, getattr(self.batches, "sampler", None)):
                    if hasattr(part, "set_epoch"):
                        part.set_epoch(epoch)  # type: ignore[union-attr]
                drawn = drawn_units(self.batches, self._samples)
            except Exception as error:  # noqa: BLE001 - travels as a value, because every rank has to raise it
                drawn = f"{type(error).__name__}: {error}"
        drawn = self._share(drawn)
        if isinstance(drawn, str):
            raise ValueError(f"the batch sampler of rank 0 failed: {drawn}")
        units: Units = drawn
        return units

    def draw(self, epoch: int) -> None:
        """Draw the batches of a pass, as :meth:`units` does."""
        self.units(epoch)

    def fingerprint(self) -> int:
        """Return a number equal on ranks with batch samplers of one class; their batches are equal in any case."""
        return zlib.crc32(type(self.batches).__name__.encode())

    def state_dict(self, epoch: int) -> dict[str, Any]:
        """Return the batches that were drawn for a pass, as plain lists."""
        drawn = self._drawn.get(epoch)
        return {"units": None if drawn is None else [list(unit) for unit in drawn]}

    def load_state_dict(self, state: dict[str, Any], epoch: int) -> None:
        """Restore the batches of the pass."""
        self._drawn = {} if state.get("units") is None else {epoch: state["units"]}
