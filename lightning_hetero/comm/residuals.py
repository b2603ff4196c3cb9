"""Residuals of an earlier run, split among the workers at hand."""

import logging
from typing import Any

import torch

from lightning_hetero.comm.topology import Topology

__all__ = ["own_share"]

log = logging.getLogger("lightning_hetero")


def own_share(state: dict[str, Any], topology: Topology, rank: int) -> dict[str, Any]:
    """A rank's own state, or, among other workers, an equal share of the sum of all residuals.

    In a hierarchy only the leaders of clusters hold residuals.

    Args:
        state: state of all ranks of the earlier run, which may be empty.
        topology: the way of messages now.
        rank: this rank.
    """
    if not state:
        return {}
    ranks = state["ranks"]
    before = state.get("clusters", tuple((r,) for r in range(len(ranks))))
    if before == topology.clusters:
        own: dict[str, Any] = ranks[rank]
        return own
    total: dict[str, torch.Tensor] = {}
    for one in ranks:
        for name, residual in one["residuals"].items():
            total[name] = total[name] + residual if name in total else residual.clone()
    if rank == 0:
        log.info("residuals of %d ranks were summed and split over %d", len(before), topology.size)
    share = {name: residual / topology.size for name, residual in total.items()} if topology.leads else {}
    return {**ranks[0], "residuals": share}
