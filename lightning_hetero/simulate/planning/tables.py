"""Answers as text for a terminal."""

from collections.abc import Iterable, Sequence

from lightning_hetero.simulate.planning.answer import PlanAnswer, WorkerAnswer
from lightning_hetero.simulate.planning.units import format_rate, format_seconds

__all__ = ["compared_text", "plan_text", "table", "worker_groups"]

MOST_ROWS = 40
LEAST_GAIN = 0.001
"""Relative gain of speed below which leaving out a worker is not worth a word."""


def table(rows: Iterable[Sequence[str]], header: Sequence[str]) -> list[str]:
    """Return aligned lines: the first column to the left, the others to the right.

    Example:
        >>> table([("a", "10"), ("long", "5")], ("name", "b"))
        ['name   b', 'a     10', 'long   5']
    """
    lines = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]

    def aligned(line: Sequence[str]) -> str:
        cells = [
            line[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
        ]
        return "  ".join(cells).rstrip()

    return [aligned(line) for line in lines]


def worker_groups(workers: Sequence[WorkerAnswer]) -> list[list[WorkerAnswer]]:
    """Return the workers of equal devices together, in the order of their first."""
    groups: dict[object, list[WorkerAnswer]] = {}
    for worker in workers:
        groups.setdefault((worker.name, worker.memory, round(worker.alone, 9)), []).append(worker)
    return list(groups.values())


def plan_text(answer: PlanAnswer, name: str = "") -> str:
    """Return the answer as lines for a terminal."""
    groups = worker_groups(answer.workers)
    header = ("worker", "samples", "computes", "idle", "memory used", "alone", "brings", "limited by")
    lines = table((_row(group) for group in groups[:MOST_ROWS]), header)
    if len(groups) > MOST_ROWS:
        lines.append(f"... and {len(groups) - MOST_ROWS} more kinds of workers (--json lists all)")
    count = len(answer.workers)
    title = f"{name or 'cluster'}: {count} worker{'s' * (count > 1)}, total batch {answer.total_batch_size}"
    return "\n".join([title, "", *lines, "", *_facts(answer)]) + "\n"


def compared_text(before: PlanAnswer, after: PlanAnswer) -> str:
    """Return what a change of the cluster brings, as lines for a terminal."""
    gain = after.samples_per_second / before.samples_per_second
    lines = [
        f"before the change: {len(before.workers)} workers, {before.samples_per_second:.4g} samples/s",
        f"the change makes it {gain:.3g} times as fast",
    ]
    if before.epoch and after.epoch and before.epoch.cost is not None and after.epoch.cost is not None:
        lines.append(f"an epoch costs {after.epoch.cost:.4g} in place of {before.epoch.cost:.4g}")
    return "\n" + "\n".join(lines) + "\n"


def _row(group: Sequence[WorkerAnswer]) -> tuple[str, ...]:
    first = group[0]
    name = first.name if len(group) == 1 else f"{len(group)} x {first.name}"
    used = [worker.memory_share for worker in group if worker.memory_share is not None]
    limited = sorted({worker.bottleneck for worker in group})
    return (
        name,
        _range([worker.local_batch_size for worker in group], "{:d}"),
        format_seconds(max(worker.compute_time for worker in group)),
        _percent(sum(worker.idle_share for worker in group) / len(group)),
        f"{max(used):.0%} of {first.memory}" if used else "-",
        f"{first.alone:.4g}/s",
        _percent(first.brings),
        " and ".join("link" if kind == "communication" else "computing" for kind in limited),
    )


def _percent(share: float) -> str:
    return f"{round(share, 3) + 0.0:.1%}"  # no -0.0 %


def _range(values: Sequence[int], shown: str) -> str:
    low, high = min(values), max(values)
    return shown.format(low) if low == high else f"{shown.format(low)}-{shown.format(high)}"


def _facts(answer: PlanAnswer) -> list[str]:
    error = f" +- {format_seconds(answer.step_time_error)}" if answer.step_time_error else ""
    step = f"{format_seconds(answer.expected_step_time)}{error}"
    if answer.step_time_error:
        step += f" ({format_seconds(answer.step_time)} without jitter)"
    facts = [
        ("step", step),
        ("throughput", f"{answer.samples_per_second:.4g} samples/s"),
        ("over even sizes", _over_even(answer)),
        ("of the summed throughput alone", f"{answer.share_of_alone:.1%} of {answer.alone:.4g} samples/s"),
        ("leave out", _leave_out(answer)),
        ("link", _link(answer)),
        ("epoch", _epoch(answer)),
    ]
    width = max(len(name) for name, _ in facts)
    return [f"{name.ljust(width)}  {text}" for name, text in facts if text]


def _over_even(answer: PlanAnswer) -> str:
    if answer.speedup_over_even is None or answer.even_step_time is None:
        return f"even sizes do not fit the memory of {answer.even_does_not_fit}"
    return f"{answer.speedup_over_even:.2f} times as fast (even: {format_seconds(answer.even_step_time)})"


def _leave_out(answer: PlanAnswer) -> str:
    if answer.leave_out is None or answer.gain_without_it is None:
        return "" if len(answer.workers) == 1 else "nobody: the others cannot hold the total batch"
    fastest = max(answer.workers, key=lambda worker: worker.alone)
    if fastest.alone > answer.samples_per_second:
        return f"all but a {fastest.name}: alone it trains {fastest.alone:.4g} samples/s"
    name = answer.workers[answer.leave_out].name
    if answer.gain_without_it < LEAST_GAIN:
        lost = _percent(max(-answer.gain_without_it, 0.0))
        return f"nobody: the one that is missed least, a {name}, brings {lost} of the speed"
    text = f"a {name}: the others are {answer.gain_without_it:.1%} faster without it"
    together = [answer.workers[i].name for i in answer.leave_out_together]
    if len(together) > 1:
        text += f"; {len(together)} workers take longer for one sample than the others for all"
    return text


def _link(answer: PlanAnswer) -> str:
    link = answer.link
    if len(answer.workers) == 1:
        return ""
    now = "not known" if link.rate is None else format_rate(link.rate)
    if link.factor_needed is None:
        needed = f"; {format_rate(link.rate_needed)} would give 95 %" if link.rate_needed else ""
        return f"{now}{needed}"
    text = f"{now}, {link.share:.1%} of the speed with an unlimited link"
    if link.factor_needed == 0:
        return text
    return f"{text}; 95 % needs {format_rate(link.rate_needed)}" if link.rate_needed else (
        f"{text}; 95 % needs {link.factor_needed:.3g} times the rate"
    )  # fmt: skip


def _epoch(answer: PlanAnswer) -> str:
    epoch = answer.epoch
    if epoch is None:
        return ""
    text = f"{format_seconds(epoch.seconds)} for {epoch.samples} samples"
    if epoch.cost is None:
        return f"{text}; its cost needs the price of {', '.join(epoch.without_price[:5])}"
    return f"{text}, costs {epoch.cost:.4g} ({epoch.price_per_hour:.4g} an hour)"
