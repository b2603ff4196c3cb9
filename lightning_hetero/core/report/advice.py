"""Advice from a recorded run: what to do next, each with the figure that speaks for it."""

import math
from collections.abc import Iterator

from lightning_hetero.core.planning.planner import SHORT_STEP
from lightning_hetero.core.report.analysis import RunFigures
from lightning_hetero.core.report.limit import BOUND_BY_LINK
from lightning_hetero.core.report.what_if import WhatIf, what_if
from lightning_hetero.core.rounded import rounded

__all__ = ["advice"]

WORTH = 0.02
"""Least gain that is worth an advice."""
IDLE = 0.1
"""Share of idle time from which something is said about it."""
MOST = 3
"""Most workers that are named."""
LOADS = 0.15
"""Share of a step that a worker may wait for its loader."""


def advice(figures: RunFigures) -> tuple[str, ...]:
    """Return the steps to take next, the most important first; empty if nothing was timed.

    Example:
        >>> from lightning_hetero.core.report.records import RoundRecord, RunHeader
        >>> from lightning_hetero.core.report.run_record import RunRecord
        >>> header = RunHeader(0, "0.2.0", "Trainer", "hetero_ddp", "even", (), 8)
        >>> busy = {"data": (0.0, 0.0), "forward": (0.001, 0.001), "backward": (0.001, 0.003), "optimizer": (0.0, 0.0)}
        >>> one = RoundRecord(1.0, 0, 9, 10, 8, (4, 4), step_time=0.005, link=0.001, **busy)
        >>> advice(RunFigures(RunRecord(header, (one,))))[0]
        'steps of 5 ms are too short to balance: a larger batch, or strategy="hetero_elastic"'
    """
    if not figures.last:
        return ()
    return (*_of_link(figures), *_of_workers(figures), *_of_steps(figures))


def _of_link(figures: RunFigures) -> Iterator[str]:
    share, one = figures.link_share, figures.last[-1]
    if share > BOUND_BY_LINK and not math.isfinite(one.density):
        most = 1.0 / max(1.0 - share, 0.05)
        yield (
            f'communication-bound: {share:.0%} of the step waits for the link. compression="auto" sends less where '
            f"that is faster, {most:.1f}x at most"
        )


def _of_workers(figures: RunFigures) -> Iterator[str]:
    for one in figures.workers:
        waits = one.phases["data"] / figures.step_time
        if waits > LOADS:
            yield f"rank {one.rank} waits {waits:.0%} of the step for its loader: more num_workers, or less work there"
    texts = [_text(one) for one in sorted(what_if(figures), key=lambda one: -one.gain) if one.gain >= WORTH]
    yield from [text for text in texts if text][:MOST]
    if figures.share_of_optimum < 1.0 - WORTH and figures.run.header.policy in ("even", "fixed", "static"):
        gain = 1.0 / max(figures.share_of_optimum, 0.01) - 1.0
        policy = figures.run.header.policy
        yield f"the {policy} policy keeps the split: the optimum of the time model is {gain:.0%} faster"


def _text(change: WhatIf) -> str:
    if change.change == "without":
        return f"rank {change.rank} makes the job slower: without it {change.gain:.0%} faster"
    if change.change == "no bound on":
        return (
            f"rank {change.rank} is at its most samples (memory): with more, training would be {change.gain:.0%} faster"
        )
    return ""  # one more worker is faster in general; the report has the table


def _of_steps(figures: RunFigures) -> Iterator[str]:
    if figures.step_time < SHORT_STEP and figures.idle > IDLE:
        yield (
            f"steps of {rounded(figures.step_time * 1e3)} ms are too short to balance: a larger batch, or "
            'strategy="hetero_elastic"'
        )
