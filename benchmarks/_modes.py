"""A tiny training on two ranks in each mode and each front end, for benchmarks that watch what a training leaves.

``train(mode, steps, after_step)`` trains one model for so many steps and calls ``after_step(number, model)`` on this
rank after each of them. Sync rounds come every 20 steps, much more often than by default. Each rank is placed as a
machine of its own with one device, so that both can share one GPU over gloo.
"""

import logging
import os
import tempfile
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import (
    AdaptiveBatchCallback,
    BlockTopK,
    GNSCallback,
    HeteroDDPStrategy,
    HeteroElasticStrategy,
    HeteroFSDPStrategy,
)

SAMPLES, BATCH = 2000, 2
ROUND = 20
ROUNDS = {"replan": ROUND}
GLOO = {"process_group_backend": "gloo"}  # NCCL has one rank on each GPU
TOPK = {"compression": BlockTopK(density=0.3, block=8, warmup_steps=20)}

LIGHTNING = {  # strategy, callbacks
    "ddp": (lambda: DDPStrategy(**GLOO), list),
    "plain": (lambda: ours(), list),
    "even": (lambda: HeteroDDPStrategy(policy="even", **GLOO), list),
    "block top-k": (lambda: ours(**TOPK), list),
    "powersgd": (lambda: ours(compression="powersgd"), list),
    "stale": (lambda: ours(staleness=1), list),
    "stale block top-k": (lambda: ours(**TOPK, staleness=1), list),
    "hierarchy": (lambda: ours(hierarchy=[[0], [1]]), list),
    "noise scale": (lambda: ours(), lambda: [GNSCallback(every_n_steps=1)]),
    "adaptive": (lambda: ours(), lambda: [AdaptiveBatchCallback(16)]),
    "skip": (lambda: ours(on_nonfinite="skip"), list),
    "elastic": (lambda: HeteroElasticStrategy(mega_batch_size=80, **GLOO), list),
    "fsdp": (lambda: HeteroFSDPStrategy(**ROUNDS, **GLOO), list),
}


def ours(**settings):
    return HeteroDDPStrategy(**ROUNDS, **GLOO, **settings)


def settle(rank, port=None):
    """Make this process one of two ranks, as the machine of that number."""
    os.environ.update(RANK=str(rank), NODE_RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="1")
    if port is not None:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def placed(device):
    """Where a trainer of Lightning trains."""
    return {"accelerator": "gpu" if device == "cuda" else "cpu", "devices": 1, "num_nodes": 2}


def quiet():
    """One thread, no warnings about small data, no log lines."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning_hetero", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def points():
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(SAMPLES, 5, generator=generator), torch.randn(SAMPLES, 1, generator=generator))


class Regressor(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = network()

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


class AfterStep(L.Callback):
    def __init__(self, call):
        self.call, self.steps = call, 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps += 1
        self.call(self.steps, pl_module)


def lightning(mode, steps, after_step, model, device):
    """By Lightning's ``Trainer``; elastic ranks count the steps of their own, of which there are some more."""
    strategy, callbacks = LIGHTNING[mode]
    trainer = L.Trainer(
        **placed(device),
        strategy=strategy(),
        max_steps=-1 if mode == "elastic" else steps,
        max_epochs=-(-steps * 3 * BATCH // SAMPLES) if mode == "elastic" else -1,
        callbacks=[*callbacks(), AfterStep(after_step)],
        default_root_dir=tempfile.gettempdir(),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model or Regressor(), DataLoader(points(), BATCH, shuffle=True))


def passes(loader, steps):
    """Batches of so many steps, over as many epochs."""
    done = 0
    while True:
        for batch in loader:
            yield batch
            done += 1
            if done == steps:
                return


def fabric(mode, steps, after_step, model, device):
    """By a loop of Lightning Fabric."""
    from lightning.fabric import Fabric

    from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy as FabricStrategy

    fabric = Fabric(**placed(device), strategy=FabricStrategy(**GLOO))
    fabric.launch()
    own = model or network()
    model, optimizer = fabric.setup(own, torch.optim.SGD(own.parameters(), lr=1e-3))
    loader = fabric.setup_dataloaders(DataLoader(points(), BATCH, shuffle=True))
    for number, (x, y) in enumerate(passes(loader, steps), 1):
        fabric.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        after_step(number, own)
    fabric.strategy.teardown()


def accelerate(mode, steps, after_step, model, device):
    """By a loop of Accelerate."""
    from accelerate import InitProcessGroupKwargs

    from lightning_hetero.accelerate import HeteroAccelerator, HeteroPlugin

    accelerator = HeteroAccelerator(
        cpu=device == "cpu",
        hetero_plugin=HeteroPlugin(**ROUNDS),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )
    own = model or network()
    loader = DataLoader(points(), BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=1e-3), loader)
    for number, (x, y) in enumerate(passes(loader, steps), 1):
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        after_step(number, own)
    accelerator.free_memory()  # further trainings may follow, unlike after end_training


def transformers(mode, steps, after_step, model, device):
    """By Transformers' ``Trainer``."""
    from transformers import PrinterCallback, TrainerCallback, TrainingArguments

    from lightning_hetero.transformers import HeteroTrainer, hetero_arguments

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, x, labels):
            return {"loss": nn.functional.mse_loss(self.net(x), labels)}

    own = model or Loss()

    class Told(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            after_step(state.global_step, own)

    arguments = hetero_arguments(TrainingArguments)(
        output_dir=tempfile.gettempdir(),
        use_cpu=device == "cpu",
        per_device_train_batch_size=BATCH,
        max_steps=steps,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        ddp_backend="gloo",
        hetero_replan=20,
    )
    rows = [{"x": x, "labels": y} for x, y in points()]
    trainer = HeteroTrainer(own, arguments, train_dataset=rows, callbacks=[Told()])
    trainer.remove_callback(PrinterCallback)
    trainer.train()


FRONT_ENDS = {"fabric": fabric, "accelerate": accelerate, "transformers": transformers}
MODES = (*LIGHTNING, *FRONT_ENDS)


def train(mode, steps, after_step, model=None, device="cpu"):
    """Train by a mode of ``MODES`` on this rank, and call ``after_step(number, model)`` after each step.

    Args:
        device: ``cpu``, or ``cuda`` for the first GPU, on both ranks.
    """
    FRONT_ENDS.get(mode, lightning)(mode, steps, after_step, model, device)
