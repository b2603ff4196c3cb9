"""Two clusters with a thin link: step time, time to a target loss, and bytes, for sums and compressors.

Two emulated nodes (``benchmarks/cluster.py``; needs root) stand for the leaders of two clusters. Both train one network
on the digits; between them the link has 100, 500 or 1000 Mbit/s. ``--local`` runs on the loopback, with no limits and
no root; its bytes are those of all that runs on the machine.
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
from cluster import Cluster, ClusterError, Node
from hardware import write_table
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import HeteroDDPStrategy
from lightning_hetero.optim import SparseSGD

HERE = Path(__file__).parent
KINDS = ("none", "fp16", "powersgd", *(f"block_topk(density={d})" for d in (0.1, 0.03, 0.01)), "auto")
TARGET = 0.15


class Digits(L.LightningModule):
    """1.2 million parameters: 0.4 s of a 100 Mbit/s link for a plain sum."""

    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
        self.sparse, self.losses, self.ends = sparse, [], []

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(float(loss.detach()))
        return loss

    def on_train_batch_end(self, *args):
        self.ends.append(time.perf_counter())

    def configure_optimizers(self):
        return (SparseSGD if self.sparse else torch.optim.SGD)(self.parameters(), lr=0.05, momentum=0.9)


def sent_bytes():
    """Bytes that this node's network interfaces have sent; those of the loopback if ranks are one machine's."""
    lines = [line.split(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    sent = {name.strip(): int(values.split()[8]) for name, values in lines}
    loopback = os.environ.get("MASTER_ADDR") == "127.0.0.1"
    return sum(value for name, value in sent.items() if (name == "lo") == loopback)


def worker(kind, steps, out):
    """One rank: train, and write losses, times and bytes."""
    torch.set_num_threads(1)
    x, y = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(x / 16.0, dtype=torch.float32), torch.tensor(y))
    model = Digits(sparse="topk" in kind or kind == "auto")
    strategy = HeteroDDPStrategy(policy="even", compression=None if kind == "none" else kind)
    trainer = L.Trainer(
        accelerator="cpu", devices=1, num_nodes=2, strategy=strategy, max_steps=steps, max_epochs=-1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    before = sent_bytes()
    trainer.fit(model, DataLoader(data, 32, shuffle=True))
    if trainer.is_global_zero:
        record = {"losses": model.losses, "ends": model.ends, "bytes": sent_bytes() - before}
        Path(out).write_text(json.dumps(record))


def measured(record):
    """Step time, time to the target loss, and bytes a step of a run."""
    ends, losses = np.array(record["ends"]), np.array(record["losses"])
    smooth = np.convolve(losses, np.ones(10) / 10, "valid")
    reached = np.flatnonzero(smooth < TARGET)
    seconds = ends[reached[0] + 9] - ends[0] if len(reached) else float("nan")
    return {
        "step_ms": 1e3 * float(np.median(np.diff(ends)[12:])),
        "seconds_to_target": float(seconds),
        "steps_to_target": int(reached[0]) + 10 if len(reached) else None,
        "kB_a_step": record["bytes"] / len(losses) / 1e3,
    }


def run_local(command, port):
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    ranks = [
        subprocess.Popen(command, env={**os.environ, **environment, "RANK": str(r), "NODE_RANK": str(r)})
        for r in range(2)
    ]
    if any(rank.wait(600) for rank in ranks):
        raise SystemExit("a rank failed")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="few steps, to see that it works")
    parser.add_argument("--local", action="store_true", help="on the loopback, with no limit and no root")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--out", default=str(HERE / "results" / "wan.json"))
    parser.add_argument("--worker", nargs=2, metavar=("KIND", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    steps = 30 if args.quick else args.steps
    if args.worker:
        worker(args.worker[0], steps, args.worker[1])
        return
    rows = []
    rates = [0] if args.local else [100] if args.quick else [100, 500, 1000]
    with tempfile.TemporaryDirectory() as folder:
        for rate in rates:
            for i, kind in enumerate(args.kinds):
                out = Path(folder) / f"{rate}-{i}.json"
                command = [sys.executable, __file__, "--steps", str(steps), "--worker", kind, str(out)]
                if args.local:
                    run_local(command, 29850 + i)
                else:
                    with Cluster([Node(1.0, rate), Node(1.0, rate)]) as cluster:
                        results = cluster.run(command, timeout=900, echo=False)
                    if any(result.returncode for result in results):
                        raise SystemExit("\n".join(result.stderr for result in results))
                rows.append({"mbit": rate, "compression": kind, **measured(json.loads(out.read_text()))})
    write_table(rows, args.out, f"two clusters, digits, target loss {TARGET}")


if __name__ == "__main__":
    try:
        main()
    except ClusterError as error:
        raise SystemExit(str(error)) from error
