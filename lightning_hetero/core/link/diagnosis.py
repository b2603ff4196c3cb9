"""Whether steps wait for the network longer than they compute, and whether it is thin or has stalled.

In each step, whoever comes last waits for no other worker, so that the least of the workers' waits is the network's own
(as in Cannikin, eq. 12); a slow worker is no slow network. A median over steps would hide five seconds of silence in
one of them, which are as real as a link that makes every step wait; so there are two kinds, thin links and stalls.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.observations import StepObservations

__all__ = ["AGAIN", "LONG", "OVER", "STALL", "THIN", "LongWait", "NetworkBound", "network_waits"]

Array = npt.NDArray[np.float64]

THIN, STALL, OVER = "thin", "stall", "over"

ENTER, LEAVE = 1.0, 0.7
"""Wait over computing of usual steps above which a link becomes thin, and below which it no longer is."""

LEAST = 0.05
"""Mean seconds of a step that are worth a word: the scatter of small sums on a busy machine is less."""

LONG, FAR = 1.0, 5.0
"""Least seconds of one step that are a stall, less is a hiccup; and least factor on the computing of a step."""

FEW = 0.25
"""Share of the steps, one at least, that may hold a stall. What more of them wait for is the link."""

WINDOW, KNOWN = 8, 4
"""Newest steps by which a link is thin, if need be with those of earlier looks; and how many have to be known."""

AGAIN = 2.0
"""Factor by which the numbers have to change so that they are said again."""

SOON = 30.0
"""Seconds to the next comparison of the workers that one can wait for it."""


def network_waits(
    observations: StepObservations, *, accumulation: int = 1, message_seconds: float | None = None
) -> Array:
    """Seconds that each step waited for the network alone, and that its slowest worker computed.

    ``min_i(e_i - P_i)``, with ``e_i`` the end of the last bucket and ``P_i`` that of the last gradient, both from the
    start of the backward pass; and ``max_i(a_i + P_i)`` for each micro-batch.

    Args:
        observations: of all workers.
        accumulation: micro-batches of a step.
        message_seconds: where gradients are compressed, what the messages of a usual step take on the link. What
            workers wait for beyond that in the median step is selecting and merging, and left out of all steps.

    Returns:
        shape ``(steps, 2)``.

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
class NetworkBound:
    """What is known of the network, and what was said of it.

    Args:
        steps: wait and computing of the newest steps, seconds.
        kind: ``"thin"`` if most steps wait for longer than they compute, ``"stall"`` if a few hold so long a wait,
            ``None`` if neither.
        said: seconds that were said last of this kind, ``None`` if nothing was.
        thin: how often it became thin.
        stalls: how often it stalled.

    Example:
        >>> state, news = NetworkBound().observe(np.array([[36.0, 0.02]] * 5))
        >>> news, state.describe(4.7e6).partition(";")[0]
        ('thin', 'network-bound: a step waits for the network for 36 s and computes for 0.02 s')
        >>> state.observe(np.array([[35.0, 0.02]] * 8))[1] is None
        True
    """

    steps: tuple[tuple[float, float], ...] = ()
    kind: str | None = None
    said: float | None = None
    thin: int = 0
    stalls: int = 0

    def observe(self, new: Array, *, lasting: bool = True) -> tuple["NetworkBound", str | None]:
        """With the steps since the last look, and what is worth saying.

        A kind that comes back is said the first, second, fourth, eighth time and so on; one that stays, when its
        numbers have changed by a factor of two.

        Args:
            new: of :func:`network_waits`, shape ``(steps, 2)``.
            lasting: whether a thin link counts; not where somebody else watches for that, who acts on it.

        Returns:
            The state, and ``"thin"``, ``"stall"``, ``"over"`` or ``None``.
        """
        steps = (*self.steps, *((float(wait), float(compute)) for wait, compute in new))
        seen = replace(self, steps=steps[-max(WINDOW, len(new)) :])
        found = seen._judged()
        kind = None if found == THIN and not lasting else found
        if kind == self.kind:
            ratio = 1.0 if self.said is None else seen.seconds / self.said
            again = ratio >= AGAIN or (kind == THIN and ratio <= 1.0 / AGAIN)
            return (replace(seen, said=seen.seconds), kind) if again else (seen, None)
        seen = replace(seen, kind=kind, thin=self.thin + (kind == THIN), stalls=self.stalls + (kind == STALL))
        if kind is None:
            return replace(seen, said=None), OVER if self.said is not None and found is None else None
        times = seen.thin if kind == THIN else seen.stalls
        speaks = times & (times - 1) == 0
        return replace(seen, said=seen.seconds if speaks else None), kind if speaks else None

    def _judged(self) -> str | None:
        if len(self.steps) < KNOWN:
            return None
        waits, compute = np.array(self.steps).T
        bound = LEAVE if self.kind == THIN else ENTER
        if self.usual > bound * compute[-WINDOW:].mean() and self.usual >= bound * LEAST:
            return THIN
        return STALL if waits.max() >= max(LONG, FAR * compute.mean()) else None

    @property
    def usual(self) -> float:
        """Mean seconds that one of the newest steps waits, without the few that wait longest."""
        return _without_few(self.steps[-WINDOW:])

    @property
    def longest(self) -> float:
        """Seconds that the step waited that did so for longest."""
        return max((wait for wait, _ in self.steps), default=0.0)

    @property
    def seconds(self) -> float:
        """The number that matters: the longest wait of a stall, else the usual one."""
        return self.longest if self.kind == STALL else self.usual

    def describe(self, num_bytes: float | None = None) -> str:
        """One line for the log.

        Args:
            num_bytes: what a worker sends in a step, ``None`` if that is not known.
        """
        computes = float(np.mean([compute for _, compute in self.steps[-WINDOW:]])) if self.steps else 0.0
        if self.kind == STALL:
            others = _without_few(self.steps)
            text = (
                f"network-bound: the network stalled. The longest of {len(self.steps)} steps waited for it for "
                f"{self.longest:.3g} s, most of the others for {others:.3g} s, and a step computes for {computes:.3g} s"
            )
            return text if self.stalls == 1 else f"{text}; that happened {self.stalls} times by now"
        text = f"a step waits for the network for {self.usual:.3g} s and computes for {computes:.3g} s"
        if self.kind is None:
            return f"no longer network-bound: {text}"
        if num_bytes:
            rate = 8e-6 * num_bytes / max(self.usual, 1e-9)
            text += f"; a worker sends {1e-6 * num_bytes:.3g} MB in it, at about {rate:.3g} Mbit/s"
        if self.longest > FAR * self.usual:
            text += f"; the longest step waited for {self.longest:.3g} s"
        return f"network-bound: {text}"


def _without_few(steps: tuple[tuple[float, float], ...]) -> float:
    waits = np.sort([wait for wait, _ in steps])
    few = max(1, int(FEW * len(waits)))
    return float(waits[:-few].mean()) if len(waits) > few else 0.0


@dataclass(frozen=True)
class LongWait:
    """One step in which a single worker waited long for gradients, as it saw that itself.

    Args:
        waited: seconds for which it waited when it had computed.
        computed: seconds of computing.
        step_time: seconds of this step or of the one before, whichever is less: what the next ones may take.

    Example:
        >>> wait = LongWait(waited=36.0, computed=0.02, step_time=36.0)
        >>> wait.worth_saying(steps_left=6), wait.worth_saying(steps_left=0)
        (True, False)
    """

    waited: float
    computed: float
    step_time: float

    def worth_saying(self, steps_left: int | None) -> bool:
        """Whether it is long against computing, and the comparison of the workers, which tells why, is far.

        Args:
            steps_left: steps to that comparison, ``None`` if there will be none.
        """
        far = steps_left is None or steps_left * self.step_time > SOON
        return far and self.waited >= LONG and self.waited > FAR * self.computed

    def describe(self, num_bytes: float, steps_left: int | None) -> str:
        """One line for the log.

        Args:
            num_bytes: what a worker sends in a step.
            steps_left: as in :meth:`worth_saying`.
        """
        text = (
            f"perhaps network-bound: this worker computed for {self.computed:.3g} s and then waited for gradients for "
            f"{self.waited:.3g} s, in which a worker sends {1e-6 * num_bytes:.3g} MB: the network is thin or stalled, "
            "or another worker fell behind"
        )
        return text if steps_left is None else f"{text}; in {steps_left} steps, a comparison of the workers will tell"
