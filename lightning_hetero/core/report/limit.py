"""Limit of the step at the end of a recorded run: the link, one worker, the computing of all, or neither."""

import numpy as np

from lightning_hetero.core.report.analysis import PHASES, RunFigures

__all__ = ["BOUND_BY_LINK", "limit_of"]

BALANCED = 0.03
"""Share of the step by which workers may differ and still count as balanced."""
BOUND_BY_LINK = 0.3
"""Share of the step from which the link is what limits it."""
BOUND_BY_DATA = 0.2
"""Share of the step from which loading is what limits it."""
BOUND_BY_REST = 0.25
"""Share of the step, neither computing nor the link, from which this is what limits it."""
NAMED = 3
"""Most workers that are named."""
NAMES = {"data": "loader", "forward": "forward pass", "backward": "backward pass", "optimizer": "optimizer"}
"""Words for the phases."""


def limit_of(figures: RunFigures) -> str:
    """Return what limits the step at the end, in words.

    Example:
        >>> from lightning_hetero.core.report.records import RoundRecord, RunHeader
        >>> from lightning_hetero.core.report.run_record import RunRecord
        >>> header = RunHeader(0, "0.2.0", "Trainer", "hetero_ddp", "perf_model", (), 8)
        >>> busy = {"data": (0.0, 0.0), "forward": (0.03, 0.03), "backward": (0.06, 0.06), "optimizer": (0.0, 0.0)}
        >>> one = RoundRecord(1.0, 0, 9, 10, 8, (6, 2), step_time=0.1, even=0.2, **busy)
        >>> limit_of(RunFigures(RunRecord(header, (one,))))
        'computing, balanced over all workers'
    """
    if not figures.workers:
        return "unknown: no step was timed"
    if figures.link_share > BOUND_BY_LINK:
        return f"the link ({figures.link_share:.0%} of the step)"
    compute = np.array([one.compute for one in figures.workers])
    slowest = int(compute.argmax())
    rest = 1.0 - float(compute[slowest]) / figures.step_time - float(np.nan_to_num(figures.link_share))
    if rest > BOUND_BY_REST:
        return f"the training loop, and single steps that take longer ({rest:.0%} of the step)"
    newest = figures.last[-1]
    noise = 3.0 * max(newest.jitter, default=0.0) * compute[slowest] / max(newest.timed, 1) ** 0.5
    last = np.flatnonzero(compute >= compute[slowest] - max(BALANCED * figures.step_time, noise))
    if len(compute) == 1 or len(last) > 1:
        loads = float(np.mean([figures.workers[rank].phases["data"] for rank in last]))
        what = "loading" if loads > BOUND_BY_DATA * figures.step_time else "computing"
        if len(last) == len(compute):
            return what if len(compute) == 1 else f"{what}, balanced over all workers"
        names = ", ".join(map(str, last[:-1])) + f" and {last[-1]}"
        return f"{what} of {f'ranks {names}' if len(last) <= NAMED else f'{len(last)} of {len(compute)} workers'}"
    others = [one for one in figures.workers if one.rank != slowest]
    excess = {
        name: figures.workers[slowest].phases[name] - float(np.mean([one.phases[name] for one in others]))
        for name in PHASES
    }
    return f"rank {slowest}'s {NAMES[max(excess, key=excess.__getitem__)]}"
