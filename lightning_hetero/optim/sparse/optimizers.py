"""SGD and AdamW that update only the blocks that a compressed gradient touches, and lose no update of the others.

A gradient comes as :class:`~lightning_hetero.compression.block_gradient.BlockGradient`, straight from the messages;
only parameters and state have the size of the model. Torch's optimizer stays the same object: sparse steps run in its
own hooks, so schedulers, loss scalers and checkpoints work as before.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from lightning_hetero.core.keywords import check_names
from lightning_hetero.optim.sparse.adamw import AdamWRule
from lightning_hetero.optim.sparse.kernel_interface import Group
from lightning_hetero.optim.sparse.lazy_update import LazyUpdate
from lightning_hetero.optim.sparse.sgd import SGDRule
from lightning_hetero.optim.sparse.update_rule import UpdateRule

__all__ = ["RULES", "SparseAdamW", "SparseSGD", "attach_lazy_update"]

RULES: dict[type[torch.optim.Optimizer], type[UpdateRule]] = {
    rule.optimizer_class: rule for rule in (SGDRule, AdamWRule)
}
"""Optimizers that have sparse steps."""

Init = Callable[..., None]


def _signature_of(theirs: type[torch.optim.Optimizer]) -> Callable[[Init], Init]:
    """Show the arguments of another class, and ``pay``, as those of an ``__init__`` that passes them on."""
    parameters = list(inspect.signature(theirs.__init__).parameters.values())
    pay = inspect.Parameter("pay", inspect.Parameter.KEYWORD_ONLY, default="ahead", annotation=str)

    def mark(init: Init) -> Init:
        vars(init)["__signature__"] = inspect.Signature([*parameters, pay], return_annotation=None)
        return init

    return mark


class SparseSGD(torch.optim.SGD):
    """``torch.optim.SGD`` that touches only the blocks of a compressed gradient.

    It takes the arguments of ``torch.optim.SGD`` and ``pay``: whether momentum moves a block that is no longer touched
    ``"ahead"`` or ``"later"``. Steps are dense with dampening, ``maximize`` or a learning rate that is a tensor;
    ``fused=True`` is refused.

    Example:
        >>> p = torch.nn.Parameter(torch.ones(32))
        >>> optimizer = SparseSGD([p], lr=0.1, momentum=0.9)
        >>> p.grad = torch.ones(32)
        >>> optimizer.step()
        >>> round(p[0].item(), 6)
        0.9
    """

    @_signature_of(torch.optim.SGD)
    def __init__(self, *args: Any, pay: str = "ahead", **kwargs: Any) -> None:
        _check_keywords(self, kwargs)
        super().__init__(*args, **kwargs)
        self.sparse = LazyUpdate(self, SGDRule(pay))

    def add_param_group(self, param_group: Group) -> None:
        """Add a group as torch does.

        Raises:
            ValueError: if the group asks for fused steps.
        """
        _refuse_fused(self, param_group)
        super().add_param_group(param_group)


class SparseAdamW(torch.optim.AdamW):
    """``torch.optim.AdamW`` that touches only the blocks of a compressed gradient.

    It takes the arguments of ``torch.optim.AdamW`` and ``pay``: whether the first moment moves a block that is no
    longer touched ``"ahead"`` or ``"later"``. Steps are dense with ``amsgrad``, ``maximize``, ``capturable`` or a
    learning rate that is a tensor; ``fused=True`` is refused.

    Example:
        >>> p = torch.nn.Parameter(torch.ones(32))
        >>> optimizer = SparseAdamW([p], lr=0.1, weight_decay=0.0)
        >>> p.grad = torch.ones(32)
        >>> optimizer.step()
        >>> round(p[0].item(), 6)
        0.9
    """

    @_signature_of(torch.optim.AdamW)
    def __init__(self, *args: Any, pay: str = "ahead", **kwargs: Any) -> None:
        _check_keywords(self, kwargs)
        super().__init__(*args, **kwargs)
        self.sparse = LazyUpdate(self, AdamWRule(pay))

    def add_param_group(self, param_group: Group) -> None:
        """Add a group as torch does.

        Raises:
            ValueError: if the group asks for fused steps.
        """
        _refuse_fused(self, param_group)
        super().add_param_group(param_group)


def _check_keywords(optimizer: torch.optim.Optimizer, given: Group) -> None:
    """Refuse a misspelt keyword; those that exist are in the signature."""
    cls = next(cls for cls in type(optimizer).__mro__ if cls.__module__ == __name__)
    check_names(type(optimizer).__name__, given, list(inspect.signature(cls).parameters))


def _refuse_fused(optimizer: torch.optim.Optimizer, group: Group) -> None:
    """Refuse fused steps: they unscale a loss scaler's gradients by themselves, and know no blocks."""
    if group.get("fused", optimizer.defaults.get("fused")):
        raise ValueError(
            f"{type(optimizer).__name__} cannot go with fused=True: a fused step unscales gradients by itself and "
            "knows no blocks. Leave fused out, or take torch's own optimizer with sparse_optimizer=False."
        )


def attach_lazy_update(optimizer: torch.optim.Optimizer, momentum_mode: str = "ahead") -> LazyUpdate:
    """Give one of torch's own optimizers sparse steps; it stays the same object.

    Raises:
        ValueError: if its class is not in :data:`RULES`, or it has an option that only dense steps support.
    """
    rule = RULES.get(type(optimizer))
    allowed = ", ".join(f"torch.optim.{kind.__name__}" for kind in RULES)
    if rule is None:
        raise ValueError(
            f"{type(optimizer).__name__} has no sparse steps; allowed are {allowed}. Use one of them, or set "
            "sparse_optimizer=False."
        )
    for group in optimizer.param_groups:
        unsupported = "fused=True" if group.get("fused") else rule.unsupported_option(group)
        if unsupported is not None:
            raise ValueError(
                f"sparse steps of {type(optimizer).__name__} cannot go with {unsupported}. Leave it out, or set "
                "sparse_optimizer=False."
            )
    return LazyUpdate(optimizer, rule(momentum_mode))
