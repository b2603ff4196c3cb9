"""Requirements on models and optimizers: gradients that can be sent, and weights that stay equal on all ranks."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from lightning_hetero.comm.agreement.backends import backend_of
from lightning_hetero.config import HeteroConfig

__all__ = ["check_parameters", "check_rescaled", "check_sparse_gradients", "check_trained", "warn_of_untrained"]

log = logging.getLogger("lightning_hetero")


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


def check_sparse_gradients(module: nn.Module, config: HeteroConfig, hook: Any = None) -> None:
    """Check that the run can send the sparse gradients of a module (``nn.Embedding(sparse=True)``), if it has any.

    Plain sums over gloo can, as under DDP, and so may a communication hook of the user's own.

    Args:
        module: whose parameters are trained.
        config: settings of the engine.
        hook: communication hook inside of ours, ``None`` for plain sums.

    Raises:
        ValueError: naming the first parameter with sparse gradients, and the setting that cannot send them.
    """
    sparse = [
        f"{name}.weight".lstrip(".")
        for name, part in module.named_modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse and part.weight.requires_grad
    ]
    if not sparse:
        return
    names = ("compression", "hierarchy", "sparse_optimizer", "staleness")
    settings = {name: getattr(config, name) for name in names}
    if getattr(hook, "__module__", "").startswith(allreduce_hook.__module__.rpartition(".")[0]):
        settings["ddp_comm_hook"] = None if hook is allreduce_hook else hook.__name__
    name, given = next(((name, value) for name, value in settings.items() if value), ("", None))
    if name:
        sender, cure = f"{name}={given!r}", f"leave {name} out"
    elif (backend := backend_of(next(module.parameters()).device)) == "gloo":
        return
    else:
        sender, cure = f"the {backend} backend", "use process_group_backend='gloo'"
    raise ValueError(
        f"{sender} cannot send sparse gradients, and {sparse[0]} has them (nn.Embedding(sparse=True)). Plain sums over "
        f"gloo can. Set sparse=False there, or {cure}."
    )


def check_rescaled(module: nn.Module) -> None:
    """Check that no forward pass changes weights depending on its rank's own batch.

    Raises:
        ValueError: naming the first embedding with ``max_norm``, whose forward pass rescales the rows it looks up.
    """
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None and part.weight.requires_grad:
            raise ValueError(
                f"{name or type(part).__name__} has max_norm={part.max_norm}: its forward pass rescales the rows that "
                "the rank's own batch looks up, so that ranks would train different models. Set max_norm=None, and "
                "rescale all rows before each batch (under Lightning in on_train_batch_start): "
                f"weight.data.renorm_({part.norm_type}, 0, {part.max_norm})."
            )


def warn_of_untrained(optimizers: Iterable[torch.optim.Optimizer], module: nn.Module | None) -> None:
    """Warn after a backward pass of parameters that have a gradient but no optimizer.

    Nobody zeroes such a gradient, so it grows from step to step, and its blocks displace those of other parameters.
    """
    known = {p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    names = () if module is None else module.named_parameters()
    strange = [name for name, p in names if p.grad is not None and p not in known]
    if strange:
        log.warning(
            "block top-k: no optimizer has %s%s, whose gradient is sent all the same, and takes a larger share of what "
            "is sent in every step. Freeze what is not trained: requires_grad_(False).",
            strange[0],
            f" and {len(strange) - 1} other parameters" if len(strange) > 1 else "",
        )


def check_trained(optimizers: Iterable[torch.optim.Optimizer], known: Mapping[torch.Tensor, Any]) -> None:
    """Check that the optimizers train only parameters whose gradients are compressed.

    Raises:
        ValueError: if they train others.
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
