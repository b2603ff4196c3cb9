"""Walk of a step through one or several loaders: which units of each loader's order belong to which step.

A unit is what a loader hands out at once: a sample, a batch of the user's own batch sampler, or an item of a dataset
of batches. The modes are those of Lightning's ``CombinedLoader``.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from lightning_hetero.core.validation import check_choice

__all__ = ["MODES", "Lane", "StepWalk", "Take"]

MODES = ("min_size", "max_size_cycle", "max_size")


class Lane(NamedTuple):
    """One loader's epoch.

    Args:
        units: units of the epoch.
        per_step: returns the units that a step takes, given the number of ranks.
        drop_last: whether a step that is not full is dropped.
    """

    units: int
    per_step: Callable[[int], int]
    drop_last: bool = False


class Take(NamedTuple):
    """Units ``first`` to ``first + number - 1`` of one loader.

    Args:
        lane: which loader.
        first: first unit.
        number: how many.
        full: whether that is a full step of the loader.
    """

    lane: int
    first: int
    number: int
    full: bool


class StepWalk:
    """Steps of an epoch through all loaders: a pure function of lengths, mode and number of ranks.

    Args:
        lanes: loaders.
        mode: one of :data:`MODES`.
        world_size: returns the ranks at a step; it changes where a run resumes with another number of them.

    Raises:
        ValueError: if a loader has no step.

    Example:
        >>> walk = StepWalk([Lane(7, lambda ranks: 2 * ranks), Lane(2, lambda ranks: ranks)], "max_size_cycle")
        >>> [[(take.first, take.number) for take in walk.at(step)] for step in range(len(walk))]
        [[(0, 2), (0, 1)], [(2, 2), (1, 1)], [(4, 2), (0, 1)], [(6, 1), (1, 1)]]
    """

    def __init__(
        self, lanes: Sequence[Lane], mode: str = "min_size", world_size: Callable[[int], int] = lambda step: 1
    ) -> None:
        check_choice("mode", mode, MODES)
        self._lanes, self._mode, self._world_size = lanes, mode, world_size
        self._places = [0] * len(lanes)
        self._over = [False] * len(lanes)
        self._steps: list[tuple[Take, ...]] = []
        for number in range(len(lanes)):
            if self._next(number, 0) is None:
                raise ValueError(
                    f"train loader {number} has no full batch: {lanes[number].units} units for steps of "
                    f"{lanes[number].per_step(world_size(0))}. Lower its batch_size, or set drop_last=False."
                )
        while takes := self._following(len(self._steps)):
            self._steps.append(takes)

    def __len__(self) -> int:
        return len(self._steps)

    def at(self, step: int) -> tuple[Take, ...]:
        """Return what a step takes of each loader, in the order of the loaders; loaders that are over have no entry."""
        return self._steps[step]

    def of(self, lane: int, step: int) -> Take | None:
        """Return what a step takes of one loader; ``None`` if nothing, or if the epoch is over."""
        takes = self._steps[step] if step < len(self._steps) else ()
        return next((take for take in takes if take.lane == lane), None)

    def _next(self, number: int, step: int) -> Take | None:
        lane, first = self._lanes[number], self._places[number]
        wanted, left = lane.per_step(self._world_size(step)), lane.units - first
        count = min(wanted, left)
        none = count < 1 or (lane.drop_last and count < wanted)
        return None if none else Take(number, first, count, count == wanted)

    def _following(self, step: int) -> tuple[Take, ...]:
        takes = [self._next(number, step) for number in range(len(self._lanes))]
        for number, take in enumerate(takes):
            self._over[number] |= take is None
        ended = any(self._over) if self._mode == "min_size" else all(self._over)
        if ended:
            return ()
        if self._mode == "max_size_cycle":
            for number in (number for number, take in enumerate(takes) if take is None):
                self._places[number] = 0
                takes[number] = self._next(number, step)
        found = tuple(take for take in takes if take is not None)
        for take in found:
            self._places[take.lane] += take.number
        return found
