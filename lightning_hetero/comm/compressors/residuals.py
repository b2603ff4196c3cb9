"""Residuals of an earlier run: split among the present workers, or added to a dense sum where sums are now dense."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.collectives.topology import Topology
from lightning_hetero.compression.layout import flat_view

__all__ = ["ResidualPayout", "left_alone", "own_share", "unsent"]

log = logging.getLogger("lightning_hetero")


def own_share(state: dict[str, Any], topology: Topology, rank: int) -> dict[str, Any]:
    """Return a rank's own state or, if the clusters have changed, an equal share of the sum of all residuals.

    In a hierarchy only the leaders of clusters hold residuals.

    Args:
        state: state of all ranks of the earlier run; may be empty.
        topology: present topology of messages.
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
        for name, residual in one.get("residuals", {}).items():
            total[name] = total[name] + residual if name in total else residual.clone()
    if rank == 0:
        log.info("residuals of %d ranks were summed and split over %d", len(before), topology.size)
    share = {name: residual / topology.size for name, residual in total.items()} if topology.is_leader else {}
    return {**ranks[0], "residuals": share}


def left_alone(own: dict[str, Any], control: ControlPlane) -> list[dict[str, Any]]:
    """Return the state of all ranks on rank 0 without asking the others: they get rank 0's without residuals."""
    return [] if control.rank else [own, *[{**own, "residuals": {}}] * (control.world_size - 1)]


def unsent(state: dict[str, Any]) -> dict[str, Any]:
    """Return a rank's state with only its nonzero residuals; empty if there are none."""
    residuals = {name: residual for name, residual in state.get("residuals", {}).items() if residual.any()}
    return {**state, "residuals": residuals} if residuals else {}


class ResidualPayout:
    """Addition of unsent residuals to this rank's part of the next dense sum: ``g_i + W r_i``.

    Args:
        residuals: residuals by name; those that were added are removed.
        parameters: parameters of the module, by name.
        world_size: number of ranks in the average, ``W``.
    """

    def __init__(
        self, residuals: dict[str, torch.Tensor], parameters: Mapping[str, torch.Tensor], world_size: int
    ) -> None:
        self.residuals, self.world_size = residuals, world_size
        self._names = {p: name for name, p in parameters.items()}

    @classmethod
    def of(cls, state: dict[str, Any], module: nn.Module, world_size: int, *, scaled: bool) -> "ResidualPayout | None":
        """Build the payout of a rank's state; ``None`` under a loss scaler, which may skip the step of that sum."""
        if scaled:
            log.warning(
                "sums are dense: what compression has not sent yet waits, and rides in the checkpoint, because a loss "
                'scaler may skip the step that it would go into; use precision="bf16-mixed" or go on compressing'
            )
            return None
        log.info("sums are dense: what compression has not sent yet goes into the next one")
        return cls(state["residuals"], dict(module.named_parameters()), world_size)

    def __call__(self, bucket: dist.GradBucket) -> bool:
        """Add residuals to a bucket before it is summed; return whether none is left.

        Residuals wait while the gradient of their parameter is 0: it may be unused on all ranks, and DDP would drop it.
        """
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            name = self._names.get(parameter, "")
            if name in self.residuals and bool(gradient.any()):
                flat = flat_view(gradient)
                flat.add_(self.residuals.pop(name).to(flat), alpha=self.world_size)
        return not self.residuals
