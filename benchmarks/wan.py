"""Two clusters with a thin link: step time, time to a target loss, and bytes, for sums, compressors and the controller.

Two emulated nodes (``benchmarks/cluster.py``; needs root), of a core and of 0.6 of a core, stand for the leaders of two
clusters. Both train one network on the digits. Between them the link has 100, 500 or 1000 Mbit/s, or (``--trace``) a
rate between 50 and 600 Mbit/s that changes every few seconds. The step is compared with one that is computing only:
the same training in which nothing is exchanged and nobody waits, and then of each step the time of the slower node, who
would be waited for on a link that is free. Batches are of a size at which a dense step on the thinnest link takes a
little over 20 times that. It has the split that fits the shares of a core; on links of steady rates so have all others
but ``ddp``. On the thinnest link brief trainings take turns three times, and medians count. The processor time of a
step on each node, which waiting for the link does not lengthen, is given as well.

On the link that fluctuates, dense sums and the controller train with several seeds besides, of model, order of
samples and trace, for one number of steps. That shows how much of the dense loss the controller has after the same
samples, with its scatter (``wan_trace_loss.json``), how soon after a change of the link its density and split move, and
whether they go back while the link is the same (``wan_trace_link.json``; all steps are in ``wan_trace.steps.json``).

    python benchmarks/wan.py            # links of steady rates
    python benchmarks/wan.py --trace    # a link that fluctuates
    python benchmarks/wan.py --local    # on the loopback, with no limits and no root; bytes are all of the machine's
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightning as L
import numpy as np
import torch
from _following import changes, following
from cluster import Cluster, ClusterError, Node
from hardware import write_table
from lightning.pytorch.callbacks import Timer
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

from lightning_hetero import HeteroDDPStrategy, LookAheadCallback, TTACallback
from lightning_hetero.optim import SparseSGD

HERE = Path(__file__).parent
NOTHING_SENT, FREE = "computing only", "dense, free link"
KINDS = {
    NOTHING_SENT: {"ddp_comm_hook": noop_hook},
    FREE: {},
    "ddp": None,
    "hetero_ddp": {},
    "fp16": {"compression": "fp16"},
    "powersgd": {"compression": "powersgd"},
    "density 0.1": {"compression": "block_topk(density=0.1)"},
    "density 0.01": {"compression": "block_topk(density=0.01)"},
    "density 0.003": {"compression": "block_topk(density=0.003)"},
    "density 0.003, late": {"compression": "block_topk(density=0.003)", "staleness": 1},
    "density 0.1, late": {"compression": "block_topk(density=0.1)", "staleness": 1},
    "density 0.01, late": {"compression": "block_topk(density=0.01)", "staleness": 1},
    "density 0.01, late, look-ahead": {
        "compression": "block_topk(density=0.01)",
        "staleness": 1,
        "callbacks": {"look_ahead": {}},
    },
    "dense, late": {"staleness": 1, "transfer_priority": True},
    "dense, late, no priority": {"staleness": 1},
    "dense, late, look-ahead": {"staleness": 1, "transfer_priority": True, "callbacks": {"look_ahead": {}}},
    "auto": {"compression": "auto"},
    "controller": {"compression": "block_topk(density=0.1)", "callbacks": {"tta": {}}},
    "controller, late": {"compression": "block_topk(density=0.1)", "staleness": 1, "callbacks": {"tta": {}}},
    "controller, idle rule": {"compression": "block_topk(density=0.1)", "callbacks": {"tta": {"bandwidth": "idle"}}},
}
"""Settings of the strategy; ``None`` is Lightning's own DDP. ``callbacks`` are made by :data:`CALLBACKS`."""


CALLBACKS = {"tta": TTACallback, "look_ahead": LookAheadCallback}
OF_RATES = (
    NOTHING_SENT,
    "ddp",
    "hetero_ddp",
    "fp16",
    "powersgd",
    "density 0.1",
    "density 0.01",
    "density 0.003",
    "auto",
    "density 0.01, late",
    "density 0.01, late, look-ahead",
)
OF_TRACE = (
    NOTHING_SENT,
    "ddp",
    "hetero_ddp",
    "dense, late",
    "dense, late, no priority",
    "dense, late, look-ahead",
    "powersgd",
    "density 0.1",
    "controller",
    "controller, late",
)
"""What is run by default, in ten minutes each."""
OF_SEEDS = (FREE, "controller")
"""What is run with several seeds on the link that fluctuates; that of a dense sum makes no difference to its loss."""
SHARES = (1.0, 0.6)
BATCH, SPLIT = 56, (70, 42)
PASSES = 3
"""Passes over the digits in an epoch, at the end of which ranks meet."""
TRACE_MBIT, TRACE_SECONDS, TRACE_SEED = (50.0, 600.0), 4.0, 1
TARGET = 0.15
KEPT_OUT = 297
"""Digits that no training sees."""
MARKS = (100, 200, 400, 800)
"""Steps after which all digits are looked at; a step has the same samples in all trainings of a seed. The last one ends
those with several seeds."""
BRIEF = 10.0
"""Seconds of a training that is repeated on the thinnest link."""


class Digits(L.LightningModule):
    """1.2 million parameters: 0.4 s of a 100 Mbit/s link for a plain sum."""

    def __init__(self, sparse, digits, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
        self.sparse, self.losses, self.ends, self.spent, self.densities, self.splits = sparse, [], [], [], [], []
        self.digits, self.paused, self.marks = digits, 0.0, []

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(float(loss.detach()))
        return loss

    def on_train_batch_end(self, *args):
        self.ends.append(time.time() - self.paused)
        self.spent.append(time.process_time())
        engine = getattr(self.trainer.strategy, "engine", None)
        exchange = None if engine is None or engine.compression is None else engine.compression.averager
        self.densities.append(getattr(exchange, "density", None))
        self.splits.append(None if engine is None else engine.plan.local_batch_sizes)
        if self.trainer.global_step in MARKS:
            self.look()

    @torch.no_grad()
    def look(self):
        """Mean loss of the digits that are trained on, and of those that are not, apart from the time of steps."""
        begin = time.time()
        x, y = self.digits.tensors
        losses = nn.functional.cross_entropy(self.net(x), y, reduction="none")
        self.marks.append([float(part.mean()) for part in (losses[:-KEPT_OUT], losses[-KEPT_OUT:])])
        self.paused += time.time() - begin

    def configure_optimizers(self):
        return (SparseSGD if self.sparse else torch.optim.SGD)(self.parameters(), lr=0.05, momentum=0.9)


def sent_bytes():
    """Bytes that this node's network interfaces have sent; those of the loopback if ranks are one machine's."""
    lines = [line.split(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    sent = {name.strip(): int(values.split()[8]) for name, values in lines}
    loopback = os.environ.get("MASTER_ADDR") == "127.0.0.1"
    return sum(value for name, value in sent.items() if (name == "lo") == loopback)


def worker(kind, steps, seconds, trace, seed, out):
    """One rank: train, and write losses, times and bytes."""
    torch.set_num_threads(1)
    x, y = load_digits(return_X_y=True)
    order = np.arange(len(x))
    np.random.default_rng(seed).shuffle(order[:-KEPT_OUT])
    digits = TensorDataset(torch.tensor(x[order] / 16.0, dtype=torch.float32), torch.tensor(y[order]))
    data = TensorDataset(*(part[:-KEPT_OUT] for part in digits.tensors))
    settings = None if KINDS[kind] is None else dict(KINDS[kind])
    callbacks = [] if settings is None else [CALLBACKS[n](**a) for n, a in settings.pop("callbacks", {}).items()]
    if settings is not None and (kind == NOTHING_SENT or not trace):
        settings["local_batch_sizes"] = SPLIT
    model = Digits(
        sparse=settings is not None and ("block" in (c := settings.get("compression") or "") or c == "auto"),
        digits=digits,
        seed=seed,
    )
    callbacks.append(Timer({"seconds": seconds}, interval="epoch"))  # ranks meet for it, so not in every step
    trainer = L.Trainer(
        accelerator="cpu", devices=1, num_nodes=2, max_steps=steps, max_epochs=-1, logger=False, callbacks=callbacks,
        strategy="ddp" if settings is None else HeteroDDPStrategy(**settings),
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    before = sent_bytes()
    trainer.fit(model, DataLoader(ConcatDataset([data] * PASSES), BATCH, shuffle=True))
    record = {name: getattr(model, name) for name in ("losses", "ends", "spent", "densities", "splits", "marks")}
    file_of(out, trainer.global_rank).write_text(json.dumps({**record, "bytes": sent_bytes() - before}))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an interpreter that ends, after a training by plain DDP that went well


def file_of(out, rank):
    """What a rank writes."""
    return Path(f"{out}.{rank}")


def seconds_of(records, kind):
    """Of each step but the first, by the clock of rank 0; where nobody waits for anybody those of the slower rank."""
    steps = [np.diff(record["ends"]) for record in (records if kind == NOTHING_SENT else records[:1])]
    fewest = min(map(len, steps))
    return np.max([seconds[:fewest] for seconds in steps], axis=0)


def measured(record, seconds, compare):
    """Step time, time to the target loss, mean loss over the second half of ``compare`` steps, and bytes of a step."""
    ends, losses = np.cumsum([0.0, *seconds]), np.array(record["losses"])[: len(seconds) + 1]
    smooth = np.convolve(losses, np.ones(10) / 10, "valid")
    reached = np.flatnonzero(smooth < TARGET)
    row = {
        "steps": len(losses),
        "step_ms": 1e3 * float(np.median(seconds[12:])),
        "mean_step_ms": 1e3 * float(np.mean(seconds[12:])),
        "seconds_to_target": float(ends[reached[0] + 9] - ends[0]) if len(reached) else float("nan"),
        "steps_to_target": int(reached[0]) + 10 if len(reached) else None,
        f"loss_to_{compare}": float(np.mean(losses[compare // 2 : compare]))
        if len(losses) >= compare
        else float("nan"),
        "kB_a_step": record["bytes"] / len(losses) / 1e3,
    }
    for mark, (trained_on, kept_out) in zip(MARKS, record["marks"], strict=False):
        row |= {f"loss_at_{mark}": trained_on, f"kept_out_at_{mark}": kept_out}
    densities = [density for density in record["densities"] if density is not None]
    if densities:
        row |= {"density_min": min(densities), "density_max": max(densities), "density_end": densities[-1]}
        row["density_changes"] = sum(a != b for a, b in itertools.pairwise(densities))
    return row


def run_local(command, port):
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    ranks = [
        subprocess.Popen(command, env={**os.environ, **environment, "RANK": str(r), "NODE_RANK": str(r)})
        for r in range(2)
    ]
    if any(rank.wait(600) for rank in ranks):
        raise SystemExit("a rank failed")


class Fluctuation(threading.Thread):
    """Changes the rate of all links of a cluster every few seconds, the same way for a seed; keeps when and to what."""

    def __init__(self, cluster, seed):
        super().__init__(daemon=True)
        self.cluster, self.seed, self.ended, self.rates = cluster, seed, threading.Event(), []

    def run(self):
        rng = np.random.default_rng(TRACE_SEED + self.seed)
        while not self.ended.wait(TRACE_SECONDS):
            mbit = round(float(np.exp(rng.uniform(*np.log(TRACE_MBIT)))), 1)
            for rank in range(len(self.cluster.nodes)):
                self.cluster.set_link(rank, mbit)
            self.rates.append((time.time(), mbit))

    def stop(self):
        self.ended.set()
        self.join()


def run_cluster(command, mbit, seed, args):
    """Run on emulated nodes; ``mbit=None`` is the trace. Returns when the link had which rate."""
    first = TRACE_MBIT[1] if mbit is None else mbit
    nodes = [Node(share, first) for share in SHARES]
    with Cluster(nodes, subnet=args.subnet, port=args.port) as cluster:
        fluctuation = Fluctuation(cluster, seed) if mbit is None else None
        if fluctuation is not None:
            fluctuation.start()
        try:
            results = cluster.run(command, timeout=900, echo=False)
        finally:
            if fluctuation is not None:
                fluctuation.stop()
    if any(result.returncode for result in results):
        raise SystemExit("\n".join(result.stderr[-3000:] for result in results))
    return [] if fluctuation is None else fluctuation.rates


def trained(kind, mbit, steps, seconds, args, seed=0):
    """One training: its row, and what was seen of every step."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        options = ["--steps", str(steps), "--seconds", str(seconds), *(["--trace"] if args.trace else [])]
        command = [sys.executable, __file__, *options, "--seed", str(seed), "--worker", kind, str(out)]
        rates = run_local(command, args.port) if args.local else run_cluster(command, mbit, seed, args)
        records = [json.loads(file_of(out, rank).read_text()) for rank in range(2)]
    record, seconds = records[0], seconds_of(records, kind)
    spent = [1e3 * float(np.median(np.diff(each["spent"])[12:])) for each in records]
    row = {"kind": kind, "seconds": float(seconds.sum()), **measured(record, seconds, min(steps, 100))}
    row |= {f"processor_ms_{rank}": spent[rank] for rank in range(2)}
    begin = record["ends"][0]
    return row, {
        "kind": kind,
        "seed": seed,
        "mbit_since": [[round(moment - begin, 3), rate] for moment, rate in rates or ()],
        "ends": [round(moment - begin, 3) for moment in record["ends"]],
        "density_from_step": changes(record["densities"]),
        "split_from_step": changes(record["splits"]),
    }


def medians(rows):
    """One row of those of several trainings of a kind."""
    numbers = {
        name: [row[name] for row in rows if row[name] is not None]
        for name, value in rows[0].items()
        if isinstance(value, int | float)
    }
    return {**rows[0], **{name: float(np.median(values)) for name, values in numbers.items()}, "rounds": len(rows)}


def by_step(found, steps):
    """Values of each step, of those where they changed."""
    values, begins = [value for _, value in found], [step for step, _ in found]
    return [values[np.searchsorted(begins, step, side="right") - 1] for step in range(steps)]


def followed(trace):
    """Row of one training: how soon density and the faster node's share of the batch moved after the link did."""
    moments, turns = trace["ends"], [moment for moment, _ in trace["mbit_since"]]
    density = by_step(trace["density_from_step"], len(moments))
    share = [sizes[0] / sum(sizes) for sizes in by_step(trace["split_from_step"], len(moments))]
    seen = {"density": following(moments, density, turns), "split": following(moments, share, turns)}
    row = {"kind": trace["kind"], "seed": trace["seed"], "link_changes": seen["density"]["link"]}
    names = {"moves": "changes", "first": "first_s", "last": "last_s", "back": "taken_back"}
    row |= {f"{what}_{name}": seen[what][key] for what in seen for key, name in names.items()}
    late = [value for moment, value in zip(moments, share, strict=True) if moment > TRACE_SECONDS]
    return row | {
        "density_least": min(density),
        "density_end": density[-1],
        "share_least_later": min(late, default=float("nan")),
        "share_most_later": max(late, default=float("nan")),
    }


def losses_over_dense(rows):
    """Rows by mark: how much of the dense loss of its seed the controller has, in the mean and with the scatter."""
    table = []
    for mark in MARKS:
        row = {"steps": mark, "seeds": len(rows[FREE])}
        for what in ("loss", "kept_out"):
            dense, other = (np.array([r.get(f"{what}_at_{mark}", np.nan) for r in rows[kind]]) for kind in OF_SEEDS)
            row |= {f"{what}_dense": dense.mean(), f"{what}_controller": other.mean()}
            ratio = other / dense
            names = {"over_dense": ratio.mean(), "scatter": ratio.std(), "least": ratio.min(), "most": ratio.max()}
            row |= {f"{what}_{name}": value for name, value in names.items()}
        table.append(row)
    return table


def on_steady_links(kinds, steps, args):
    """Rows of all links and kinds."""
    rows, computing = [], float("nan")
    mbits = [0] if args.local else [100] if args.quick else [100, 500, 1000]
    rounds = 1 if args.quick or args.local else args.rounds
    for mbit in mbits:
        found = {}
        for turn in range(rounds if mbit == mbits[0] else 1):
            for kind in kinds:
                if (kind == NOTHING_SENT and mbit != mbits[0]) or (turn and found[kind][0]["seconds"] > BRIEF):
                    continue
                row, _ = trained(kind, mbit, steps, args.seconds or 60, args)
                found.setdefault(kind, []).append(row)
        of_rate = [{"mbit": str(mbit), **medians(found[kind])} for kind in found]
        computing = over_computing(of_rate, computing)
        rows += of_rate
    return rows


def over_computing(rows, computing=float("nan")):
    """Say in every row what a step takes over one that is computing only; what that takes, if it was not known."""
    computing = next((row["mean_step_ms"] for row in rows if row["kind"] == NOTHING_SENT), computing)
    for row in rows:
        row["over_computing"] = row["mean_step_ms"] / computing
    return computing


def on_the_trace(kinds, args):
    """Rows of all kinds; those of several seeds by mark; what was seen of the controller's trainings."""
    steps = 30 if args.quick else 100_000
    rows, traces, seeds = [], [], {kind: [] for kind in OF_SEEDS}
    for kind in kinds:
        row, trace = trained(kind, None, steps, args.seconds or 25, args)
        rows.append({"mbit": "trace", **row})
        traces.append(trace)
    for seed, kind in itertools.product(args.seeds, OF_SEEDS):
        row, trace = trained(kind, 0.0 if kind == FREE else None, min(MARKS[-1], steps), 300, args, seed)
        seeds[kind].append(row)
        traces.append(trace)
    if args.seeds:
        rows.insert(1, {"mbit": "none", **seeds[FREE][0]})
    over_computing(rows)
    return rows, losses_over_dense(seeds) if args.seeds else [], [t for t in traces if t["kind"].startswith("contr")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="most steps of a training, without --trace")
    parser.add_argument("--seconds", type=int, default=None, help="most seconds of a training; 60, with --trace 25")
    parser.add_argument("--rounds", type=int, default=3, help="of brief trainings on the thinnest link")
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="*",
        default=range(5),
        help="of trainings that end with the same step",
    )
    parser.add_argument("--quick", action="store_true", help="few steps, to see that it works")
    parser.add_argument("--local", action="store_true", help="on the loopback, with no limit and no root")
    parser.add_argument("--trace", action="store_true", help="a link that fluctuates")
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), default=None)
    parser.add_argument("--subnet", default="10.78.0")
    parser.add_argument("--port", type=int, default=29650)
    parser.add_argument("--out", default=None)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--worker", nargs=2, metavar=("KIND", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker[0], args.steps, args.seconds, args.trace, args.seed, args.worker[1])
        return
    kinds = (OF_TRACE if args.trace else OF_RATES) if args.kinds is None else args.kinds
    title = f"two clusters, digits, target loss {TARGET}"
    out = Path(args.out or (HERE / "results" / ("wan_trace.json" if args.trace else "wan.json")))
    if not args.trace:
        write_table(on_steady_links(kinds, 30 if args.quick else args.steps, args), out, title)
        return
    rows, losses, traces = on_the_trace(kinds, args)
    write_table(rows, out, title)
    write_table(losses, out.with_name(f"{out.stem}_loss.json"), f"{title}: loss of the controller over dense sums")
    write_table(
        [followed(t) for t in traces], out.with_name(f"{out.stem}_link.json"), f"{title}: seconds behind the link"
    )
    lines = ",\n".join(json.dumps(trace, separators=(",", ":")) for trace in traces)
    out.with_suffix(".steps.json").write_text(f"[{lines}]\n")


if __name__ == "__main__":
    try:
        main()
    except ClusterError as error:
        raise SystemExit(str(error)) from error
