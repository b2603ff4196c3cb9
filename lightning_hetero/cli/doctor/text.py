"""The checkup as text for a terminal: a table with a row per rank, and sentences on what to do."""

import textwrap
from collections.abc import Sequence

from lightning_hetero.cli.doctor.advice import advice
from lightning_hetero.cli.doctor.checkup import Checkup
from lightning_hetero.cli.doctor.facts import ProcessFacts
from lightning_hetero.cli.doctor.link import LinkFacts
from lightning_hetero.cli.doctor.speed import Speed
from lightning_hetero.simulate.planning.tables import table
from lightning_hetero.simulate.planning.units import format_seconds
from lightning_hetero.simulate.planning.wording import counted, percent, shortened

__all__ = ["checkup_text", "format_flops"]

WIDTH = 100
MOST_ROWS = 64
LABEL = 12


def checkup_text(checkup: Checkup, *, hosts: bool = False) -> str:
    """Return the lines.

    Args:
        checkup: the findings.
        hosts: whether they name the machines.
    """
    parts = [_versions(checkup), _ranks(checkup, hosts), _link(checkup.link)]
    parts += [
        _listing("Failed", checkup.failures),
        _listing("Problems", checkup.problems),
        _listing("Advice", advice(checkup)),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


def _versions(checkup: Checkup) -> list[str]:
    versions = dict(checkup.rows[0].versions) if checkup.rows else {}
    cuda = versions.pop("cuda", None)
    shown = [f"{name} {version}" for name, version in versions.items() if version]
    shown.append(f"CUDA {cuda}" if cuda else "no CUDA in torch")
    missing = [name for name, version in versions.items() if not version and name != "nccl"]
    lines = _field("versions", ", ".join(shown))
    if missing:
        lines += _field("without", ", ".join(missing))
    if checkup.autoload is not None:
        works = checkup.autoload.works
        lines += _field("names", checkup.autoload.sentence() if works else "not known without an import; see Problems")
    where = counted(len(checkup.hosts), "machine")
    alone = f"this one, with {counted(len(checkup.rows), 'device')}"
    together = f"{checkup.world_size} ranks on {where}"
    return lines + _field("processes", together if checkup.world_size > 1 else alone)


def _ranks(checkup: Checkup, hosts: bool) -> list[str]:
    if not checkup.rows:
        return []
    fastest = max((speed.flops for speed in checkup.speeds.values()), default=1.0)
    rows = [_row(checkup, row, checkup.speeds.get(row.rank), fastest, hosts) for row in checkup.rows[:MOST_ROWS]]
    hidden = {"machine": len(checkup.hosts) == 1 and not hosts, "of the fastest": len(rows) == 1}
    shown = [column for column in rows[0] if not hidden.get(column)]
    width = max(len(row["device"]) for row in rows)
    named = {"speed": f"{checkup.precision}, {checkup.seconds:g} s", "device": "device".ljust(width)}
    lines = [tuple(row[name].ljust(width if name == "device" else 0) for name in shown) for row in rows]
    found = table(lines, tuple(named.get(name, name) for name in shown))
    if len(checkup.rows) > MOST_ROWS:
        found.append(f"... and {len(checkup.rows) - MOST_ROWS} more (--json lists all)")
    return found


def _row(checkup: Checkup, row: ProcessFacts, speed: Speed | None, fastest: float, hosts: bool) -> dict[str, str]:
    """Return the cells of a row by column."""
    device = row.device
    capability = f" ({device.capability})" if device.capability else ""
    driver = "" if speed is None or speed.clock is None else f", {speed.clock:.0f} MHz, {speed.power:.0f} W"
    return {
        checkup.unit if checkup.unit == "rank" else "": str(row.rank),
        "machine": row.host if hosts else str(checkup.hosts.index(row.host)),
        "device": shortened(f"{device.name}{capability}"),
        "free memory": f"{device.free / 1e9:.3g} of {device.memory / 1e9:.3g} GB",
        "cores": f"{row.cores:.3g}",
        "threads": str(row.threads),
        "speed": "-" if speed is None else f"{format_flops(speed.flops)}{driver}",
        "of the fastest": "-" if speed is None else percent(speed.flops / fastest),
        "over time": _over_time(speed),
    }


def _over_time(speed: Speed | None) -> str:
    if speed is None or speed.slowdown is None:
        return "-"
    return percent(-speed.slowdown) if speed.slowdown else "steady"


def format_flops(flops: float) -> str:
    """Return a speed with three digits.

    Example:
        >>> format_flops(1.234e12), format_flops(56e9)
        ('1.23 TFLOP/s', '56 GFLOP/s')
    """
    unit, factor = ("TFLOP/s", 1e12) if flops >= 0.9995e12 else ("GFLOP/s", 1e9)
    return f"{flops / factor:.3g} {unit}"


def _link(link: LinkFacts | None) -> list[str]:
    if link is None:
        return []
    lines = []
    pairs = [(a, b) for a in range(link.world_size) for b in range(a)]
    ordered = sorted(pairs, key=lambda pair: link.rate[pair[0]][pair[1]])
    for label, (a, b) in dict(zip(("slowest", "fastest"), (ordered[0], ordered[-1]), strict=True)).items():
        what = "pair" if len(pairs) == 1 else f"{label} pair"
        rate, latency = link.rate[a][b], link.latency[a][b]
        lines.append(f"{what}: ranks {b} and {a}, {_rate(rate)}, latency {format_seconds(latency)}")
        if len(pairs) == 1:
            break
    if link.sums:
        rows = [(_size(size), format_seconds(s), _rate(link.bus_rate(size, s))) for size, s in link.sums]
        lines += ["", *table(rows, (f"all-reduce ({link.backend})", "takes", "bus rate"))]
    return lines


def _size(size: int) -> str:
    return f"{size // 1024} KiB" if size < 1 << 20 else f"{size >> 20} MiB"


def _rate(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s" if rate >= 0.9995e9 else f"{rate / 1e6:.3g} MB/s"


def _field(name: str, text: str) -> list[str]:
    return textwrap.wrap(f"{name:{LABEL}}{text}", WIDTH, subsequent_indent=" " * LABEL, break_on_hyphens=False)


def _listing(title: str, sentences: Sequence[str]) -> list[str]:
    lines = [title] if sentences else []
    for sentence in sentences:
        text = sentence if sentence.endswith(("?", ".")) else f"{sentence}."
        lines += textwrap.wrap(
            f"- {text}", WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
        )
    return lines
