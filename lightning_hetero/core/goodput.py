"""Choice of the total batch size by goodput (Cannikin, sec. 4.1 and 4.5; Pollux).

``goodput(B) = throughput(B) * efficiency(B)`` with ``throughput(B) = B / T(B)``, ``T`` the OptPerf of that total, and
``efficiency(B) = (noise_scale + B_0) / (noise_scale + B)``, the progress of a sample relative to one at ``B_0``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.optperf import solve_step_times
from lightning_hetero.core.time_model import ClusterTimeModel
from lightning_hetero.core.validation import check_int, check_number

__all__ = ["Candidate", "candidate_totals", "choose_total", "efficiency", "goodput_table"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One total batch size and what it promises.

    Args:
        total_batch_size: ``B``, samples of one optimizer step.
        accumulation: micro-batches of that step; more than 1 where the total exceeds the memory of all workers.
        step_time: seconds of an optimizer step at the optimal split.
        throughput: samples per second.
        efficiency: progress per sample relative to the initial total.
        goodput: product of both.

    Example:
        >>> Candidate(64, 1, step_time=0.5, throughput=128.0, efficiency=0.75, goodput=96.0).accumulation
        1
    """

    total_batch_size: int
    accumulation: int
    step_time: float
    throughput: float
    efficiency: float
    goodput: float


def efficiency(total_batch_size: float, noise_scale: float, initial_total: float) -> float:
    """Statistical efficiency of a sample at ``B`` relative to ``B_0``: ``(phi + B_0) / (phi + B)``.

    Args:
        total_batch_size: ``B``.
        noise_scale: ``phi = tr(Sigma) / |G|^2`` in samples, ``>= 0``; may be infinite (then 1) or unknown (NaN).
        initial_total: ``B_0``.

    Returns:
        Above 1 below ``B_0``, below 1 above it; NaN while the noise scale is unknown.

    Raises:
        ValueError: if the noise scale is negative.

    Example:
        >>> efficiency(300, 100, 100)
        0.5
    """
    if noise_scale < 0:
        raise ValueError(
            f"noise_scale={noise_scale} is negative, as estimates of single steps may be; give the average of many "
            "steps (RunningNoiseScale), or 0."
        )
    if math.isinf(noise_scale):
        return 1.0
    return (noise_scale + initial_total) / (noise_scale + total_batch_size)


def candidate_totals(smallest: int, largest: int, *, ratio: float = 1.1) -> tuple[int, ...]:
    """Geometric grid of totals between two bounds, both included.

    Args:
        smallest: least total, ``>= 1``.
        largest: greatest total.
        ratio: between neighbours, above 1.

    Raises:
        ValueError: if the bounds are reversed or the ratio is not above 1.

    Example:
        >>> candidate_totals(8, 64, ratio=2)
        (8, 16, 32, 64)
    """
    check_int("smallest", smallest, minimum=1)
    check_number("ratio", ratio, low=1.0, include_low=False)
    if largest < smallest:
        raise ValueError(f"the largest total {largest} is below the smallest, {smallest}. Raise max_total_batch_size.")
    count = math.ceil(math.log(largest / smallest) / math.log(ratio) - 1e-9) + 1
    return tuple(dict.fromkeys(round(float(b)) for b in np.geomspace(smallest, largest, max(count, 1))))


def goodput_table(
    cluster: ClusterTimeModel,
    totals: Sequence[int],
    *,
    noise_scale: float,
    initial_total: int,
    min_local: Sequence[int],
    max_local: Sequence[int] | None = None,
    micro_batch_limit: int | None = None,
    accumulation: int | None = None,
) -> tuple[Candidate, ...]:
    """Goodput of every candidate; totals beyond the memory of all workers run as equal micro-batches.

    Totals that the bounds do not allow, in any number of micro-batches, are left out.

    All candidates are solved together, exactly and anew: unlike the paper's solver (Algorithm 1) this one searches no
    bottleneck states, so that there is none to carry over from one choice to the next (sec. 4.5). Its cost grows in
    proportion to the workers; for 1000 of them, 100 candidates take less than a millisecond.

    Args:
        cluster: time model of one micro-batch.
        totals: candidates for ``B``.
        noise_scale: ``phi``, as in :func:`efficiency`.
        initial_total: ``B_0``.
        min_local: fewest samples of each worker and micro-batch.
        max_local: most samples of each worker and micro-batch.
        micro_batch_limit: most samples of all workers in a micro-batch; by default the sum of ``max_local``.
        accumulation: number of micro-batches; by default as few as the limit allows.

    Example:
        >>> from lightning_hetero.core.time_model import NodeTimeModel
        >>> cluster = ClusterTimeModel((NodeTimeModel(0.001, 0.1, 0, 0),) * 2)
        >>> table = goodput_table(cluster, [100, 200], noise_scale=100, initial_total=100, min_local=(1, 1))
        >>> [round(c.throughput) for c in table], [round(c.efficiency, 3) for c in table]
        ([667, 1000], [1.0, 0.667])
    """
    limit = sum(max_local) if micro_batch_limit is None and max_local is not None else micro_batch_limit
    groups: dict[int, list[int]] = {}
    for total in totals:
        count = (1 if limit is None else -(-total // limit)) if accumulation is None else accumulation
        if total >= count * sum(min_local) and (limit is None or -(-total // count) <= limit):
            groups.setdefault(count, []).append(total)
    table = []
    for count, group in groups.items():
        # Micro-batches whose mean is no whole number differ by one sample; the bounds have to hold the larger ones.
        sizes = np.append(np.asarray(group) / count, -(-max(group) // count))
        times = solve_step_times(cluster.accumulated(count), sizes, min_local=min_local, max_local=max_local)[:-1]
        for total, seconds in zip(group, times.tolist(), strict=True):
            share = efficiency(total, noise_scale, initial_total)
            table.append(Candidate(total, count, seconds, total / seconds, share, total / seconds * share))
    return tuple(sorted(table, key=lambda candidate: candidate.total_batch_size))


def choose_total(table: Sequence[Candidate], current: int, *, hysteresis: float = 0.05) -> Candidate:
    """The candidate of the highest goodput, if it promises enough over the current total.

    The total stays as it is while the noise scale, and with it the goodput, is unknown (NaN).

    Args:
        table: candidates, the current total among them.
        current: total that runs now.
        hysteresis: least relative gain for which the total is changed.

    Raises:
        ValueError: if the current total is not in the table.

    Example:
        >>> table = [Candidate(8, 1, 1, 8, 1, 8.0), Candidate(16, 1, 1, 16, 1, 8.2), Candidate(32, 1, 1, 32, 1, 9.0)]
        >>> choose_total(table, 8).total_batch_size, choose_total(table[:2], 8).total_batch_size
        (32, 8)
    """
    now = next((candidate for candidate in table if candidate.total_batch_size == current), None)
    if now is None:
        known = [candidate.total_batch_size for candidate in table]
        raise ValueError(f"the current total {current} is not among the candidates {known}. Add it to their totals.")
    if math.isnan(now.goodput):
        return now
    best = max(table, key=lambda candidate: candidate.goodput)
    return best if best.goodput >= (1 + hysteresis) * now.goodput else now
