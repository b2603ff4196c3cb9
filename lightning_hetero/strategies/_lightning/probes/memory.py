"""Largest batch of a worker, found before training by dry runs: forward and backward of growing batches.

A dry run leaves no trace: parameters are not touched, buffers and random state are restored, gradients and cached
memory are dropped, and logged values are discarded. Workers try different sizes, so nothing in a dry run may wait for
another worker: batch normalization is local, and a gathered tensor is this worker's own, repeated.
"""

import copy
import gc
import inspect
import logging
import random
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, IterableDataset, default_collate

from lightning_hetero.callbacks import AdaptiveBatchCallback
from lightning_hetero.callbacks._lightning import LightningModule, Trainer, callbacks_of
from lightning_hetero.config import HeteroConfig
from lightning_hetero.frontend.loaders import sample_count
from lightning_hetero.hardware import is_out_of_memory, probe_largest_batch

if TYPE_CHECKING:
    from lightning.pytorch.plugins.precision import Precision

__all__ = ["SETTINGS", "ProbeSettings", "probe_module", "swapped"]

log = logging.getLogger("lightning_hetero")


@dataclass(frozen=True)
class ProbeSettings:
    """Limits of the dry runs.

    Args:
        used_share: share of the largest batch that is used, because memory fragments later.
        max_samples: largest number of samples to try.
        optimizer_copies: assumed copies of the trained parameters in the optimizer's state, as for Adam; the optimizer
            itself is not known yet.
    """

    used_share: float = 0.85
    max_samples: int = 2**16
    optimizer_copies: int = 2


SETTINGS = ProbeSettings()


def probe_module(trainer: Trainer, module: LightningModule, device: torch.device, config: HeteroConfig) -> int | None:
    """Return how many samples fit on this device, with 15 % headroom, beside what training allocates later.

    Args:
        trainer: trainer whose train loader gives the samples.
        module: LightningModule on its device, not wrapped yet.
        device: device of the module; a CPU worker is not probed, because it swaps instead of failing.
        config: settings of the strategy, which say what else will need memory.

    Returns:
        The bound; ``None`` on a CPU, and if more fits than any plan can ask for.

    Raises:
        RuntimeError: if not even one sample fits.
        ValueError: if the loader or the module cannot run outside training.
    """
    if device.type == "cpu":
        return None
    loader = trainer.fit_loop._data_source.dataloader()
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise ValueError(
            "probe_memory=True needs one train DataLoader over a map-style dataset; give max_local_batch_sizes."
        )
    if not module.automatic_optimization:
        raise ValueError(
            "probe_memory=True cannot try a training_step that runs its own optimizers, because it would train; give "
            "max_local_batch_sizes."
        )
    moves_total = any(isinstance(callback, AdaptiveBatchCallback) for callback in callbacks_of(trainer))
    total = SETTINGS.max_samples if moves_total or loader.batch_size is None else loader.batch_size * trainer.world_size
    unit = config.local_batch_multiple
    limit = max(1, min(total, sample_count(loader), SETTINGS.max_samples) // unit) * unit
    reserved = later_bytes(module, config)
    bound = largest_training_batch(
        *(module, loader, device),
        limit=limit,
        precision=trainer.precision_plugin,
        reserved=reserved,
        world_size=trainer.world_size,
        multiple=unit,
    )
    if bound == 0:
        raise RuntimeError(
            f"not even {'one sample' if unit == 1 else f'local_batch_multiple={unit} samples'} fits into the memory "
            f"of {device} beside {reserved / 2**20:.0f} MiB for gradient buckets, optimizer state and what the "
            "strategy keeps. Use a smaller model or precision."
        )
    if bound == limit:
        log.info("probe_memory: %d samples, more than which no plan can give a worker, fit on %s", limit, device)
        return None
    return max(unit, int(bound * SETTINGS.used_share))


def later_bytes(module: torch.nn.Module, config: HeteroConfig) -> int:
    """Count the bytes that training allocates after the dry runs: buckets, optimizer state, residuals, stale sums.

    Example:
        >>> later_bytes(torch.nn.Linear(9, 10), HeteroConfig())
        1200
        >>> later_bytes(torch.nn.Linear(9, 10), HeteroConfig(staleness=1))
        2000
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    own, elements = sum(p.numel() * p.element_size() for p in trained), sum(p.numel() for p in trained)
    compressed = config.compression is not None  # a residual and a sum, in float32
    return (1 + SETTINGS.optimizer_copies + 2 * (config.staleness > 0)) * own + 2 * 4 * elements * compressed


def largest_training_batch(
    module: LightningModule,
    loader: DataLoader,
    device: torch.device,
    *,
    limit: int,
    precision: "Precision | None" = None,
    reserved: int = 0,
    world_size: int = 1,
    multiple: int = 1,
) -> int:
    """Find the largest batch of the loader's dataset for which forward and backward do not run out of memory.

    Args:
        module: LightningModule on its device.
        loader: loader whose dataset and collate function give the batches.
        device: device of the module.
        limit: most samples to try.
        precision: precision plugin under which the module trains, ``None`` for the precision of its parameters.
        reserved: bytes to occupy meanwhile, for what training allocates later.
        world_size: number of workers whose tensors ``self.all_gather`` of the module returns in training.
        multiple: samples of which each size that is tried is a multiple.
    """
    dataset: Any = loader.dataset
    collate = loader.collate_fn or default_collate
    arguments = len(inspect.signature(module.training_step).parameters)

    def runs(units: int) -> bool:
        try:
            batch = collate([dataset[i % len(dataset)] for i in range(units * multiple)])
            batch = batch if precision is None else precision.convert_input(batch)
            batch = module.on_before_batch_transfer(batch, 0)
            batch = module.on_after_batch_transfer(module.transfer_batch_to_device(batch, device, 0), 0)
            with nullcontext() if precision is None else precision.train_step_context():
                output = module.training_step(*(batch, 0)[:arguments])
            loss: Any = output["loss"] if isinstance(output, dict) else output
            loss.backward()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return False
        finally:
            module.zero_grad(set_to_none=True)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        return True

    with _dry(module, device, world_size):
        try:
            ballast = torch.empty(reserved, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            return 0
        start = max((loader.batch_size or 1) // multiple, 1)
        found = probe_largest_batch(runs, start=start, limit=limit // multiple)
        del ballast
        return found * multiple


@contextmanager
def _dry(module: torch.nn.Module, device: torch.device, world_size: int) -> Iterator[None]:
    """Restore buffers, mode and random state; inside, the module's logs are discarded and it waits for no worker."""
    buffers = {name: copy.deepcopy(buffer) for name, buffer in module.named_buffers()}
    modes = [m.training for m in module.modules()]
    devices = [device] if device.type == "cuda" else []
    python, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices), ExitStack() as stack:
            for owner, name, value in _stand_ins(module, world_size):
                stack.enter_context(swapped(owner, name, value))
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)
        for submodule, mode in zip(module.modules(), modes, strict=True):
            submodule.training = mode
        for name, buffer in module.named_buffers():
            buffer.data.copy_(buffers[name])


def _stand_ins(module: torch.nn.Module, world_size: int) -> Iterator[tuple[Any, str, Any]]:
    """Yield the owner, name and stand-in of each method that is replaced in a dry run."""

    def nothing(*args: object, **kwargs: object) -> None:
        """Discard logged values."""

    def all_gather(data: Any, group: object = None, sync_grads: bool = False) -> Any:
        return apply_to_collection(data, torch.Tensor, lambda mine: torch.stack([mine] * world_size))

    yield module, "log", nothing
    yield module, "log_dict", nothing
    if world_size > 1:
        yield module, "all_gather", all_gather
    for submodule in module.modules():
        if isinstance(submodule, torch.nn.SyncBatchNorm):
            yield submodule, "forward", types.MethodType(_BatchNorm.forward, submodule)


@contextmanager
def swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an object another attribute inside the context."""
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
