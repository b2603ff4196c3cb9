"""Find the largest batch of a worker by dry runs before training: forward and backward of growing batches.

Nothing remains of a dry run: parameters are not touched, buffers and random state are put back, gradients and cached
memory are dropped, and what the module logs goes nowhere.
"""

import copy
import gc
import inspect
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from lightning_hetero.hardware import probe_largest_batch

__all__ = ["probe_module"]

log = logging.getLogger("lightning_hetero")

HEADROOM = 0.85
"""Share of the largest batch that is used: optimizer state and fragmentation come later."""


def probe_module(trainer: Any, module: Any, device: torch.device, *, limit: int = 2**16) -> int | None:
    """Samples that fit on this device at a time, with 15 % headroom.

    Args:
        trainer: whose train loader gives the samples.
        module: LightningModule on its device, not wrapped yet.
        device: where it runs; a CPU worker is not probed, because it swaps instead of failing.
        limit: never try more samples.

    Returns:
        The bound, ``None`` on a CPU.

    Raises:
        RuntimeError: if not even one sample fits.
        ValueError: if the loader or the module cannot be tried without training.
    """
    if device.type == "cpu":
        log.info("probe_memory: a CPU worker has no memory bound that could be probed")
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
    bound = largest_training_batch(module, loader, device, limit=limit, precision=trainer.precision_plugin)
    if bound == 0:
        raise RuntimeError(f"not even one sample fits into the memory of {device}. Use a smaller model or precision.")
    return max(1, int(bound * HEADROOM))


def largest_training_batch(
    module: Any, loader: DataLoader, device: torch.device, *, limit: int, precision: Any = None
) -> int:
    """Largest batch of the loader's dataset for which forward and backward run without running out of memory.

    Args:
        module: LightningModule on its device.
        loader: whose dataset and collate function give the batches.
        device: where the module is.
        limit: never try more samples.
        precision: precision plugin under which the module trains, ``None`` for that of its parameters.
    """
    dataset: Any = loader.dataset
    collate = loader.collate_fn or default_collate
    arguments = len(inspect.signature(module.training_step).parameters)

    def runs(size: int) -> bool:
        try:
            batch = collate([dataset[i % len(dataset)] for i in range(size)])
            batch = batch if precision is None else precision.convert_input(batch)
            batch = module.on_before_batch_transfer(batch, 0)
            batch = module.on_after_batch_transfer(module.transfer_batch_to_device(batch, device, 0), 0)
            with nullcontext() if precision is None else precision.train_step_context():
                output = module.training_step(*(batch, 0)[:arguments])
            loss = output["loss"] if isinstance(output, dict) else output
            loss.backward()
        except torch.OutOfMemoryError:
            return False
        finally:
            module.zero_grad(set_to_none=True)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        return True

    with _dry(module, device):
        return probe_largest_batch(runs, start=loader.batch_size or 1, limit=limit)


@contextmanager
def _dry(module: Any, device: torch.device) -> Iterator[None]:
    """Put buffers, mode and random state back; let the module log into the void."""
    buffers = {name: copy.deepcopy(buffer) for name, buffer in module.named_buffers()}
    modes, own = [m.training for m in module.modules()], {name: vars(module).get(name) for name in ("log", "log_dict")}
    devices = [device] if device.type == "cuda" else []
    python, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            module.log = module.log_dict = lambda *args, **kwargs: None
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)
        for name, given in own.items():
            if given is None:
                delattr(module, name)
            else:
                setattr(module, name, given)
        for submodule, mode in zip(module.modules(), modes, strict=True):
            submodule.training = mode
        for name, buffer in module.named_buffers():
            buffer.data.copy_(buffers[name])
