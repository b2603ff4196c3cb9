"""Kernels of the sparse optimizers compiled and tried before training, for the settings that an optimizer has."""

import inspect
import logging
from typing import Any

import torch

from lightning_hetero.compression.block_gradient import BlockMarks
from lightning_hetero.compression.encoder_choice import reason_of
from lightning_hetero.optim.sparse.lazy_update import SparseSteps
from lightning_hetero.optim.sparse.rules import STEPS

__all__ = ["kernels_work", "warm"]

log = logging.getLogger("lightning_hetero")


def warm(steps: SparseSteps, block: int, device: torch.device) -> None:
    """Take a dense and a sparse step of an optimizer with the same settings, on two small parameters of each type.

    Raises:
        Exception: whatever the compiler or the driver says, if kernels cannot be used here.
    """
    kind = next(kind for kind, its_steps in STEPS.items() if isinstance(steps, its_steps))
    known = inspect.signature(kind).parameters
    for group in steps.optimizer.param_groups:
        if steps.unknown(group) is not None:
            continue  # it takes dense steps
        settings = {name: value for name, value in group.items() if name in known and name != "params"}
        for dtype in {p.dtype for p in group["params"] if p.requires_grad}:
            ones = (torch.ones(n, dtype=dtype, device=device) for n in (16 * block, 3))
            parameters: list[Any] = [torch.nn.Parameter(t) for t in ones]
            _try(kind(parameters, **settings), type(steps), steps.pay, parameters, block)


def _try(
    optimizer: torch.optim.Optimizer, kind: type[SparseSteps], pay: str, parameters: list[Any], block: int
) -> None:
    given: dict[torch.Tensor, Any] = {}
    sparse = kind(optimizer, pay)
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    sparse.follow(lambda: given, block)
    for p in parameters:
        marks = torch.ones(-(-p.numel() // block), dtype=torch.bool, device=p.device)
        given[p] = BlockMarks(marks, torch.ones_like(p))
        p.grad = given[p].grad
    optimizer.step()
    if not all(bool(torch.isfinite(p).all()) for p in parameters):
        raise RuntimeError("a step has made parameters that are not finite")


def kernels_work(steps: SparseSteps, block: int, device: torch.device) -> bool:
    """Whether :func:`warm` goes well; the log says why not."""
    try:
        warm(steps, block, device)
    except Exception as error:  # compiler, driver and linker each raise their own
        name = type(steps.optimizer).__name__
        log.warning("block top-k works on the host: kernels of %s fail on %s: %s", name, device, reason_of(error))
        return False
    return True
