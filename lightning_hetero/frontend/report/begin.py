"""Record of a run that begins: what runs, where, and with which settings."""

import importlib.metadata
import platform
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.policies import policy_name
from lightning_hetero.core.policies.base import Planner
from lightning_hetero.core.report.records import RunHeader, WorkerRecord
from lightning_hetero.engine import HeteroEngine

__all__ = ["begin_report"]

PACKAGES = ("torch", "lightning", "pytorch-lightning", "accelerate", "transformers", "triton", "numpy")


def begin_report(
    engine: HeteroEngine, planner: Planner | None, *, front_end: str, strategy: str, folder: Path | None
) -> None:
    """Begin a run, once its workers are known, and its record; a further call in the same run changes nothing.

    Args:
        engine: engine of the run.
        planner: planner that decides, ``None`` for a fixed split.
        front_end: what runs the training loop.
        strategy: name of the strategy.
        folder: folder of the file; ``None`` to keep the record in memory, for the summary.
    """
    workers, watch, plan = engine.workers, engine.rounds.watch, engine.plan
    if workers is None or plan is None or not watch.speaks:
        return
    least, most = workers.least, workers.max_local
    devices = workers.devices or ("",) * workers.world_size
    config: Any = engine.config
    given = config.report
    header = RunHeader(
        started=int(time.time()),
        package=_version("lightning-hetero"),
        front_end=front_end,
        strategy=strategy,
        policy="even" if planner is None and config.policy == "even" else policy_name(planner),
        workers=tuple(
            WorkerRecord(name, device, float(capacity), least, None if most is None else most[rank])
            for rank, (name, device, capacity) in enumerate(
                zip(workers.identities, devices, workers.capacities, strict=True)
            )
        ),
        total_batch_size=plan.total_batch_size,
        settings=_settings(config),
        command=tuple(map(str, sys.argv)),
        versions={"python": platform.python_version(), **_versions()},
        hostname=platform.node(),
        by_cost=plan.cost is not None,
    )
    watch.describe(header, Path(given) if isinstance(given, str) else folder)


def _settings(config: HeteroConfig) -> dict[str, str]:
    """Return the settings that differ from their defaults, as text; a function by its name."""
    found = {}
    for one in fields(HeteroConfig):
        value = getattr(config, one.name)
        if value != one.default:
            found[one.name] = getattr(value, "__qualname__", None) or str(value)
    return found


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _versions() -> dict[str, str]:
    found = {name: _version(name) for name in PACKAGES}
    return {name: version for name, version in found.items() if version != "unknown"}
