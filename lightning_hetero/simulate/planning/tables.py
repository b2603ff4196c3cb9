"""Answers as text for a terminal."""

from collections.abc import Iterable, Sequence

from lightning_hetero.core.rounded import rounded
from lightning_hetero.simulate.planning.answer import Epoch, PlanAnswer, WorkerAnswer
from lightning_hetero.simulate.planning.units import format_rate, format_seconds
from lightning_hetero.simulate.planning.wording import columns, counted, labels, percent, shortened, with_article

__all__ = ["compared_text", "epoch_text", "group_label", "plan_text", "table", "worker_groups"]

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
    widths = [max(columns(line[i]) for line in lines) for i in range(len(header))]

    def aligned(line: Sequence[str]) -> str:
        room = [" " * (width - columns(cell)) for cell, width in zip(line, widths, strict=True)]
        cells = [line[0] + room[0], *(space + cell for space, cell in zip(room[1:], line[1:], strict=True))]
        return "  ".join(cells).rstrip()

    return [aligned(line) for line in lines]


def worker_groups(workers: Sequence[WorkerAnswer]) -> dict[str, list[WorkerAnswer]]:
    """Return the workers of equal devices together by their label, in the order of their first."""
    groups: dict[str, list[WorkerAnswer]] = {}
    for label, worker in zip(_labels(workers), workers, strict=True):
        groups.setdefault(label, []).append(worker)
    return groups


def _labels(workers: Sequence[WorkerAnswer]) -> list[str]:
    return labels([(worker.name, (worker.memory, f"{worker.alone:.12g}")) for worker in workers])


def group_label(label: str, count: int) -> str:
    """Return the label of some equal workers, such as ``4 x A100``."""
    return shortened(label) if count == 1 else f"{count} x {shortened(label)}"


def plan_text(answer: PlanAnswer, name: str = "") -> str:
    """Return the answer as lines for a terminal."""
    groups = worker_groups(answer.workers)
    header = ("worker", "samples", "computes", "idle", "memory used", "alone", "brings", "limited by")
    lines = table((_row(label, group) for label, group in list(groups.items())[:MOST_ROWS]), header)
    if len(groups) > MOST_ROWS:
        lines.append(f"... and {counted(len(groups) - MOST_ROWS, 'more kind')} of workers (--json lists all)")
    count = counted(len(answer.workers), "worker")
    title = f"{name or 'cluster'}: {count}, total batch {answer.total_batch_size}"
    return "\n".join([title, "", *lines, "", *_facts(answer)]) + "\n"


def compared_text(before: PlanAnswer, after: PlanAnswer) -> str:
    """Return what a change of the cluster brings, as lines for a terminal."""
    gain = after.samples_per_second / before.samples_per_second
    lines = [
        f"before the change: {counted(len(before.workers), 'worker')}, "
        f"{rounded(before.samples_per_second, 4)} samples/s",
        f"the change makes it {gain:.3g} times as fast",
    ]
    if before.epoch and after.epoch and before.epoch.cost is not None and after.epoch.cost is not None:
        lines.append(f"an epoch costs {rounded(after.epoch.cost, 4)} in place of {rounded(before.epoch.cost, 4)}")
    return "\n" + "\n".join(lines) + "\n"


def _row(label: str, group: Sequence[WorkerAnswer]) -> tuple[str, ...]:
    first = group[0]
    used = [worker.memory_share for worker in group if worker.memory_share is not None]
    limited = sorted({worker.bottleneck for worker in group})
    return (
        group_label(label, len(group)),
        _range([worker.local_batch_size for worker in group], "{:d}"),
        format_seconds(max(worker.compute_time for worker in group)),
        percent(sum(worker.idle_share for worker in group) / len(group)),
        f"{max(used):.0%} of {first.memory}" if used else "-",
        f"{rounded(first.alone, 4)}/s",
        percent(first.brings),
        " and ".join("link" if kind == "communication" else "computing" for kind in limited),
    )


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
        ("throughput", f"{rounded(answer.samples_per_second, 4)} samples/s"),
        ("over even sizes", _over_even(answer)),
        ("of the summed throughput alone", f"{percent(answer.share_of_alone)} of {rounded(answer.alone, 4)} samples/s"),
        ("leave out", _leave_out(answer)),
        ("link", _link(answer)),
        ("epoch", epoch_text(answer.epoch)),
    ]
    width = max(len(name) for name, _ in facts)
    return [f"{name.ljust(width)}  {text}" for name, text in facts if text]


def _over_even(answer: PlanAnswer) -> str:
    if answer.speedup_over_even is None or answer.even_step_time is None:
        return f"even sizes do not fit the memory of {answer.even_does_not_fit}"
    gain = answer.speedup_over_even
    return f"{gain:.{'2f' if gain < 1e3 else '3g'}} times as fast (even: {format_seconds(answer.even_step_time)})"


def _leave_out(answer: PlanAnswer) -> str:
    if answer.leave_out is None or answer.gain_without_it is None:
        return "" if len(answer.workers) == 1 else "nobody: the others cannot hold the total batch"
    shown = [with_article(shortened(label)) for label in _labels(answer.workers)]
    alone, fastest = max((worker.alone, -i) for i, worker in enumerate(answer.workers))
    if alone > answer.samples_per_second:
        return f"all but {shown[-fastest]}: alone it trains {rounded(alone, 4)} samples/s"
    name = shown[answer.leave_out]
    if answer.gain_without_it < LEAST_GAIN:
        lost = percent(max(-answer.gain_without_it, 0.0))
        return f"nobody: the one that is missed least, {name}, brings {lost} of the speed"
    text = f"{name}: the others are {percent(answer.gain_without_it)} faster without it"
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
    text = f"{now}, {percent(link.share)} of the speed with an unlimited link"
    if link.factor_needed == 0:
        return text
    return f"{text}; 95 % needs {format_rate(link.rate_needed)}" if link.rate_needed else (
        f"{text}; 95 % needs {link.factor_needed:.3g} times the rate"
    )  # fmt: skip


def epoch_text(epoch: Epoch | None) -> str:
    """Return time and cost of an epoch, empty if its samples are unknown."""
    if epoch is None:
        return ""
    text = f"{format_seconds(epoch.seconds)} for {epoch.samples} samples"
    if epoch.cost is None or epoch.price_per_hour is None:
        return f"{text}; its cost needs the price of {', '.join(epoch.without_price[:5])}"
    return f"{text}, costs {rounded(epoch.cost, 4)} ({rounded(epoch.price_per_hour, 4)} an hour)"
