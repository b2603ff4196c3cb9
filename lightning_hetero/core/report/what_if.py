"""Step times with other workers, one left out, added or not bounded, by the time model of a recorded round."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lightning_hetero.core.batching.optperf import solve_optperf
from lightning_hetero.core.batching.plan import NO_LIMIT
from lightning_hetero.core.report.analysis import RunFigures, cluster_of
from lightning_hetero.core.timing.step_time import ClusterTimeModel, NodeModels

__all__ = ["WhatIf", "what_if"]


@dataclass(frozen=True)
class WhatIf:
    """One change of the workers, at the same total batch.

    Args:
        change: ``"without"``, ``"one more like"`` or ``"no bound on"``.
        rank: the worker.
        step_time: seconds of a step of the best split then.
        gain: share by which training would be faster, negative if slower.

    Example:
        >>> WhatIf("without", 3, 0.1, 0.07).gain
        0.07
    """

    change: str
    rank: int
    step_time: float
    gain: float


def what_if(figures: RunFigures) -> tuple[WhatIf, ...]:
    """Return what leaving out, adding or not bounding each worker gives, against the best split of all as they are.

    The times of the all-reduce are taken as they are; with other workers they would differ a little.

    Args:
        figures: figures of a run.

    Returns:
        Changes in the order of ranks; empty if there is no time model. Equal workers give equal rows.

    Example:
        >>> from lightning_hetero.core.report.records import RoundRecord, RunHeader, WorkerRecord
        >>> from lightning_hetero.core.report.run_record import RunRecord
        >>> header = RunHeader(0, "0.2.0", "Trainer", "hetero_ddp", "even", (WorkerRecord("a", "x"),) * 2, 8)
        >>> model = {"nodes": ((0.0, 0.0, 0.01, 0.0), (0.0, 0.0, 0.02, 0.3)), "gamma": 1.0, "t_o": 0.0, "t_u": 0.0}
        >>> busy = {name: (0.0, 0.0) for name in ("data", "forward", "backward", "optimizer")}
        >>> one = RoundRecord(1.0, 0, 9, 10, 8, (7, 1), step_time=0.33, **model, **busy)
        >>> found = what_if(RunFigures(RunRecord(header, (one,))))
        >>> [(change.change, change.rank, round(change.step_time, 2)) for change in found]
        [('without', 0, 0.46), ('one more like', 0, 0.32), ('without', 1, 0.08), ('one more like', 1, 0.32)]
    """
    one = figures.last[-1] if figures.last else None
    cluster = None if one is None else cluster_of(one)
    if one is None or cluster is None or not math.isfinite(figures.optimum):
        return ()
    low, high = figures.bounds(one)
    workers, now = len(one.sizes), figures.optimum
    found: list[WhatIf] = []
    known: dict[tuple[Any, ...], Any] = {}

    def solve(change: str, rank: int, order: list[int], free: bool = False) -> None:
        key = change, *cluster.array[rank].tolist(), low[rank], None if high is None else high[rank]
        if key in known:  # of equal workers, one stands for all
            if known[key] is not None:
                found.append(replace(known[key], rank=rank))
            return
        known[key] = None
        nodes = NodeModels(cluster.array[order])
        most = None if high is None else [NO_LIMIT if free and i == rank else high[i] for i in order]
        least = [low[i] for i in order]
        if sum(least) > one.total or (most is not None and sum(most) < one.total):
            return
        changed = ClusterTimeModel(nodes, cluster.gamma, cluster.t_o, cluster.t_u)
        bounds: Any = {"min_local": least, "max_local": most, "multiple": figures.multiple}
        time = solve_optperf(changed, one.total, **bounds).step_time
        if time is not None and np.isfinite(time):
            known[key] = WhatIf(change, rank, float(time), now / float(time) - 1.0)
            found.append(known[key])

    everyone = list(range(workers))
    for rank in everyone:
        if workers > 1:
            solve("without", rank, [i for i in everyone if i != rank])
        solve("one more like", rank, [*everyone, rank])
        if high is not None and one.sizes[rank] >= high[rank]:
            solve("no bound on", rank, everyone, free=True)
    return tuple(found)
