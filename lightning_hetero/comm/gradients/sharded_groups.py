"""Parameter groups of a model under FSDP2: what they wait for, and whether their gradients were weighted.

``fully_shard`` divides parameters into groups. A group gathers its parameters before the forward and the backward pass
of its modules, and averages their gradients afterwards, each rank its shard: ``sum_i (W b_i / B) g_i / W = sum_i r_i
g_i`` (C eq. 9), because the weight ``W b_i / B`` is in the gradient since the loss entered backward. Each of these
collectives waits for the slowest rank, so all ranks seem equally fast. Marks around them tell waiting from computing.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_hetero.comm.gradients.averager import DDPMean
from lightning_hetero.comm.gradients.ddp_hook import HookState

__all__ = ["ReduceScatterMean", "ShardedGroups", "groups_of"]

WAITS = ("unshard", "wait_for_unshard")
"""Methods of a group that wait for parameters of other ranks: on CPU the first, on GPU the second."""
REDUCES = "post_backward"
"""Method of a group that reduces its gradients."""


class ReduceScatterMean(DDPMean):
    """The averager of sharded models: FSDP averages by itself, and nothing can take its place."""

    shards = True


class ShardedGroups:
    """Watcher of the parameter groups of one model; the object that acts after its backward passes.

    Args:
        module: model whose sub-modules ``fully_shard`` has sharded.
        hook: state of the gradients, which knows whether the loss of the running backward pass was weighted.
        maximum: starts an in-place maximum of a host tensor over all ranks, and returns its work.
    """

    def __init__(self, module: nn.Module, hook: HookState, maximum: Callable[[torch.Tensor], Any]) -> None:
        self._hook, self._maximum = hook, maximum
        self._reduced = self._holds = False
        hook.use(ReduceScatterMean(hook.world_size))
        self._groups = groups_of(module)
        self._have: set[Any] = set()
        self._filled: dict[Any, bool] = {}
        for group in self._groups:
            self._watch(group)

    def _watch(self, group: Any) -> None:
        """Put marks around the collectives of a group, in place of those of an earlier run."""
        for name in WAITS:
            setattr(group, name, self._timed(_plain(group, name)))
        reduce, timer = _plain(group, REDUCES), self._hook.observer
        num_bytes = sum(map(_gradient_bytes, group.fsdp_params))

        @functools.wraps(reduce)
        def post_backward(*unused: Any) -> None:
            if group.reduce_grads and self._fill(group):
                self._hook.begin_reduction(num_bytes)
                self._reduced = True
            with timer.waiting():
                reduce(*unused)

        setattr(group, REDUCES, post_backward)

    def _fill(self, group: Any) -> bool:
        """Give zeros to parameters of a group without a gradient, if another parameter of it has one on this rank.

        A group sends the gradients that a rank has in one message, without names. If ranks had gradients of different
        parameters, one parameter would get the gradient of another.

        Returns:
            Whether a parameter of the group has a gradient, so that the group reduces.
        """
        have, without = _have_gradients(group)
        if not have:
            return False
        self._have.update(have)
        for param in without if self._hook.world_size > 1 else ():
            self._filled.setdefault(param, param.sharded_param.grad is None)
            p = param.unsharded_param
            p.grad = torch.zeros_like(p)
            if any(other.unsharded_accumulated_grad is not None for other in have):
                param.to_accumulated_grad_if_needed()  # to the dtype that the others wait in for this reduction
        return True

    def _empty(self) -> None:
        """Take the zeros away again from parameters that had a gradient on no rank; a collective call.

        The optimizer would otherwise decay them, and move them by their momentum, which one process does not do.
        """
        have, filled = self._have, self._filled
        self._have, self._filled = set(), {}
        if self._hook.world_size == 1:
            return
        params = [param for group in self._groups for param in group.fsdp_params]
        used = torch.tensor([param in have for param in params], dtype=torch.uint8)
        with self._hook.observer.excluded():
            self._maximum(used).wait()
        for param, anywhere in zip(params, used.tolist(), strict=True):
            if not anywhere and filled.get(param):
                p = param.sharded_param
                p.grad = None

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        timer = self._hook.observer

        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with timer.waiting():
                return method(*args, **kwargs)

        return timed

    def release(self) -> None:
        """Take the marks away: the module may be trained in another way from now on."""
        for group in self._groups:
            for name in (*WAITS, REDUCES):
                vars(group).pop(name, None)

    def accumulate(self, holds: bool) -> None:
        """Say whether the optimizer waits for further backward passes, whose gradients are added to this one's."""
        self._holds = holds

    def after_backward(self) -> None:
        """Count the step, if the backward pass was its last one and gradients were reduced; a collective call."""
        self._empty()
        reduced, self._reduced = self._reduced, False
        if reduced and not self._holds:
            self._hook.observer.reduced()


def _have_gradients(group: Any) -> tuple[list[Any], list[Any]]:
    """Return the trained parameters of a group with and without a gradient on this rank."""
    trained = [p for p in group.fsdp_params if hasattr(p, "_unsharded_param") and p.unsharded_param.requires_grad]
    have = [p for p in trained if p.unsharded_param.grad is not None or p.unsharded_accumulated_grad is not None]
    return have, [p for p in trained if p not in have]


def groups_of(module: nn.Module) -> list[Any]:
    """Return the parameter groups of a module and its sub-modules, in the order of the sub-modules."""
    groups: dict[int, Any] = {}
    for part in module.modules():
        state = getattr(part, "_get_fsdp_state", None)
        if state is None:
            continue
        found = getattr(state(), "_fsdp_param_groups", None)
        if found is None:  # torch before 2.12 has one group, or none
            found = [group for group in (state()._fsdp_param_group,) if group is not None]
        groups |= {id(group): group for group in found}
    return list(groups.values())


def _plain(group: Any, name: str) -> Callable[..., Any]:
    """Return a method of the group as torch defines it."""
    method: Callable[..., Any] = getattr(type(group), name).__get__(group)
    return method


def _gradient_bytes(param: Any) -> int:
    """Return the bytes of the whole gradient of a sharded parameter, 0 if it has none."""
    sharded = param.sharded_param
    return int(sharded.nbytes) if sharded.requires_grad else 0
