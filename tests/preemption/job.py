"""A tiny training that ends only when it is told to, and saves then: ``job.py FOLDER FRONT_END MODE``.

Each rank leaves a file ``rank-N`` with its process number when it has trained a step, and ``ended-N`` with the steps
that it has made when it ends by itself. Checkpoints go to the folder ``saved``.
"""

import logging
import os
import signal
import sys
import time
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from _modes import LIGHTNING, ROUNDS, Regressor, network, points

ENDLESS = 10**9


class Steps:
    """The steps of this rank, as files say them."""

    def __init__(self, folder):
        self.folder, self.count = folder, 0

    def leave(self, name, number):
        """Leave a file that is whole when it is there."""
        whole = self.folder / f".{name}-{os.getpid()}"
        whole.write_text(str(number))
        whole.rename(self.folder / f"{name}-{os.environ.get('RANK', os.environ.get('LOCAL_RANK', '0'))}")

    def add(self):
        self.count += 1
        if self.count == 1:
            self.leave("rank", os.getpid())
        time.sleep(0.001)

    def end(self):
        self.leave("ended", self.count)


def lightning(folder, mode, steps):
    """Lightning's ``Trainer`` with validation and regular checkpoints."""
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

    class Model(Regressor):
        def training_step(self, batch, batch_idx):
            steps.add()
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            self.log("loss", super().training_step(batch, batch_idx), sync_dist=True)

    class Ended(L.Callback):
        def on_exception(self, trainer, pl_module, exception):
            steps.end()

    strategy, callbacks = LIGHTNING[mode]
    saved = OnExceptionCheckpoint(folder / "saved"), ModelCheckpoint(folder / "regular", save_last=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy(),
        max_epochs=ENDLESS,
        callbacks=[*callbacks(), *saved, Ended()],
        default_root_dir=folder,
        val_check_interval=0.5 if mode == "elastic" else 50,  # whose epochs have no number of batches
        limit_val_batches=2,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), DataLoader(points(), 2, shuffle=True), DataLoader(points(), 2))


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


FRONT_ENDS = {one.__name__: one for one in (lightning, fabric, accelerate, transformers, own)}


def main(folder, front_end, mode):
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    FRONT_ENDS[front_end](Path(folder), mode, Steps(Path(folder)))


if __name__ == "__main__":
    main(*sys.argv[1:])
