"""Point at which an elastic run resumes: a position, or a step of a synchronous run; and the state of its replica."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_hetero.elastic.config import ElasticConfig

__all__ = ["ResumePoint"]

log = logging.getLogger("lightning_hetero")


@dataclass(frozen=True)
class ResumePoint:
    """Point at which a run resumes; the start of the first epoch by default.

    Args:
        position: epoch, and samples of it that are done.
        step: epoch and step of a synchronous run, kept until the data is known; ``None`` if the position counts.
        replica: state of this rank's replica, kept until there is a model; ``None`` for none.
        batch_sizes: batch size of each rank; empty to begin with equal ones.

    Example:
        >>> state = {"position": [1, 64], "batch_sizes": [8, 4], "previous": {}, "replicas": [{}, {}]}
        >>> ResumePoint.of(state, ElasticConfig("adaptive"), rank=0, world_size=2).batch_sizes
        (8, 4)
    """

    position: tuple[int, int] = (0, 0)
    step: tuple[int, int] | None = None
    replica: dict[str, Any] | None = None
    batch_sizes: tuple[int, ...] = ()

    @classmethod
    def of(cls, state: Mapping[str, Any], config: ElasticConfig, *, rank: int, world_size: int) -> "ResumePoint":
        """Return the point after the merge of a state from :meth:`ElasticEngine.state_dict`.

        With another number of ranks, batch sizes start anew, and each rank's replica is the global model.

        Args:
            state: state of all ranks.
            config: settings, whose merge rule may differ from that of the state.
            rank: this rank.
            world_size: number of ranks.
        """
        epoch, done = state["position"]
        same, scales = len(state["replicas"]) == world_size, config.rule.scales
        own = state["replicas"][rank] if same else {}
        replica = {"previous": state["previous"], "own": own}
        if not same:
            log.info("resumed with %d workers instead of %d: equal batches", world_size, len(state["replicas"]))
        elif not scales:
            log.debug("resumed with merge=%r, which keeps batches equal", config.merge)
        sizes = tuple(state["batch_sizes"]) if same and scales else ()
        return cls((epoch, done), replica=replica, batch_sizes=sizes)
