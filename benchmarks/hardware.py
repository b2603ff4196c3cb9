"""What a benchmark ran on, and its table of results in print and as JSON."""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["describe_hardware", "hardware_line", "write_record", "write_table"]


def describe_hardware() -> dict[str, Any]:
    """The machine and the software that a timing depends on.

    Returns:
        ``cpu`` (model), ``cores`` (those this process may use), ``memory_gib``, ``gpu`` (models, or None), ``kernel``,
        ``python`` and ``torch`` (versions; None without torch).
    """
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": _gpu_models(),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": _version("torch"),
    }


def hardware_line(hardware: Mapping[str, Any]) -> str:
    """:func:`describe_hardware` in one line.

    Example:
        >>> hardware = {"cpu": "Z80", "cores": 1, "memory_gib": 0.1, "gpu": None, "kernel": "CP/M 2.2"}
        >>> hardware_line({**hardware, "python": "3.11.7", "torch": None})
        'Z80, 1 cores, 0.1 GiB, no GPU, CP/M 2.2, python 3.11.7, no torch'
    """
    torch = f"torch {hardware['torch']}" if hardware["torch"] else "no torch"
    return (
        f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['memory_gib']} GiB, {hardware['gpu'] or 'no GPU'}, "
        f"{hardware['kernel']}, python {hardware['python']}, {torch}"
    )


def write_table(rows: Sequence[Mapping[str, Any]], path_json: str | os.PathLike[str], title: str) -> None:
    """Print the rows as an aligned table headed by the hardware, and write them as JSON.

    Args:
        rows: one mapping of column to value per row; the columns are all keys, in the order of their appearance.
        path_json: file for ``{"title", "hardware", "date", "rows"}``; its folder is made. Values that JSON cannot
            hold are written as null (not finite) or as text.
        title: first line of the table.
    """
    print(f"{title}\n{hardware_line(describe_hardware())}\n\n{_table(rows)}", flush=True)
    write_record(rows, path_json, title)


def write_record(rows: Sequence[Mapping[str, Any]], path_json: str | os.PathLike[str], title: str) -> None:
    """Write rows as JSON with the hardware, as :func:`write_table` does, and print nothing."""
    hardware = describe_hardware()
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    record = {"title": title, "hardware": hardware, "date": date, "rows": [_plain(dict(row)) for row in rows]}
    path = Path(path_json)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if not columns:
        return "(no rows)"
    cells = [columns, *([_cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    is_text = [any(isinstance(row.get(column), str) for row in rows) for column in columns]
    lines = [
        "  ".join(
            cell.ljust(width) if text else cell.rjust(width)
            for cell, width, text in zip(line, widths, is_text, strict=True)
        ).rstrip()
        for line in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _cell(value: Any) -> str:
    value = value.item() if hasattr(value, "item") else value  # a scalar of numpy or torch
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) and abs(value) < 1e4 else _long_cell(value)


def _long_cell(value: Any) -> str:
    return f"{value:.0f}" if isinstance(value, float) else str(value)


def _plain(value: Any) -> Any:
    """The value in the types of JSON."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy and torch
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _gpu_models() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    names = answer.stdout.split("\n")[:-1] if answer.returncode == 0 else []
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
