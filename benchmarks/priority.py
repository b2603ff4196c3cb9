"""The way of every gradient bucket over a thin link, with and without earliest deadline first.

Two processes of this machine share a link that is emulated in the process, and layers that only wait stand for
computing. With ``staleness=1`` the sums of the four layers next to the input are delayed in every step. The table says
when each bucket was ready, when its sum set out, and when it was there, from the first gradient of a step; without the
rule delayed sums set out as soon as they are ready and share the link with those that the step awaits.

    python benchmarks/priority.py                # a link of 100 MB/s
    python benchmarks/priority.py --rate 50
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightning as L
import numpy as np
import torch
from hardware import write_table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import HeteroDDPStrategy
from lightning_hetero.simulate import ThinLink

HERE = Path(__file__).parent
WIDTH, DEPTH, BATCH, DELAYED = 512, 7, 8, 4


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
    """Layers of ``WIDTH ** 2`` weights, which are nearly all that is sent."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        hidden = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), Paused())]
        self.net = nn.Sequential(*hidden, nn.Linear(WIDTH, 10))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


class Trace(L.Callback):
    """Puts the training on the link, with the same layers delayed all the time; keeps times of steps and transfers."""

    def __init__(self, rate, priority):
        self.rate, self.priority, self.ends, self.spans = rate, priority, [], []

    def on_train_start(self, trainer, pl_module):
        staleness = trainer.strategy.engine.hook_state.staleness
        staleness.queue.running = self.priority
        staleness.control_externally(True)
        staleness.make_stale(list(staleness.parameters)[: 2 * DELAYED])
        self.link = ThinLink(self.rate, trainer.world_size, shared=True).start()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.ends.append(time.perf_counter())
        self.spans = trainer.strategy.engine.hook_state.staleness.trace()

    def on_train_end(self, trainer, pl_module):
        self.link.stop()

    def rows(self):
        """Medians over the last steps, for each bucket in the order of the backward pass."""
        step_ms = 1e3 * float(np.median(np.diff(self.ends)[len(self.ends) // 2 :]))
        rows = []
        buckets = sorted({span[1] for span in self.spans})
        for bucket in buckets:
            marks = np.array([span[2:] for span in self.spans if span[1] == bucket])
            ready, sent, there = 1e3 * np.median(marks, axis=0)
            kind = "fresh" if bucket < len(buckets) - DELAYED else "a step later"
            times = {"ready_ms": ready, "sent_ms": sent, "there_ms": there}
            rows.append({"priority": self.priority, "bucket": bucket, "sum": kind, **times, "step_ms": step_ms})
        return rows


def worker(rate, steps, out):
    """One rank: train without and with the rule, and write what happened."""
    torch.set_num_threads(1)
    launch = dict(os.environ)  # Lightning takes a part of it away at the end of a training
    data = TensorDataset(torch.randn(40 * BATCH, WIDTH), torch.randint(10, (40 * BATCH,)))
    rows = []
    for priority in (False, True):
        os.environ.update(launch)
        trace = Trace(1e6 * rate, priority)
        trainer = L.Trainer(
            strategy=HeteroDDPStrategy(bucket_cap_mb=0.5, staleness=1, local_batch_sizes=[BATCH] * 2, replan=steps + 1),
            accelerator="cpu", devices=1, num_nodes=2, max_steps=steps, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=[trace],
        )  # fmt: skip
        trainer.fit(Perceptron(), DataLoader(data, BATCH, shuffle=True))
        rows += trace.rows()
    if trainer.is_global_zero:
        Path(out).write_text(json.dumps(rows))


def traced(rate, steps):
    """Rows of both orders, from two processes of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, __file__, "--rate", str(rate), "--steps", str(steps), "--worker", str(out)]
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
        ranks = [
            subprocess.Popen(command, env={**os.environ, **common, "RANK": str(r), "NODE_RANK": str(r)})
            for r in range(2)
        ]
        if any(rank.wait(600) for rank in ranks):
            raise SystemExit("a rank failed")
        return json.loads(out.read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=100.0, metavar="MB/S", help="of the link")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--worker", metavar="OUT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.rate, args.steps, args.worker)
    else:
        rows = traced(args.rate, args.steps)
        write_table(rows, HERE / "results" / "priority.json", f"transfers of gradient buckets at {args.rate:g} MB/s")


if __name__ == "__main__":
    main()
