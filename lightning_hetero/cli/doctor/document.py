"""The checkup as one JSON document for a bug report, without names of hosts, addresses and folders."""

import platform
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_hetero.cli.doctor.advice import advice
from lightning_hetero.cli.doctor.checkup import Checkup

__all__ = ["SCHEMA", "document", "without_names"]

SCHEMA = 1
"""Version of the document; it rises when a key changes its meaning or goes."""
ADDRESS = re.compile(
    r"(?<![\w:])[0-9a-fA-F:]*::[0-9a-fA-F:.]*[0-9a-fA-F]"  # version 6, shortened and not; version 4
    r"|\b(?:[0-9a-fA-F]{1,4}:){3,7}[0-9a-fA-F]{1,4}\b"
    r"|\b\d{1,3}(?:\.\d{1,3}){3}\b"
)
PRIVATE = ("MASTER_ADDR",)


def document(checkup: Checkup, *, hosts: bool = False) -> dict[str, Any]:
    """Return the document.

    Args:
        checkup: the findings.
        hosts: whether it names hosts, addresses and folders.
    """
    rows = []
    for row in checkup.rows:
        speed = checkup.speeds.get(row.rank)
        own = asdict(row)
        own.pop("versions")
        if not hosts:  # the number of a card is as good as a name
            own["device"].pop("identity")
        rows.append({**own, "speed": speed and asdict(speed)})
    link = checkup.link
    found = {
        "schema": SCHEMA,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": dict(checkup.rows[0].versions) if checkup.rows else {},
        "world_size": checkup.world_size,
        "seconds": checkup.seconds,
        "precision": checkup.precision,
        "autoload": checkup.autoload and {**asdict(checkup.autoload), "works": checkup.autoload.works},
        "environment": dict(checkup.environment),
        "ranks": rows,
        "link": link and asdict(link),
        "problems": list(checkup.problems),
        "failures": list(checkup.failures),
        "advice": advice(checkup),
    }
    plain: dict[str, Any] = found if hosts else without_names(found, checkup.hosts)
    return plain


def without_names(value: Any, hosts: tuple[str, ...]) -> Any:
    """Return plain values with ``host 0`` and so on for hosts, and placeholders for addresses and the home folder.

    Example:
        >>> without_names({"MASTER_ADDR": "x1", "why": ["connect to 10.0.0.7:29500 of x2.lab"]}, ("x1", "x2.lab"))
        {'MASTER_ADDR': 'set', 'why': ['connect to ADDRESS:29500 of host 1']}
    """
    if isinstance(value, dict):
        return {key: "set" if key in PRIVATE else without_names(part, hosts) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [without_names(part, hosts) for part in value]
    if not isinstance(value, str):
        return value
    for place, host in sorted(enumerate(hosts), key=lambda pair: -len(pair[1])):
        value = (
            re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-])(?:\.[\w-]+)*", f"host {place}", value) if host else value
        )
    value = ADDRESS.sub("ADDRESS", value)
    return re.sub(r"(?<![\w.])/(?:[\w.@+-]+/)*[\w.@+-]+", "FOLDER", value) if _has_path(value) else value


def _has_path(text: str) -> bool:
    """Return whether an absolute path stands in a text."""
    return str(Path.home()) in text or re.search(r"(?<![\w.])/\w[\w.@+-]*/", text) is not None
