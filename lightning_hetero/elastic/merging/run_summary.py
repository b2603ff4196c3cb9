"""Summary of an elastic run at its end: how it compares with equal shares of the samples, and what each worker did."""

import math
from collections.abc import Iterator, Sequence

from lightning_hetero.core.report.summary import Summary
from lightning_hetero.core.rounded import rounded
from lightning_hetero.elastic.merging.merge_record import MergeRecord

__all__ = ["summary_of_merges"]

COLUMNS = ("rank", "batch", "updates", "samples", "samples/s", "waits")


def summary_of_merges(merges: Sequence[MergeRecord], batch_sizes: Sequence[int]) -> Summary | None:
    r"""Return the summary of a run, ``None`` before its first merge.

    Over all mega-batches, rank :math:`i` trains on :math:`n_i` samples in :math:`b_i` busy seconds, and a mega-batch
    takes as long as its slowest rank. Equal shares of the :math:`N` samples would take
    :math:`\max_i (N/R)\, b_i/n_i` seconds on :math:`R` ranks of the same speeds.

    Args:
        merges: all merges of the run.
        batch_sizes: batch sizes of all ranks at its end.

    Example:
        >>> record = MergeRecord(0, 64, (8, 8), (6, 2), (48, 16), (0.75, 0.25), False, (1.0, 1.0))
        >>> print(summary_of_merges([record], (8, 6)).text())
        hetero_elastic: 2.00x over equal shares of the samples, by the measured speeds; 0 % idle; 1 merge
          rank  batch  updates    samples  samples/s  waits
             0      8        6  48 (75 %)         48    0 %
             1      6        2  16 (25 %)         16    0 %
    """
    if not merges:
        return None
    took = sum(max(one.busy) for one in merges)
    busy = [sum(column) for column in zip(*(one.busy for one in merges), strict=True)]
    samples = [sum(column) for column in zip(*(one.samples for one in merges), strict=True)]
    updates = [sum(column) for column in zip(*(one.updates for one in merges), strict=True)]
    total = sum(samples)
    rates = [n / b if n and b > 0.0 else math.nan for n, b in zip(samples, busy, strict=True)]
    waits = [1.0 - b / took if took > 0.0 else 0.0 for b in busy]
    equal = max((total / len(rates) / rate for rate in rates), default=math.nan)
    known = took > 0.0 and not any(map(math.isnan, rates))
    gain = f"{equal / took:.2f}x over equal shares of the samples, by the measured speeds" if known else "speed unknown"
    count = f"{len(merges)} merge{'s' * (len(merges) > 1)}"
    verdict = f"hetero_elastic: {gain}; {100 * sum(waits) / len(waits):.0f} % idle; {count}"
    rows = [
        (
            str(rank),
            str(batch_sizes[rank]),
            str(updates[rank]),
            f"{samples[rank]} ({100 * samples[rank] / max(total, 1):.0f} %)",
            "unknown" if math.isnan(rates[rank]) else rounded(rates[rank], 4),
            f"{100 * waits[rank]:.0f} %",
        )
        for rank in range(len(rates))
    ]
    return Summary(verdict, COLUMNS, tuple(rows), tuple(_lines(merges)))


def _lines(merges: Sequence[MergeRecord]) -> Iterator[str]:
    lost = sorted({rank for one in merges for rank in one.lost})
    if lost:
        count = sum(1 for one in merges if one.lost)
        yield f"in {count} of {len(merges)} merges a replica was not finite and nothing of it was kept: rank {lost}"
