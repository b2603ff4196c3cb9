"""Gains of a cluster before it is rented or bought: the Python side of ``plan`` and ``simulate``.

The names below are imported on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the names of _EXPORTS, for type checkers
    from lightning_hetero.simulate.planning.answer import Epoch as Epoch
    from lightning_hetero.simulate.planning.answer import LinkAnswer as LinkAnswer
    from lightning_hetero.simulate.planning.answer import PlanAnswer as PlanAnswer
    from lightning_hetero.simulate.planning.answer import WorkerAnswer as WorkerAnswer
    from lightning_hetero.simulate.planning.cluster import Cluster as Cluster
    from lightning_hetero.simulate.planning.cluster import Link as Link
    from lightning_hetero.simulate.planning.cluster import Worker as Worker
    from lightning_hetero.simulate.planning.cluster_file import Given as Given
    from lightning_hetero.simulate.planning.cluster_file import read_cluster as read_cluster
    from lightning_hetero.simulate.planning.figures import plan_cluster as plan_cluster
    from lightning_hetero.simulate.planning.learned import LearnedAnswer as LearnedAnswer
    from lightning_hetero.simulate.planning.learned import simulate_cluster as simulate_cluster
    from lightning_hetero.simulate.planning.recorded import record as record

_EXPORTS = {
    "Cluster": "cluster",
    "Epoch": "answer",
    "Given": "cluster_file",
    "LearnedAnswer": "learned",
    "Link": "cluster",
    "LinkAnswer": "answer",
    "PlanAnswer": "answer",
    "Worker": "cluster",
    "WorkerAnswer": "answer",
    "plan_cluster": "figures",
    "read_cluster": "cluster_file",
    "record": "recorded",
    "simulate_cluster": "learned",
}
"""Name -> module here that defines it."""

__all__ = [*_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
