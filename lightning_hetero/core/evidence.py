"""How sure it is that another split is better: what looks at the running one saw, against what they scatter by.

The steps of one look share the phase of their machine (another process, a quota, a clock). Between looks, times differ
by three to five times what the scatter of single steps says (``benchmarks/wan.py``). So what counts is by how much each
look differed from what was known before it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.pace import capped

__all__ = ["Evidence"]

Array = npt.NDArray[np.float64]

SURE = 2.0
"""Standard errors by which those that are to get less have to be seen to finish later than those that get more."""

BACK = 2.0
"""Factor on that for a split that goes back on the newest change, for which the evidence was as good."""

FADE = 0.95
"""What each look at the running split leaves of that."""

KEPT, RECENT = 16, 8
"""Looks at the running split, and surprises of each worker, that are kept; looks that say what the split takes."""

STEADY = 1
"""Looks without any surprise for which it counts that nothing is known yet."""


@dataclass(frozen=True)
class Evidence:
    """What looks at the running split have shown.

    Args:
        workers: hardware identity of each worker.
        split: the running split.
        looks: newest looks at it, at most 16: of each worker the logarithm of its seconds, and that value's variance.
        surprises: of each piece of hardware, by how much the logarithm of its seconds differed from what was known
            before, in the newest looks, at most 16.
        turn: by how much the share of each piece of hardware grew in the newest change of the split.

    Example:
        >>> even, seconds = (20, 20), np.array([[0.02, 0.06]] * 5)
        >>> evidence = Evidence().look(("a", "b"), even, seconds, [None, None])
        >>> evidence.certainty((30, 10)), evidence.certainty((10, 30))
        (1.0, 0.0)
        >>> doubt = evidence.look(("a", "b"), even, seconds[:, ::-1], [0.02, 0.06])
        >>> doubt.certainty((30, 10))
        0.0
    """

    workers: tuple[str, ...] = ()
    split: tuple[int, ...] = ()
    looks: tuple[tuple[tuple[float, float], ...], ...] = ()
    surprises: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    turn: Mapping[str, float] = field(default_factory=dict)

    def look(
        self,
        workers: tuple[str, ...],
        split: tuple[int, ...],
        seconds: Array,
        known: Sequence[float | None],
        *,
        changed: bool = False,
    ) -> "Evidence":
        """With one more look; one that saw no step of the running split shows nothing.

        Args:
            workers: hardware identity of each worker.
            split: samples of each worker, the running split.
            seconds: what each worker computed in each step of that split, shape ``(steps, workers)``.
            known: what each worker took for its samples as far as was known before, ``None`` if nothing was.
            changed: whether a worker was found to have another speed, so that earlier looks no longer count.
        """
        if len(seconds) == 0:
            return self
        now = self._at(workers, split)
        surprises, newest = dict(self.surprises), []
        for name, column, before in zip(workers, seconds.T, known, strict=True):
            window = capped(column)
            pace = max(float(window.mean()), 1e-12)
            if before is not None and not changed:
                surprise = round(float(np.log(pace / max(before, 1e-12))), 12)
                surprises[name] = (*surprises.get(name, ()), surprise)[-KEPT:]
            seen = surprises.get(name, ())
            between = sum(surprise**2 for surprise in seen) / (STEADY + len(seen))
            within = float(window.var()) / pace**2 / len(window)
            newest.append((float(np.log(pace)), max(between, within)))
        looks = () if changed else now.looks
        return replace(now, looks=(*looks, tuple(newest))[-KEPT:], surprises=surprises)

    def _at(self, workers: tuple[str, ...], split: tuple[int, ...]) -> "Evidence":
        """For this split: no looks at another one, but how it was left."""
        if (workers, split) == (self.workers, self.split):
            return self
        turn = {}
        if workers == self.workers and sum(split) == sum(self.split) > 0:
            steps = zip(workers, split, self.split, strict=True)
            turn = {name: (new - old) / sum(split) for name, new, old in steps}
        return replace(self, workers=workers, split=split, looks=(), turn=turn)

    def seconds(self, workers: tuple[str, ...], split: tuple[int, ...]) -> Array | None:
        """What each worker computes with a split, by the looks at it, ``None`` without any."""
        if (workers, split) != (self.workers, self.split) or not self.looks:
            return None
        return np.asarray(np.exp(np.array(self.looks)[-RECENT:, :, 0].mean(axis=0)))

    def certainty(self, plan: tuple[int, ...], later: Sequence[float] | Array = ()) -> float:
        """How much of the way to another split is certain, 0 to 1; 0 if it is not certain enough to go at all.

        Counted is by how much later those finish that are to get less than those that are to get more, in logarithms,
        in the mean of the newest looks, be it one or all of them. That has to exceed its standard error twice; up to
        four times for a plan that goes back on the newest change, less with every look at the running split. As looks
        add up, what lasts is found for certain, and what was scatter is not. What exceeds one error is certain.

        Args:
            plan: samples of each worker.
            later: logarithm of the time after which each worker is done, over what it computes; equal by default.
        """
        move = np.array(plan, dtype=float) / max(sum(plan), 1) - np.array(self.split, dtype=float) / sum(self.split)
        if not self.looks or np.abs(move).sum() < 1e-12:
            return 0.0
        relieved = -2.0 * move / np.abs(move).sum()
        seen = np.array(self.looks)[::-1]
        count = np.arange(1, len(seen) + 1)
        finish = seen[:, :, 0] + (np.array(later) if len(later) else 0.0)
        lead = np.cumsum(finish @ relieved) / count
        error = np.maximum(np.sqrt(np.cumsum(seen[:, :, 1] @ relieved**2)) / count, 1e-12)
        best = int(np.argmax(lead / error))
        back = float(move @ [self.turn.get(name, 0.0) for name in self.workers]) < 0.0
        factor = 1.0 + (BACK - 1.0) * FADE ** len(seen) if back else 1.0
        if lead[best] <= SURE * factor * error[best]:
            return 0.0
        return round(float(1.0 - error[best] / lead[best]), 9)

    def state_dict(self) -> dict[str, Any]:
        """Plain Python values, fit for any checkpoint."""
        return {
            "workers": list(self.workers),
            "split": list(self.split),
            "looks": [[list(worker) for worker in look] for look in self.looks],
            "surprises": {name: list(seen) for name, seen in self.surprises.items()},
            "turn": dict(self.turn),
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "Evidence":
        """What :meth:`state_dict` described; nothing, of an empty one."""
        return cls(
            tuple(state.get("workers", ())),
            tuple(int(size) for size in state.get("split", ())),
            tuple(tuple((float(log), float(variance)) for log, variance in look) for look in state.get("looks", ())),
            {name: tuple(map(float, seen)) for name, seen in state.get("surprises", {}).items()},
            {name: float(share) for name, share in state.get("turn", {}).items()},
        )
