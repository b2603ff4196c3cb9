"""One rank's replica of the model: its norm, its part in a merge, and the global models that the next merge needs."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.merging.rules import GlobalModel, MergeRule
from lightning_hetero.elastic.merging.weighted_average import synchronize, weighted_sums

__all__ = ["Replica"]

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


@checked_keywords
class Replica:
    """Model that a rank trains, and the global model that it started from.

    After a merge the module holds the global model, which is then validated or saved. If replicas keep weights of their
    own (CROSSBOW), :meth:`resume` puts these back.

    Args:
        module: model whose trainable parameters are merged. Frozen ones stay as they are, unless they differ between
            ranks (such as a teacher that follows the model): those are averaged.
        rule: merge rule.
        momentum: ``gamma``; ``None`` for 0 until it is set.
        world_size: number of ranks.

    Example:
        >>> from lightning_hetero.core.merging.rules import MERGES
        >>> replica = Replica(nn.Linear(1, 1), MERGES["mean"], momentum=0.9, world_size=1)
        >>> replica.merge(1.0, share=1.0, diverged=False)
    """

    def __init__(self, module: nn.Module, rule: MergeRule, *, momentum: float | None, world_size: int) -> None:
        self.module, self.rule, self.momentum, self.world_size = module, rule, momentum or 0.0, world_size
        self._current: dict[str, torch.Tensor] = {}
        self._previous: dict[str, torch.Tensor] = {}
        self._own: dict[str, torch.Tensor] = {}

    def synchronize(self) -> None:
        """Give all ranks rank 0's model; collective."""
        tensors: dict[str, torch.Tensor] = dict(self.module.named_parameters())
        synchronize(tensors | dict(self.module.named_buffers()), world_size=self.world_size)
        self._remember()

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """Trainable parameters by name."""
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def norm(self) -> float:
        """Return ``||w_i||_2 / |w|``, the norm over the number of parameters; not finite if a parameter is not."""
        parameters = list(self.parameters.values())
        norms = torch.stack([torch.linalg.vector_norm(p.detach()).double() for p in parameters])
        return float(torch.linalg.vector_norm(norms)) / sum(p.numel() for p in parameters)

    @torch.no_grad()
    def merge(self, weight: float, *, share: float, diverged: bool) -> None:
        """Merge the replicas by the rule, ``w' = sum_i alpha_i w_i + gamma (w - w_p)`` (A Alg. 2); collective.

        Args:
            weight: ``alpha_i``.
            share: weight of this rank in the means of floating-point buffers, which sums to 1 over the ranks. Other
                buffers take the largest value.
            diverged: whether this replica is not finite; nothing of it is kept then.
        """
        if self.world_size == 1:
            return
        parameters = self.parameters
        for name, merged in weighted_sums(parameters, weight, world_size=self.world_size):
            parameter, now = parameters[name], self._current.get(name)
            if now is not None:
                merged = self._update(name, now if diverged else parameter, merged, now)
            parameter.copy_(merged)
        self._merge_buffers(share)
        self._remember()

    def _update(self, name: str, local: torch.Tensor, merged: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
        """Return the new global parameter, by the rule; keep the replica's own value if the rule gives one."""
        previous = GlobalModel(now, self._previous[name])
        merged, own = self.rule.update(local, merged, previous, momentum=self.momentum, world_size=self.world_size)
        if own is not None:
            self._own[name] = own
        self._previous[name] = now
        return merged

    def use_momentum(self, momentum: float) -> None:
        """Merge with this momentum from now on."""
        self.momentum = momentum

    def _merge_buffers(self, share: float) -> None:
        named = dict(self.module.named_buffers())
        floating = {name: buffer for name, buffer in named.items() if buffer.is_floating_point()}
        averaged = floating | self._differing_frozen()
        for name, merged in weighted_sums(averaged, share, world_size=self.world_size):
            averaged[name].copy_(merged)
        for name in sorted(set(named) - set(floating)):
            largest = named[name].to(torch.int64)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            named[name].copy_(largest)

    def _differing_frozen(self) -> dict[str, torch.Tensor]:
        """Return frozen parameters whose exact sums of bits differ between ranks; the same on all ranks."""
        named = self.module.named_parameters()
        frozen = {name: p.detach() for name, p in named if not p.requires_grad and p.is_floating_point() and p.numel()}
        if not frozen:
            return {}
        sums = torch.stack([p.view(BITS[p.element_size()]).sum(dtype=torch.int64) for p in frozen.values()])
        most = torch.stack([sums, -sums])
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        differ = (most[0] != -most[1]).tolist()
        return {name: p for (name, p), differs in zip(frozen.items(), differ, strict=True) if differs}

    def _remember(self) -> None:
        """Keep the global model that all ranks have now, if the next merge needs it."""
        if self.world_size == 1 or not (self.rule.momentum or self.rule.elastic):
            return
        for name, parameter in self.parameters.items():
            self._current[name] = parameter.detach().clone()
            self._previous[name] = self._previous.get(name, self._current[name]).to(parameter.device)

    @torch.no_grad()
    def resume(self) -> None:
        """Put the replica's own weights, if it kept any, back into the module."""
        for name, parameter in self.parameters.items():
            if name in self._own:
                parameter.copy_(self._own[name])
        self._own = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the global model before the last one (equal on all ranks), and the weights of this replica's own."""
        return {
            "previous": {name: tensor.cpu() for name, tensor in self._previous.items()},
            "own": {name: tensor.cpu() for name, tensor in self._own.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; from that of another merge rule, only what the present rule uses."""
        self._previous = dict(state["previous"]) if self.rule.momentum else {}
        self._own = dict(state["own"]) if self.rule.elastic else {}
