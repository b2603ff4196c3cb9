"""Gains of a cluster before it is rented or bought: the Python side of ``plan`` and ``simulate``.

The names below are imported on first use.
"""

from typing import TYPE_CHECKING

from lightning_hetero.lazy_exports import lazy_exports

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
    "Cluster": "lightning_hetero.simulate.planning.cluster",
    "Epoch": "lightning_hetero.simulate.planning.answer",
    "Given": "lightning_hetero.simulate.planning.cluster_file",
    "LearnedAnswer": "lightning_hetero.simulate.planning.learned",
    "Link": "lightning_hetero.simulate.planning.cluster",
    "LinkAnswer": "lightning_hetero.simulate.planning.answer",
    "PlanAnswer": "lightning_hetero.simulate.planning.answer",
    "Worker": "lightning_hetero.simulate.planning.cluster",
    "WorkerAnswer": "lightning_hetero.simulate.planning.answer",
    "plan_cluster": "lightning_hetero.simulate.planning.figures",
    "read_cluster": "lightning_hetero.simulate.planning.cluster_file",
    "record": "lightning_hetero.simulate.planning.recorded",
    "simulate_cluster": "lightning_hetero.simulate.planning.learned",
}
"""Module of each public name."""

__all__ = [*_EXPORTS]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
