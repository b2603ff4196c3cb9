"""What can be compressed: which parameters have gradients that messages can carry, and which an optimizer may train."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

__all__ = ["check_parameters", "check_trained"]


def check_parameters(parameters: Mapping[str, torch.Tensor]) -> None:
    """Check that gradients of these parameters can be compressed.

    Raises:
        ValueError: naming the first that cannot.
    """
    allowed = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    for name, parameter in parameters.items():
        if parameter.dtype not in allowed or parameter.layout != torch.strided:
            raise ValueError(
                f"compression cannot send the gradient of {name}, which is {parameter.dtype} and {parameter.layout}; "
                "allowed are dense parameters of float32, bfloat16, float16 and float64. Set compression=None."
            )


def check_trained(optimizers: Iterable[torch.optim.Optimizer], known: Mapping[torch.Tensor, Any]) -> None:
    """Check that an optimizer trains nothing but what is compressed.

    Raises:
        ValueError: if it does.
    """
    strange = [
        tuple(p.shape)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for p in group["params"]
        if p.requires_grad and p not in known
    ]
    if strange:
        raise ValueError(
            f"sparse_optimizer: the optimizer trains {len(strange)} parameters outside of the module (the first has "
            f"shape {strange[0]}), which get no compressed gradient. Give it the module's, or set "
            "sparse_optimizer=False."
        )
