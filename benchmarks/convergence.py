"""Samples that a small transformer needs under block top-k, against dense sums, on the text of Python's manual.

Two processes of this machine train a language model of 110 thousand parameters on the characters of
``pydoc_data.topics``, which comes with Python. The first dense training decides on the target: its validation loss at
its end; that with SGD on the target of all with SGD. Every other training may take 1.3 times its samples; the learning
rate falls in a line to 0 over the whole of each. Counted is the first evaluation at which the target is reached.
Nothing is timed.

    python benchmarks/convergence.py            # all settings, several seeds: tens of minutes
    python benchmarks/convergence.py --quick    # few steps, to see that it works

Results go to ``benchmarks/results/convergence.json``.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from _language_workload import adamw, sgd, train
from hardware import write_table
from lightning.fabric import Fabric

from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy

RESULTS = Path(__file__).parent / "results" / "convergence.json"
WORLD, SEQUENCES, STEPS, LONGEST, RATE = 2, 16, 1000, 1.3, {"AdamW": 0.003, "SGD": 0.1}
OPTIMIZERS = {"AdamW": adamw, "SGD": sgd}
FINE = {"block": 1, "scores": "balanced"}
KINDS = {
    "dense": (None, 1),
    "dense, twice the rate": (None, 2),
    "1 %": ({"density": 0.01}, 1),
    "1 %, elements, balanced, twice the rate": ({"density": 0.01, **FINE}, 2),
    "5 %, balanced, twice the rate": ({"density": 0.05, "scores": "balanced"}, 2),
    "10 %, balanced, twice the rate": ({"density": 0.1, "scores": "balanced"}, 2),
    "1 %, elements, twice the rate": ({"density": 0.01, "block": 1}, 2),
    "1 %, elements, balanced": ({"density": 0.01, **FINE}, 1),
    "2 %, balanced, twice the rate": ({"density": 0.02, "scores": "balanced"}, 2),
    "1 %, balanced, twice the rate": ({"density": 0.01, "scores": "balanced"}, 2),
    "5 %, twice the rate": ({"density": 0.05}, 2),
    "SGD, dense": (None, 1),
    "SGD, 10 %": ({"density": 0.1}, 1),
    "SGD, 10 %, dense steps": ({"density": 0.1, "sparse": False}, 1),
    "SGD, 10 %, deferred": ({"density": 0.1, "sparse": "later"}, 1),
    "SGD, 30 %": ({"density": 0.3}, 1),
    "SGD, 30 %, dense steps": ({"density": 0.3, "sparse": False}, 1),
    "SGD, 1 %": ({"density": 0.01}, 1),
    "SGD, dense, three times the rate": (None, 3),
    "SGD, 10 %, three times the rate": ({"density": 0.1}, 3),
}
"""Settings of ``BlockTopK``, with sparse steps of the optimizer, and a factor of the learning rate."""


def optimizer_of(kind):
    return "SGD" if kind.startswith("SGD") else "AdamW"


def target_of(kind):
    """The dense training that a kind is compared with."""
    return "SGD, dense" if optimizer_of(kind) == "SGD" else "dense"


def samples_to(target, curve):
    """Samples at the first evaluation that is at the target, ``None`` if there is none."""
    return next((samples for samples, loss in curve if loss <= target), None)


def run(kind, steps, seed, port):
    """One training on two processes: its losses on rank 0."""
    settings, factor = KINDS[kind]
    settings = dict(settings or {})
    sparse = settings.pop("sparse", bool(settings))
    text = "block_topk(" + ", ".join(f"{k}={v!r}" for k, v in settings.items()) + ")" if settings else None
    optimizer = optimizer_of(kind)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "curve.json"
        work = json.dumps([text, sparse, optimizer, factor * RATE[optimizer], steps, seed, str(out)])
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(WORLD), "LOCAL_RANK": "0"}
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--worker", work],
                env={**os.environ, **place, "RANK": str(rank), "NODE_RANK": str(rank)},
            )
            for rank in range(WORLD)
        ]
        codes = [rank.wait(1200) for rank in ranks]
        if any(codes):
            raise SystemExit(f"a rank failed in {kind!r}")
        return json.loads(out.read_text())


def worker(work):
    """One rank of a training."""
    torch.set_num_threads(1)
    text, sparse, optimizer, rate, steps, seed, out = json.loads(work)
    # An even split, so that a busy machine changes nothing.
    strategy = HeteroDDPStrategy(policy="even", compression=text, sparse_optimizer=sparse)
    fabric = Fabric(accelerator="cpu", devices=1, num_nodes=WORLD, strategy=strategy)
    fabric.launch()
    curve = train(fabric, rate, steps, seed, sequences=SEQUENCES, optimizer=OPTIMIZERS[optimizer])
    if fabric.is_global_zero:
        Path(out).write_text(json.dumps(curve))


def mean_loss(losses):
    mean = statistics.mean(losses)
    return mean if math.isfinite(mean) else None


def row(kind, curves, dense):
    """What a kind of training needed, means over seeds; ``None`` where a seed did not reach its target.

    A training that diverged has no loss.
    """
    shares = [
        None if (reached := samples_to(target[-1][1], curve)) is None else reached / target[-1][0]
        for curve, target in zip(curves, dense, strict=True)
    ]
    return {
        "kind": kind,
        "rate": KINDS[kind][1] * RATE[optimizer_of(kind)],
        "seeds": len(curves),
        "samples_over_dense": None if None in shares else statistics.mean(shares),
        "worst_seed": None if None in shares else max(shares),
        "loss_above_dense": mean_loss(c[-1][1] - d[-1][1] for c, d in zip(curves, dense, strict=True)),
        "loss": mean_loss(curve[-1][1] for curve in curves),
        "samples": curves[0][-1][0],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help="of the dense training")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="few steps, to see that it works")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--port", type=int, default=29750)
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the results go")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker)
        return
    steps, seeds = (20, 1) if args.quick else (args.steps, args.seeds)
    dense, rows = {}, []
    for kind in dict.fromkeys(both for one in args.kinds for both in (target_of(one), one)):
        length = steps if KINDS[kind][0] is None else int(LONGEST * steps)
        curves = [run(kind, length, seed, args.port) for seed in range(seeds)]
        target = dense.setdefault(target_of(kind), curves)
        rows.append(row(kind, curves, target))
        title = f"a language model on {WORLD} workers, {steps} steps if dense"
        write_table(rows, args.json, title)  # so far: the whole takes long


if __name__ == "__main__":
    main()
