"""One rank of benchmarks/staleness.py: trains a network whose gradients are large for its computing, in several ways.

Started on every node by the benchmark; not meant to be run by hand.
"""

import argparse
import json
import os
import time
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities.warnings import PossibleUserWarning
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import HeteroDDPStrategy
from lightning_hetero.simulate import ThinLink

torch.set_num_threads(1)
warnings.filterwarnings("ignore", category=PossibleUserWarning)
warnings.filterwarnings("ignore", category=FutureWarning)

STRATEGIES = {
    "ddp": None,
    "hetero_ddp": {},
    "hetero_ddp, staleness=1": {"staleness": 1},
    "hetero_ddp, block_topk": {"compression": "block_topk(density=0.1)"},
    "hetero_ddp, block_topk, staleness=1": {"compression": "block_topk(density=0.1)", "staleness": 1},
}


class Pause(torch.autograd.Function):
    """Computes for so many seconds in the forward and in the backward pass, without any processor."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.seconds = backward
        time.sleep(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None, None


class Paused(nn.Module):
    """A layer that takes its time, 10 ms in the forward pass and 5 ms in the backward pass."""

    def forward(self, x):
        return Pause.apply(x, 0.01, 0.005)


class Perceptron(L.LightningModule):
    """Ten clusters of points; ``depth`` layers of ``width ** 2`` weights, which are nearly all that is sent."""

    def __init__(self, width, depth, activation=nn.ReLU):
        super().__init__()
        torch.manual_seed(0)
        hidden = [layer for _ in range(depth) for layer in (nn.Linear(width, width), activation())]
        self.net = nn.Sequential(*hidden, nn.Linear(width, 10))
        self.losses = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


class Steps(L.Callback):
    """Times every step, and keeps what ranks found out about the link."""

    def __init__(self):
        self.seconds, self.compute, self.delayed, self.seen, self.rate = [], [], [], None, None

    def on_train_start(self, trainer, pl_module):
        self.last = time.perf_counter()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        now = time.perf_counter()
        self.seconds.append(now - self.last)
        self.last = now
        engine = getattr(trainer.strategy, "engine", None)
        if engine is None:
            return
        seen = engine.observations()
        if seen.num_steps and seen is not self.seen:
            self.seen = seen
            self.compute += seen.compute.max(axis=1).tolist()
        if engine.hook_state.staleness is not None:
            self.delayed.append(engine.hook_state.staleness.delayed_share)
            self.rate = engine.hook_state.staleness.link.rate


class Trace(L.Callback):
    """Puts the training on a link that transfers share, with the four layers next to the input delayed all the time.

    Keeps when the transfers of the last steps were ready, sent and there.
    """

    def __init__(self, rate, priority):
        self.rate, self.priority, self.spans = rate, priority, []

    def on_train_start(self, trainer, pl_module):
        staleness = trainer.strategy.engine.hook_state.staleness
        staleness.queue.running = self.priority
        staleness.agree = lambda control: None
        staleness.delay(list(staleness.parameters)[:8])
        self.link = ThinLink(self.rate, trainer.world_size, shared=True).start()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.spans = trainer.strategy.engine.hook_state.staleness.trace()

    def on_train_end(self, trainer, pl_module):
        self.link.stop()

    def rows(self):
        """Medians over the last steps, for each bucket in the order of the backward pass."""
        rows = []
        buckets = sorted({span[1] for span in self.spans})
        for bucket in buckets:
            marks = np.array([span[2:] for span in self.spans if span[1] == bucket])
            ready, sent, there = 1e3 * np.median(marks, axis=0)
            kind = "fresh" if bucket < len(buckets) - 4 else "a step later"
            times = {"ready_ms": ready, "sent_ms": sent, "there_ms": there}
            rows.append({"priority": self.priority, "bucket": bucket, "sum": kind, **times})
        return rows


def data_of(samples, width):
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(10, (samples,), generator=generator)
    centres = torch.randn(10, width, generator=generator)
    x = 0.3 * centres[y] + torch.randn(samples, width, generator=generator)
    return TensorDataset(x, y)


def train(name, settings, args, *callbacks):
    """One short training under a strategy; several may follow one another in the same processes."""
    world = int(os.environ["WORLD_SIZE"])
    steps, module = Steps(), Perceptron(args.width, args.depth, Paused if args.trace else nn.ReLU)
    trainer = L.Trainer(
        strategy="ddp" if settings is None else HeteroDDPStrategy(bucket_cap_mb=args.bucket_mb, **settings),
        accelerator="cpu",
        devices=1,
        num_nodes=world,
        max_steps=args.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[steps, *callbacks],
    )
    data = data_of(20 * args.batch * world, args.width)
    trainer.fit(module, DataLoader(data, args.batch, shuffle=True))
    half = len(steps.seconds) // 2
    return {
        "strategy": name,
        "step_ms": 1e3 * float(np.median(steps.seconds[half:])),
        "compute_ms": 1e3 * float(np.median(steps.compute[len(steps.compute) // 2 :])) if steps.compute else None,
        "delayed_%": 100 * steps.delayed[-1] if steps.delayed else None,
        "link_mbit": 8e-6 * steps.rate if steps.rate else None,
        "loss": float(np.mean(module.losses[-10:])),
        "gradient_mb": 4e-6 * sum(p.numel() for p in module.parameters()),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--bucket-mb", type=float, default=1.0)
    parser.add_argument("--trace", type=float, metavar="MB/S", help="trace transfers on a link of this rate instead")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    launch = dict(os.environ)  # Lightning takes a part of it away at the end of a training
    rows = []
    for name in () if args.trace else STRATEGIES:
        os.environ.update(launch)
        rows.append(train(name, STRATEGIES[name], args))
    for priority in (False, True) if args.trace else ():
        os.environ.update(launch)
        trace = Trace(1e6 * args.trace, priority)
        settings = {"staleness": 1, "local_batch_sizes": [args.batch] * 2, "replan": args.steps + 1}
        step_ms = train(f"priority {priority}", settings, args, trace)["step_ms"]
        rows += [{**row, "step_ms": step_ms} for row in trace.rows()]
    if int(launch["RANK"]) == 0:
        with open(args.out, "w") as file:
            json.dump(rows, file)


if __name__ == "__main__":
    main()
