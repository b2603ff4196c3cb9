"""Warm-up of the sparse optimizers' kernels: compiled and tried before training, with an optimizer's settings."""

import inspect
import logging
from collections.abc import Callable

import torch

from lightning_hetero.compression.block_gradient import BlockMarks
from lightning_hetero.compression.encoder_choice import reason_of
from lightning_hetero.optim.sparse.lazy_update import LazyUpdate
from lightning_hetero.optim.sparse.update_rule import UpdateRule

__all__ = ["kernels_work", "warm"]

log = logging.getLogger("lightning_hetero")


def warm(lazy: LazyUpdate, block: int, device: torch.device) -> None:
    """Take a dense and a sparse step of an optimizer with the same settings, on two small parameters of each type.

    Raises:
        Exception: whatever the compiler or the driver says, if kernels cannot be used here.
    """
    dense: Callable[..., torch.optim.Optimizer] = lazy.rule.optimizer_class
    known = inspect.signature(dense).parameters
    for group in lazy.optimizer.param_groups:
        if lazy.rule.unsupported_option(group) is not None:
            continue  # it takes dense steps
        settings = {name: value for name, value in group.items() if name in known and name != "params"}
        for dtype in {p.dtype for p in group["params"] if p.requires_grad}:
            ones = (torch.ones(n, dtype=dtype, device=device) for n in (16 * block, 3))
            parameters = [torch.nn.Parameter(t) for t in ones]
            _try(dense(parameters, **settings), lazy.rule, parameters, block)


def _try(optimizer: torch.optim.Optimizer, rule: UpdateRule, parameters: list[torch.nn.Parameter], block: int) -> None:
    given: dict[torch.Tensor, BlockMarks] = {}
    lazy = LazyUpdate(optimizer, rule)
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    lazy.follow(lambda: given, block)
    for p in parameters:
        marks = torch.ones(-(-p.numel() // block), dtype=torch.bool, device=p.device)
        given[p] = BlockMarks(marks, torch.ones_like(p))
        p.grad = given[p].grad
    optimizer.step()
    if not all(bool(torch.isfinite(p).all()) for p in parameters):
        raise RuntimeError("a step has made parameters that are not finite")


def kernels_work(lazy: LazyUpdate, block: int, device: torch.device) -> bool:
    """Return whether :func:`warm` succeeds; if not, log the reason."""
    try:
        warm(lazy, block, device)
    except Exception as error:  # compiler, driver and linker each raise their own
        name = type(lazy.optimizer).__name__
        log.warning("block top-k works on the host: kernels of %s fail on %s: %s", name, device, reason_of(error))
        return False
    return True
