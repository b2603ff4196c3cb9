"""Two workers at each end of a thin link: exchanges over all four against those by way of two leaders (needs root).

Two emulated nodes (``benchmarks/cluster.py``), each with two workers under torchrun and a link of 100 Mbit/s between
them, train one network on the digits. Bytes are what the first node sends over the link.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightning as L
import numpy as np
import torch
from cluster import Cluster, ClusterError, Node
from hardware import write_table
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
from wan import Digits, sent_bytes

from lightning_hetero import HeteroDDPStrategy

HERE = Path(__file__).parent
KINDS = ((None, None), ("auto", None), (None, "block_topk(density=0.01)"), ("auto", "block_topk(density=0.01)"))
WORKERS = 2
MBIT = 100.0


def worker(steps, out):
    """One rank: train as each kind says; rank 0 writes step times and bytes."""
    torch.set_num_threads(1)
    x, y = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(x / 16.0, dtype=torch.float32), torch.tensor(y))
    rows = []
    for hierarchy, compression in KINDS:
        model = Digits(sparse=False)
        strategy = HeteroDDPStrategy(policy="even", hierarchy=hierarchy, compression=compression)
        trainer = L.Trainer(
            accelerator="cpu", devices=WORKERS, num_nodes=2, strategy=strategy, max_steps=steps, max_epochs=-1,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        before = sent_bytes()
        trainer.fit(model, DataLoader(data, 16, shuffle=True))
        rows.append({
            "clusters": str([list(members) for members in strategy.engine.hook_state.topology.clusters]),
            "compression": compression or "none",
            "step_ms": 1e3 * float(np.median(np.diff(model.ends)[5:])),
            "kB_a_step": (sent_bytes() - before) / steps / 1e3,
            "loss": float(np.mean(model.losses[-10:])),
        })  # fmt: skip
    if trainer.is_global_zero:
        Path(out).write_text(json.dumps(rows))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--quick", action="store_true", help="few steps, to see that it works; writes nothing")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    steps = 12 if args.quick else args.steps
    if args.worker:
        worker(steps, args.worker)
        return
    launch = 'exec "$0" -m torch.distributed.run --nnodes=2 --nproc-per-node="$1" --node-rank="$NODE_RANK" '
    launch += '--master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" "${@:2}"'
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = ["bash", "-c", launch, sys.executable, str(WORKERS), str(HERE / "hierarchy.py")]
        command += ["--steps", str(steps), "--worker", str(out)]
        try:
            with Cluster([Node(1.0, MBIT), Node(1.0, MBIT)]) as cluster:
                results = cluster.run(command, timeout=900, echo=False)
        except ClusterError as error:
            raise SystemExit(str(error)) from None
        if any(result.returncode for result in results):
            raise SystemExit("\n".join(result.stdout[-2000:] + result.stderr[-3000:] for result in results))
        rows = json.loads(out.read_text())
        for row in rows:
            row["times_faster"] = rows[0]["step_ms"] / row["step_ms"]
        target = Path(folder) if args.quick else HERE / "results"
        write_table(rows, target / "hierarchy.json", f"two workers at each end of {MBIT:g} Mbit/s")


if __name__ == "__main__":
    main()
