"""Diagnosis of communication-bound training: steps that wait for the network for longer than they compute.

The worker that comes last in a step waits for no other worker, so the least of the workers' waits is the network's own
(C eq. 12). A straggler is not mistaken for a slow network.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.rounded import rounded

__all__ = ["CommunicationBound", "DiagnosisSettings", "network_waits"]

Array = npt.NDArray[np.float64]


def network_waits(
    observations: StepObservations, *, accumulation: int = 1, message_seconds: float | None = None
) -> Array:
    """Return for each step the seconds of waiting for the network alone, and of computing by its slowest worker.

    ``min_i(e_i - P_i)``, with ``e_i`` the end of the last bucket and ``P_i`` that of the last gradient, both from the
    start of the backward pass; and ``max_i(a_i + P_i)`` times the micro-batches of a step.

    Args:
        observations: of all workers.
        accumulation: micro-batches of a step.
        message_seconds: with compressed gradients, seconds that the messages of a usual step take on the link. Any
            further wait of the median step is encoding and decoding, and is subtracted from all steps.

    Returns:
        Seconds, shape ``(steps, 2)``.

    Example:
        >>> ones = np.ones((1, 2))
        >>> seen = StepObservations(8 * ones, ones, ones, ones, 0 * ones, np.array([[0.5, 3.0]]), ones)
        >>> network_waits(seen).tolist()  # the second worker waited for the first
        [[0.5, 2.0]]
    """
    o = observations
    if o.num_steps == 0:
        return np.zeros((0, 2))
    ends = np.where(np.isnan(o.bucket_ends), 0.0, o.bucket_ends).max(axis=2, initial=0.0)
    wait = np.maximum(o.last_sync, ends - o.backward).min(axis=1)
    if message_seconds is not None:
        wait = wait - max(float(np.median(wait)) - message_seconds, 0.0)
    return np.stack([np.maximum(wait, 0.0), accumulation * o.compute.max(axis=1)], axis=1)


@dataclass(frozen=True)
class DiagnosisSettings:
    """Thresholds of the warning that training is communication-bound.

    Args:
        enter_ratio: ratio of mean wait to mean computing above which training counts as communication-bound.
        leave_ratio: ratio below which it no longer does.
        min_usual_wait_s: least wait of the median step for a warning; less is timing jitter of a busy machine.
        min_longest_wait_s: wait of a single step that justifies a warning whatever the median.
        repeat_factor: growth of the mean wait after which the warning is repeated.
        min_steps: least number of steps to judge by, if necessary from earlier sync rounds.

    Example:
        >>> DiagnosisSettings().leave_ratio
        0.7
    """

    enter_ratio: float = 1.0
    leave_ratio: float = 0.7
    min_usual_wait_s: float = 0.05
    min_longest_wait_s: float = 1.0
    repeat_factor: float = 2.0
    min_steps: int = 4


@dataclass(frozen=True)
class CommunicationBound:
    """State of the diagnosis by the newest steps, with what the log has reported.

    Args:
        steps: wait and computing of the newest steps, in seconds.
        bound: whether training is communication-bound.
        said_s: mean wait in seconds at the last warning.
        settings: thresholds.

    Example:
        >>> state, speaks = CommunicationBound().observe(np.array([[36.0, 0.02]] * 5))
        >>> speaks, state.bound, state.observe(np.array([[35.0, 0.02]] * 8))[1]
        (True, True, False)
    """

    steps: tuple[tuple[float, float], ...] = ()
    bound: bool = False
    said_s: float = 0.0
    settings: DiagnosisSettings = DiagnosisSettings()

    def observe(self, new: Array, *, lasting: bool = True) -> "tuple[CommunicationBound, bool]":
        """Return the state after a sync round, and whether that is worth a line in the log.

        Args:
            new: result of :func:`network_waits`, shape ``(steps, 2)``.
            lasting: whether a link that makes most steps wait counts; false where a controller of the link reports it.
        """
        s = self.settings
        if len(new) == 0:
            return self, False
        steps = (*self.steps, *((float(wait), float(compute)) for wait, compute in new))
        seen = replace(self, steps=steps[-max(s.min_steps, len(new)) :])
        left_to_others = seen.lasting and not lasting
        if not seen._exceeds(s.leave_ratio if self.bound else s.enter_ratio) or left_to_others:
            return replace(seen, bound=False), self.bound and not left_to_others
        speaks = not self.bound or seen.wait >= s.repeat_factor * self.said_s
        return replace(seen, bound=True, said_s=seen.wait if speaks else self.said_s), speaks

    def _exceeds(self, ratio: float) -> bool:
        s = self.settings
        notable = self.usual >= ratio * s.min_usual_wait_s or self.longest >= s.min_longest_wait_s
        return len(self.steps) >= s.min_steps and notable and self.wait > ratio * self.computing

    @property
    def wait(self) -> float:
        """Mean seconds that a step waits."""
        return float(np.mean([wait for wait, _ in self.steps]))

    @property
    def usual(self) -> float:
        """Median seconds that a step waits."""
        return float(np.median([wait for wait, _ in self.steps]))

    @property
    def longest(self) -> float:
        """Most seconds that a step waited."""
        return max(wait for wait, _ in self.steps)

    @property
    def computing(self) -> float:
        """Mean seconds that a step computes."""
        return float(np.mean([compute for _, compute in self.steps]))

    @property
    def lasting(self) -> bool:
        """``True`` if the link makes most steps wait; ``False`` if stalls delay only a few."""
        s = self.settings
        return self.usual > s.leave_ratio * max(self.computing, s.min_usual_wait_s)

    def describe(self, num_bytes: float = 0.0) -> str:
        """Return one line for the log.

        Args:
            num_bytes: bytes that a worker sends in a step, 0 if that is not known.
        """
        text = "communication-bound" if self.bound else "no longer communication-bound"
        text += (
            f": a step waits for the network for {rounded(self.wait)} s (median {rounded(self.usual)} s, longest "
            f"{rounded(self.longest)} s) and computes for {rounded(self.computing)} s"
        )
        if self.bound and num_bytes:
            text += f"; a worker sends {rounded(1e-6 * num_bytes)} MB in it"
            text += f", at about {rounded(8e-6 * num_bytes / self.usual)} Mbit/s" if self.lasting else ""
        return text
