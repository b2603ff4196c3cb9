"""The order in which a loader's own sampler draws its samples, pass after pass, the same on every rank."""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler, SequentialSampler

from lightning_hetero.core.keywords import checked_keywords

__all__ = ["BroadcastStream"]


@checked_keywords
class BroadcastStream:
    """Order of the samples in a custom training loop: the one that the sampler yields when a pass begins.

    Rank 0 draws and the others take its order, so ranks cannot differ, whatever they seeded. The random numbers are
    those that the sampler would draw in a single process.

    Args:
        sampler: yields dataset indices; its length must be known.
        share: hands rank 0's value to all ranks; called by all of them.
        rank: this rank.

    Raises:
        ValueError: if the sampler yields no samples.

    Example:
        >>> stream = BroadcastStream(SequentialSampler(range(3)))
        >>> list(stream.indices(0)), len(stream)
        ([0, 1, 2], 3)
    """

    def __init__(self, sampler: Sampler[int], share: Callable[[Any], Any] = lambda value: value, rank: int = 0) -> None:
        self.sampler, self.rank, self._share = sampler, rank, share
        self._orders: dict[int, Sequence[int]] = {}
        if len(self) < 1:
            raise ValueError(f"the training data has {len(self)} samples; it needs at least one.")

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def draw_from(self, sampler: Sampler[int]) -> None:
        """Draw later orders from another sampler."""
        self.sampler = sampler

    @property
    def sequential(self) -> bool:
        """True if the order is that of the dataset."""
        return type(self.sampler) is SequentialSampler

    def indices(self, epoch: int) -> Sequence[int]:
        """Return the order of a pass; the first call for a pass draws it and is collective."""
        if self.sequential:
            return range(len(self))
        if epoch not in self._orders:
            self._orders = {epoch: self._drawn()}
        return self._orders[epoch]

    def _drawn(self) -> Sequence[int]:
        order: Any = None
        if self.rank == 0:
            order = torch.as_tensor([int(index) for index in self.sampler], dtype=torch.int64)
        order = self._share(order)
        if len(order) != len(self):
            raise ValueError(
                f"the sampler {type(self.sampler).__name__} says that it has {len(self)} samples and yielded "
                f"{len(order)}. Make __len__ and __iter__ agree."
            )
        indices: list[int] = order.tolist()
        return indices

    def fingerprint(self) -> int:
        """Return a number equal on ranks with samplers of one class and length; their orders are equal in any case."""
        return zlib.crc32(f"{type(self.sampler).__name__} {len(self)}".encode())

    def state_dict(self, epoch: int) -> dict[str, Any]:
        """Return the order that was drawn for a pass, and the generator or seed from which later ones are drawn."""
        generator = getattr(self.sampler, "generator", None)
        order = self._orders.get(epoch)
        return {
            "order": None if order is None else torch.as_tensor(order, dtype=torch.int64),
            "generator": generator.get_state() if isinstance(generator, torch.Generator) else None,
            "seed": self._seed,
        }

    @property
    def _seed(self) -> int | None:
        """Seed to which a sampler adds the number of the pass, as Accelerate's seedable one; ``None`` for others."""
        seed = getattr(self.sampler, "initial_seed", None)
        return seed if isinstance(seed, int) else None

    def load_state_dict(self, state: dict[str, Any], epoch: int) -> None:
        """Restore the order of the pass, and of later ones as they would have been."""
        order = state.get("order")
        self._orders = {} if order is None or len(order) != len(self) else {epoch: order.tolist()}
        generator = getattr(self.sampler, "generator", None)
        if state.get("generator") is not None and isinstance(generator, torch.Generator):
            generator.set_state(state["generator"])
        if state.get("seed") is not None and self._seed is not None:
            self.sampler.initial_seed = state["seed"]  # type: ignore[attr-defined]
