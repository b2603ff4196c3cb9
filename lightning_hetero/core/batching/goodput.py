"""Choice of the total batch size by goodput (C sec. 4.1 and 4.5; Pollux).

``goodput(B) = throughput(B) * efficiency(B)`` with ``throughput(B) = B / T(B)``, ``T`` the OptPerf of that total, and
``efficiency(B) = (noise_scale + B_0) / (noise_scale + B)``, the progress of a sample relative to one at ``B_0``.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.batching.optperf import solve_step_times
from lightning_hetero.core.timing.step_time import ClusterTimeModel
from lightning_hetero.core.validation import check_int, check_number

__all__ = [
    "Candidate",
    "Window",
    "candidate_totals",
    "choose_total",
    "efficiency",
    "goodput_of",
    "goodput_table",
    "in_equal_parts",
    "step_times",
    "windows_of",
]


Totals = TypeVar("Totals", float, npt.NDArray[np.float64])

Window = tuple[int, int]
"""A total, and the number of its micro-batches."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One total batch size and its predicted goodput.

    Args:
        total_batch_size: ``B``, samples of one optimizer step.
        accumulation: micro-batches of that step; more than 1 where the total exceeds the memory of all workers.
        step_time: seconds of an optimizer step at the optimal split.
        throughput: samples per second.
        efficiency: progress per sample relative to the initial total.
        goodput: product of throughput and efficiency.

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


def efficiency(total_batch_size: Totals, noise_scale: float, initial_total: float) -> Totals:
    """Return the statistical efficiency of a sample at ``B`` relative to ``B_0``: ``(phi + B_0) / (phi + B)``.

    Args:
        total_batch_size: ``B``, one or an array of them.
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
        return 0.0 * total_batch_size + 1.0
    return (noise_scale + initial_total) / (noise_scale + total_batch_size)


def candidate_totals(smallest: int, largest: int, *, ratio: float = 1.1) -> tuple[int, ...]:
    """Return a geometric grid of totals between two bounds, both included.

    Args:
        smallest: least total, ``>= 1``.
        largest: greatest total.
        ratio: greatest ratio of neighbors, above 1.

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
    return tuple(dict.fromkeys(np.geomspace(smallest, largest, max(count, 1)).round().astype(int).tolist()))


def windows_of(
    totals: Sequence[int],
    *,
    min_local: Sequence[int],
    max_local: Sequence[int] | None = None,
    micro_batch_limit: int | None = None,
    accumulation: int | None = None,
) -> tuple[Window, ...]:
    """Return each total that the bounds allow, with the number of its micro-batches, sorted.

    Args:
        totals: candidates for ``B``.
        min_local: fewest samples of each worker and micro-batch.
        max_local: most samples of each worker and micro-batch.
        micro_batch_limit: most samples of all workers in a micro-batch; by default the sum of ``max_local``.
        accumulation: number of micro-batches; by default as few as the limit allows.

    Example:
        >>> windows_of([1, 8, 12], min_local=(1, 1), max_local=(5, 5))
        ((8, 1), (12, 2))
    """
    limit = sum(max_local) if micro_batch_limit is None and max_local is not None else micro_batch_limit
    windows = []
    for total in sorted(set(totals)):
        count = (1 if limit is None else -(-total // limit)) if accumulation is None else accumulation
        if total >= count * sum(min_local) and (limit is None or -(-total // count) <= limit):
            windows.append((total, count))
    return tuple(windows)


def in_equal_parts(total: int, limit: int | None, count: int | None, multiple: int = 1) -> int:
    """Return the largest total up to ``total`` that splits into equal micro-batches.

    Args:
        total: samples of one optimizer step.
        limit: most samples of a micro-batch, ``None`` for no limit.
        count: number of micro-batches; by default as few as the limit allows.
        multiple: samples of which each micro-batch is a multiple.

    Returns:
        0 if there is none.

    Example:
        >>> in_equal_parts(31, limit=10, count=None), in_equal_parts(31, limit=None, count=2)
        (27, 30)
        >>> in_equal_parts(31, limit=10, count=None, multiple=2)
        24
    """
    while total and total % (parts := multiple * (count or (1 if limit is None else -(-total // limit)))):
        total -= total % parts
    return total


def step_times(
    cluster: ClusterTimeModel,
    windows: Sequence[Window],
    min_local: Sequence[int],
    max_local: Sequence[int] | None,
    multiple: int = 1,
) -> dict[Window, float]:
    """Return the seconds of an optimizer step at the best split of each total, with sizes as real numbers.

    Args:
        cluster: time model of one micro-batch.
        windows: each total with the number of its micro-batches.
        min_local: fewest samples of each worker and micro-batch.
        max_local: most samples of each worker and micro-batch.
        multiple: samples of which each size is a multiple.

    Example:
        >>> from lightning_hetero.core.timing.step_time import NodeTimeModel
        >>> cluster = ClusterTimeModel((NodeTimeModel(0.001, 0.1, 0, 0),) * 2)
        >>> [round(seconds, 3) for seconds in step_times(cluster, [(100, 1), (200, 2)], (1, 1), None).values()]
        [0.15, 0.3]
    """
    groups: dict[int, list[int]] = {}
    for total, count in windows:
        groups.setdefault(count, []).append(total)
    times: dict[Window, float] = {}
    for count, totals in groups.items():
        # Micro-batches whose mean is no whole number differ by one sample; the bounds have to hold the larger ones.
        sizes = np.append(np.asarray(totals) / count, -(-max(totals) // count))
        sizes = sizes if multiple == 1 else np.ceil(sizes / multiple) * multiple
        seconds = solve_step_times(
            cluster.accumulated(count), sizes, min_local=min_local, max_local=max_local, multiple=multiple
        )
        times.update(zip([(total, count) for total in totals], seconds[:-1].tolist(), strict=True))
    return times


def goodput_of(
    times: Mapping[Window, float], efficiencies: Sequence[float] | npt.NDArray[np.float64]
) -> tuple[Candidate, ...]:
    """Return the goodput of candidates whose step times and efficiencies are known.

    Args:
        times: seconds of an optimizer step, by total and number of micro-batches.
        efficiencies: of each total, such as of :func:`efficiency`.

    Example:
        >>> goodput_of({(200, 1): 0.2}, [0.5])[0].goodput
        500.0
    """
    rows = zip(times.items(), np.asarray(efficiencies).tolist(), strict=True)
    return tuple([Candidate(b, n, s, b / s, share, b / s * share) for ((b, n), s), share in rows])


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
    """Return the goodput of every candidate; totals beyond the memory of all workers run as equal micro-batches.

    Totals that the bounds do not allow, in any number of micro-batches, are left out.

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
        >>> from lightning_hetero.core.timing.step_time import NodeTimeModel
        >>> cluster = ClusterTimeModel((NodeTimeModel(0.001, 0.1, 0, 0),) * 2)
        >>> table = goodput_table(cluster, [100, 200], noise_scale=100, initial_total=100, min_local=(1, 1))
        >>> [round(c.throughput) for c in table], [round(c.efficiency, 3) for c in table]
        ([667, 1000], [1.0, 0.667])
    """
    windows = windows_of(
        totals,
        min_local=min_local,
        max_local=max_local,
        micro_batch_limit=micro_batch_limit,
        accumulation=accumulation,
    )
    totals = [total for total, _ in windows]
    efficiencies = efficiency(np.array(totals, dtype=float), noise_scale, initial_total)
    return goodput_of(step_times(cluster, windows, min_local, max_local), efficiencies)


def choose_total(table: Sequence[Candidate], current: int, *, hysteresis: float = 0.02) -> Candidate:
    """Choose the candidate of the highest goodput, if it promises enough over the current total.

    The total stays as it is while the noise scale, and with it the goodput, is unknown (NaN).

    Args:
        table: candidates, the current total among them.
        current: total that runs now.
        hysteresis: least gain in goodput for which the total is changed, as a share, 0 to 1.

    Raises:
        ValueError: if the current total is not in the table.

    Example:
        >>> table = [Candidate(8, 1, 1, 8, 1, 8.0), Candidate(16, 1, 1, 16, 1, 8.1), Candidate(32, 1, 1, 32, 1, 9.0)]
        >>> choose_total(table, 8).total_batch_size, choose_total(table[:2], 8).total_batch_size
        (32, 8)
    """
    now = next(iter([candidate for candidate in table if candidate.total_batch_size == current]), None)
    if now is None:
        known = [candidate.total_batch_size for candidate in table]
        raise ValueError(f"the current total {current} is not among the candidates {known}. Add it to their totals.")
    if math.isnan(now.goodput):
        return now
    best = max(table, key=attrgetter("goodput"))
    return best if best.goodput >= (1 + hysteresis) * now.goodput else now
