"""Arguments, callbacks and ways to shard a model that ``hetero_fsdp`` refuses by name, with what to do instead."""

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from lightning_hetero.callbacks import GNSCallback, LookAheadCallback
from lightning_hetero.callbacks._lightning import is_named
from lightning_hetero.callbacks.adaptive_batch import AdaptiveBatchCallback
from lightning_hetero.comm.gradients.sharded_groups import groups_of
from lightning_hetero.probe_job import VARIABLE

__all__ = [
    "check_ranks",
    "layout",
    "refuse_arguments",
    "shard_settings",
    "unsupported_callback",
    "unsupported_sharding",
    "unsupported_trainer",
    "unsupported_training",
    "wrapped_classes",
]

_DDP = "Leave it out, or use strategy='hetero_ddp' if the model fits on every worker"
REFUSED = {
    "compression": f"FSDP sums shards of gradients by itself, so that nothing else can send them. {_DDP}.",
    "hierarchy": f"FSDP sums gradients over its own device mesh. Leave it out: replicate_size=... is FSDP's own "
    f"hierarchy, which sums shards inside each replica first. {_DDP}.",
    "sparse_optimizer": f"it needs the blocks that block top-k sends, and FSDP sends whole gradients. {_DDP}.",
    "staleness": f"FSDP waits for all gradients in their own step. {_DDP}.",
    "transfer_priority": f"it orders stale gradients, and FSDP has none. {_DDP}.",
    "probe_memory": "the memory of a sharded model depends on all workers at once, so one worker cannot try it alone. "
    "Give the bounds: max_local_batch_sizes=[...].",
    "ddp_comm_hook": f"there is no DDP whose hook it could be. {_DDP}.",
    "find_unused_parameters": "FSDP needs no such search. Leave it out; use each block on all ranks or on none.",
    "static_graph": "it is an argument of DDP. Leave it out.",
    "gradient_as_bucket_view": "it is an argument of DDP. Leave it out.",
    "bucket_cap_mb": "it is an argument of DDP; FSDP sends one message per block, so give auto_wrap_policy={Block}.",
    "start_method": "FSDP's processes are started by the script itself, as with ModelParallelStrategy. Leave it out.",
    "sharding_strategy": "it belongs to FSDP1, and hetero_fsdp is for FSDP2. 'FULL_SHARD' is the default; for "
    "'SHARD_GRAD_OP' give reshard_after_forward=False, for 'HYBRID_SHARD' replicate_size=<number of replicas>.",
    "cpu_offload": "it belongs to FSDP1, and hetero_fsdp is for FSDP2. Call fully_shard(..., "
    "offload_policy=CPUOffloadPolicy()) in configure_model.",
    "activation_checkpointing_policy": "it belongs to FSDP1. Call torch.utils.checkpoint.checkpoint in the model.",
    "state_dict_type": "it belongs to FSDP1. Give save_distributed_checkpoint=True ('sharded') or False ('full').",
    "mixed_precision": "it belongs to FSDP1. Give mp_policy=MixedPrecisionPolicy(...), or Trainer(precision=...).",
}
"""Arguments of other strategies, each with the reason and what to do instead."""

_NOISE = (
    "needs the gradient of each worker, and FSDP only shows shards of their sum. Leave it out, or use "
    "strategy='hetero_ddp' if the model fits on every worker"
)
_COPY = "copies the whole model, which FSDP does not allow for shards. Leave it out, or use strategy='hetero_ddp'"


def refuse_arguments(strategy: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Refuse arguments of other strategies, and settings that FSDP cannot have.

    Returns:
        The other arguments; one that was turned off anyway is left out.

    Raises:
        ValueError: naming the first, with the reason and what to do instead.

    Example:
        >>> refuse_arguments("HeteroFSDPStrategy", {"staleness": 0, "timeout": None})
        {'timeout': None}
    """
    for name, reason in REFUSED.items():
        if given.get(name):
            raise ValueError(f"{strategy}({name}={given[name]!r}): {reason}")
    if given.get("on_nonfinite", "ignore") != "ignore":
        raise ValueError(
            f"{strategy}(on_nonfinite={given['on_nonfinite']!r}): each rank sees only its shards of a gradient. Leave "
            "it at 'ignore'; gradient_clip_val limits large gradients."
        )
    if given.get("tensor_parallel_size", "auto") not in ("auto", 1):
        raise ValueError(
            f"{strategy}(tensor_parallel_size={given['tensor_parallel_size']}): ranks that share a layer need the same "
            "batch, and hetero_fsdp gives each rank its own. Set tensor_parallel_size=1, or use Lightning's "
            "ModelParallelStrategy with equal batches."
        )
    return {name: value for name, value in given.items() if name not in (*REFUSED, "on_nonfinite")}


def wrapped_classes(given: Any) -> tuple[type[nn.Module], ...] | None:
    """Return the classes of the blocks that ``auto_wrap_policy`` gives.

    Raises:
        TypeError: if they are no classes of modules.
    """
    if given is None:
        return None
    kinds = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str | type) else (given,)
    if isinstance(given, type) or not all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in kinds):
        raise TypeError(
            f"auto_wrap_policy={given!r} must be a set of classes of modules, such as {{Block}}; functions belong to "
            "FSDP1."
        )
    return kinds


def shard_settings(reshard_after_forward: Any, mp_policy: Any) -> dict[str, Any]:
    """Return the arguments of ``fully_shard`` by name.

    Raises:
        TypeError: if one has the wrong type.
    """
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool | int):
        raise TypeError(f"reshard_after_forward={reshard_after_forward!r} must be True, False, a number, or None.")
    if mp_policy is not None and not isinstance(mp_policy, MixedPrecisionPolicy):
        raise TypeError(
            f"mp_policy={mp_policy!r} must be a torch.distributed.fsdp.MixedPrecisionPolicy, such as "
            "MixedPrecisionPolicy(param_dtype=torch.bfloat16)."
        )
    return {"reshard_after_forward": reshard_after_forward, "mp_policy": mp_policy}


def layout(module: nn.Module, kinds: Iterable[type] | None, given: Mapping[str, Any]) -> str:
    """Return what has to be equal on all ranks before a module is sharded, as a short text."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    shapes = [(name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad) for name, tensor in tensors]
    names = sorted(kind.__name__ for kind in kinds or ())
    return f"{len(shapes)} tensors, checksum {zlib.crc32(repr(shapes).encode()):08x}, {names=}, {dict(given)}"


def check_ranks(world: int, replicate_size: int, data_parallel_size: int | str) -> None:
    """Check that so many ranks can hold the replicas of a model.

    Raises:
        ValueError: if their number is no multiple of the replicas, or not ``data_parallel_size``.
    """
    if world % replicate_size:
        raise ValueError(f"replicate_size={replicate_size} does not divide {world} workers. Give a number that does.")
    if data_parallel_size not in ("auto", world):
        raise ValueError(
            f"data_parallel_size={data_parallel_size} is not the number of workers, {world}. Leave it out; "
            "replicate_size says how many replicas of the model they have."
        )


def unsupported_callback(callbacks: Iterable[Any]) -> str | None:
    """Return why one of the callbacks cannot run on a sharded model, with advice; ``None`` if all can."""
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, GNSCallback | AdaptiveBatchCallback | LookAheadCallback):
            return f"{name} {_NOISE}"
        if is_named(callback, "StochasticWeightAveraging") or is_named(callback, "WeightAveraging"):
            return f"{name} {_COPY}"
        if is_named(callback, "LearningRateFinder"):
            return (
                f"{name} goes back to a checkpoint that lacks settings of the sharded optimizer, so that torch cannot "
                "read it. Leave it out, and find the learning rate on one process"
            )
    return None


def unsupported_trainer(strategy: Any, environment: Mapping[str, str]) -> str | None:
    """Return why a strategy cannot train with the settings of its trainer, with advice; ``None`` if it can.

    Args:
        strategy: strategy with its plugins.
        environment: environment variables.
    """
    if VARIABLE in environment:
        return (
            f"the environment variable {VARIABLE} orders a probe training with compressed gradients, which sharded "
            f"models do not have. Unset it to train: unset {VARIABLE}. Profile with strategy='hetero_ddp'"
        )
    if getattr(strategy.precision_plugin, "scaler", None) is not None:
        return (
            "precision='16-mixed' scales the loss, and ranks would leave out different steps, because each checks only "
            "its shards. Use precision='bf16-mixed'"
        )
    if strategy._layer_sync is not None:
        return (
            "sync_batchnorm=True is not applied to sharded models. Leave it out, and call "
            "nn.SyncBatchNorm.convert_sync_batchnorm(model) in configure_model before fully_shard"
        )
    return None


def unsupported_sharding(module: nn.Module, world_size: int) -> str | None:
    """Return why gradients of a module would not be the mean over all ranks, with advice; ``None`` if they will.

    Args:
        module: module after it was sharded.
        world_size: number of ranks.
    """
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse and part.weight.requires_grad:
            return f"{name} has sparse gradients, which FSDP does not average. Set sparse=False there"
    alone = [name for name, p in module.named_parameters() if p.requires_grad and not isinstance(p, DTensor)]
    if alone:
        return (
            f"the parameter {alone[0]} is not sharded, so that no gradient of other ranks would reach it. Call "
            "fully_shard in configure_model on a module that has it, or leave all sharding to hetero_fsdp"
        )
    for group in groups_of(module):
        size = group.mesh_info.mesh.size()
        if size != world_size:
            return (
                f"fully_shard was given a mesh of {size} of {world_size} ranks, so that the others would train another "
                "model. Give it mesh=self.trainer.strategy.data_parallel_mesh"
            )
        if group.gradient_divide_factor is not None:
            return (
                f"set_gradient_divide_factor({group.gradient_divide_factor}) replaces the mean over ranks, which the "
                "weights of the losses rest on. Leave it out"
            )
    return None


def unsupported_training(module: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> str | None:
    """Return why an optimizer would train a parameter on each rank apart, with advice; ``None`` if none does.

    Optimizers hold shards, also while the module holds gathered parameters. What has no shard was frozen at the start
    of the run, or was not there.
    """
    for parameter in (p for one in optimizers for group in one.param_groups for p in group["params"]):
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            name = next((name for name, p in module.named_parameters() if p is parameter), "of an optimizer")
            return (
                f"the parameter {name} is trained from now on, and it is not sharded, so that no gradient of other "
                "ranks would reach it. Let fully_shard have it before the training: create it in __init__, as a part "
                "of an nn.Module that uses it in forward, and freeze it after that. Or use strategy='hetero_ddp' if "
                "the model fits on every worker"
            )
    return None
