"""A tiny training that ends only when it is told to, and saves then: ``job.py FOLDER FRONT_END MODE``.

Each rank leaves a file ``rank-N`` with its process number when it has trained a step, and ``ended-N`` with the steps
that it has made when it ends by itself. Checkpoints go to the folder ``saved``.
"""

import faulthandler
import logging
import os
import signal
import sys
import time
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ENDLESS = 10**9
ROUNDS = {"replan": 20}
TOPK = {"compression": "block_topk"}
SLURMS = signal.SIGUSR1
"""Signal by which SLURM asks to requeue, by default."""


def hetero(**settings):
    from lightning_hetero import HeteroDDPStrategy

    return HeteroDDPStrategy(**ROUNDS, **settings), []


def adaptive():
    from lightning_hetero import AdaptiveBatchCallback

    strategy, _ = hetero()
    return strategy, [AdaptiveBatchCallback(16)]


def elastic():
    from lightning_hetero import HeteroElasticStrategy

    return HeteroElasticStrategy(mega_batch_size=40), []


def fsdp():
    from lightning_hetero import HeteroFSDPStrategy

    return HeteroFSDPStrategy(**ROUNDS), []


MODES = {
    "plain": hetero,
    "block top-k": lambda: hetero(**TOPK),
    "stale": lambda: hetero(staleness=1),
    "stale block top-k": lambda: hetero(**TOPK, staleness=1),
    "hierarchy": lambda: hetero(hierarchy=[[0], [1]]),
    "adaptive": adaptive,
    "elastic": elastic,
    "fsdp": fsdp,
}


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def points(samples=200):
    return TensorDataset(torch.randn(samples, 5), torch.randn(samples, 1))


class Steps:
    """The steps of this rank, as files say them."""

    def __init__(self, folder):
        self.folder, self.count = folder, 0

    def add(self):
        self.count += 1
        if self.count == 1:
            whole = self.folder / f".rank-{os.getpid()}"
            whole.write_text(str(os.getpid()))
            whole.rename(self.folder / f"rank-{os.environ.get('RANK', os.environ.get('LOCAL_RANK', '0'))}")
        time.sleep(0.001)

    def end(self):
        (self.folder / f"ended-{os.environ.get('RANK', os.environ.get('LOCAL_RANK', '0'))}").write_text(str(self.count))


def lightning(folder, mode, steps):
    """Lightning's ``Trainer`` with validation and regular checkpoints."""
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

    class Model(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def training_step(self, batch, batch_idx):
            steps.add()
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def validation_step(self, batch, batch_idx):
            self.log("loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)

    class Ended(L.Callback):
        def on_exception(self, trainer, pl_module, exception):
            steps.end()

    strategy, callbacks = MODES[mode]()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=ENDLESS,
        callbacks=[
            *callbacks,
            OnExceptionCheckpoint(folder / "saved"),
            ModelCheckpoint(folder / "regular", save_last=True),
            Ended(),
        ],
        default_root_dir=folder,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), DataLoader(points(), 2, shuffle=True), DataLoader(points(8), 2))


def fabric(folder, mode, steps):
    from lightning.fabric import Fabric

    told = []
    fabric = Fabric(accelerator="cpu", devices=2, strategy="hetero_ddp")
    fabric.launch()
    signal.signal(signal.SIGTERM, lambda *_: told.append(True))
    net = network()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=1e-3))
    loader = fabric.setup_dataloaders(DataLoader(points(), 2, shuffle=True))
    while True:
        for x, y in loader:
            fabric.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            steps.add()
            if fabric.all_reduce(torch.tensor(len(told)), reduce_op="sum") > 0:
                fabric.save(folder / "saved" / "fabric.ckpt", {"model": model, "optimizer": optimizer})
                steps.end()
                return


def accelerate(folder, mode, steps):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    signal.signal(signal.SIGTERM, lambda *_: accelerator.set_trigger())
    net = network()
    loader = DataLoader(points(), 2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1e-3), loader)
    while True:
        for x, y in loader:
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            steps.add()
            if accelerator.check_trigger():
                accelerator.save_state(folder / "saved")
                steps.end()
                accelerator.end_training()
                return


def transformers(folder, mode, steps):
    from transformers import TrainerCallback, TrainingArguments, trainer_jit_checkpoint

    from lightning_hetero.transformers import HeteroTrainer, hetero_arguments

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, x, labels):
            steps.add()
            return {"loss": nn.functional.mse_loss(self.net(x), labels)}

    class Ended(TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            steps.end()

    before = trainer_jit_checkpoint.CheckpointManager.__init__
    trainer_jit_checkpoint.CheckpointManager.__init__ = lambda self, trainer: before(self, trainer, kill_wait=0.1)
    arguments = hetero_arguments(TrainingArguments)(
        output_dir=str(folder / "saved"),
        use_cpu=True,
        per_device_train_batch_size=2,
        max_steps=ENDLESS,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        ddp_backend="gloo",
        enable_jit_checkpoint=True,
        **{f"hetero_{name}": value for name, value in ROUNDS.items()},
    )
    rows = [{"x": x, "labels": y} for x, y in points()]
    HeteroTrainer(Loss(), arguments, train_dataset=rows, callbacks=[Ended()]).train()


def own(folder, mode, steps):
    """A loop of one's own on the engine."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from lightning_hetero.comm import gradient_hook
    from lightning_hetero.config import HeteroConfig
    from lightning_hetero.data import PermutationStream
    from lightning_hetero.engine import HeteroEngine
    from lightning_hetero.session import HeteroSession

    told = []
    dist.init_process_group("gloo")
    signal.signal(signal.SIGTERM, lambda *_: told.append(True))
    rank, data = dist.get_rank(), points()
    engine = HeteroEngine(HeteroConfig(**ROUNDS), rank=rank, world_size=2, device=torch.device("cpu"))
    session = HeteroSession(engine)
    loader = DataLoader(data, batch_sampler=session.shard(PermutationStream(len(data), shuffle=True, seed=0), 2))
    model = DistributedDataParallel(network())
    model.register_comm_hook(engine.hook_state, gradient_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    while True:
        for x, y in session.steps(lambda: iter(loader)):
            with engine.backward():
                engine.scale_loss(nn.functional.mse_loss(model(x), y)).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.add()
            flag = torch.tensor(len(told))
            dist.all_reduce(flag)
            if flag > 0:
                if rank == 0:
                    (folder / "saved").mkdir()
                    torch.save(model.module.state_dict(), folder / "saved" / "own.ckpt")
                steps.end()
                session.close()
                dist.destroy_process_group()
                return


def deaf(folder, mode, steps):
    """Does not end when it is told to."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        steps.add()


def careless(folder, mode, steps):
    """Ends at once, and saves nothing."""
    while True:
        steps.add()


FRONT_ENDS = {one.__name__: one for one in (lightning, fabric, accelerate, transformers, own, deaf, careless)}


def main(folder, front_end, mode):
    with open(Path(folder) / f"stacks-{os.getpid()}", "w") as stacks:
        faulthandler.register(signal.SIGUSR2, file=stacks)
        torch.set_num_threads(1)
        warnings.filterwarnings("ignore")
        for name in ("lightning.pytorch", "lightning.fabric"):
            logging.getLogger(name).setLevel(logging.WARNING)
        FRONT_ENDS[front_end](Path(folder), mode, Steps(Path(folder)))


if __name__ == "__main__":
    main(*sys.argv[1:])
