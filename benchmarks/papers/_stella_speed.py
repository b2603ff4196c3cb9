"""Iteration speed of StellaTrain's setting: two emulated nodes of GPUs, gradients of their true size, a real link.

Each node is one worker in a network namespace of its own (``benchmarks/cluster.py``; needs root) whose passes take the
time of the paper's two GPUs of a kind. Its model has as many parameters as the paper's, in matrices of the size of
ViT-B's feed-forward layers, and one row of input: so gradients, compression, optimizer and messages are real, and the
host computes little else. Several trainings follow one another in the same processes; between them, and between the
phases of one, the parent changes the rate of the link while both workers wait.
"""

import contextlib
import gc
import json
import os
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("NUMBA_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import lightning as L
import numpy as np
import torch
from cluster import Cluster, Node
from lightning.pytorch.strategies import DDPStrategy
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset
from wan import Fluctuation

from lightning_hetero import HeteroDDPStrategy, TTACallback
from lightning_hetero.core.batching.integer_split import proportional_sizes
from lightning_hetero.simulate import DeviceProfile, EmulatedDeviceCallback

WIDE, NARROW = 3072, 768
"""Shape of every matrix."""
TRACE, FREE = "trace", "free"


@dataclass(frozen=True)
class Workload:
    """A model of the paper on two nodes of two GPUs each.

    Args:
        elements: parameters that the paper gives.
        speeds: samples per second of the nodes: two RTX 4090, and two RTX 2080 Ti.
        total: samples of a step.
    """

    elements: float
    speeds: tuple[float, float]
    total: int

    @property
    def split(self):
        """Samples of each node, in proportion to its speed."""
        return proportional_sizes(self.total, self.speeds)

    @property
    def profiles(self):
        """Time models of the nodes; a third of the time is the forward pass."""
        names = ("two RTX 4090", "two RTX 2080 Ti")
        return [
            DeviceProfile(1 / (3 * v), 0.0, 2 / (3 * v), 0.0, name=name)
            for v, name in zip(self.speeds, names, strict=True)
        ]

    @property
    def matrices(self):
        """Matrices that make up the model."""
        return round(self.elements / (WIDE * NARROW))

    def seconds(self, split):
        """Seconds that a step computes."""
        return max(b / v for b, v in zip(split, self.speeds, strict=True))

    def link(self, mbit):
        """Rate of the emulated link for one of the paper's."""
        return mbit

    def model(self, rate):
        """Network to train."""
        return Gradients(self.matrices)

    def data(self, steps):
        """Samples of so many steps."""
        return TensorDataset(torch.randn(self.total * (steps + 2), 8))


class Digits(Workload):
    """ViT-B's setting at a sixth of its time with the network of ``benchmarks/wan.py`` in place of ViT-B.

    The link is as much slower as the model is smaller, and six times faster, so that sending takes as many times
    longer than computing as with ViT-B.
    """

    def link(self, mbit):
        return mbit * self.elements / 88e6 * 6

    def model(self, rate):
        return Learner(rate)

    def data(self, steps):
        x, y = load_digits(return_X_y=True)
        x, y = torch.tensor(x / 16.0, dtype=torch.float32)[:-297], torch.tensor(y)[:-297]
        return ConcatDataset([TensorDataset(x, y)] * (self.total * (steps + 2) // len(x) + 1))


WORKLOADS = {
    "ViT-B": Workload(88e6, (2 * 300.0, 2 * 99.0), 240),
    "ResNet-152": Workload(58e6, (2 * 270.0, 2 * 118.0), 240),
    "Swin-B": Workload(139e6, (2 * 217.0, 2 * 80.0), 180),
    "GPT-2": Workload(123.6e6, (17.8, 17.8 * 99 / 300), 8),
    "digits": Digits(1_126_410, (84 / 0.05, 84 / 0.05 * 198 / 600), 112),
}
"""Speeds above saturation of Table 2, times two. For GPT-2, the 17.8 samples per second of sec. 5.1 for two RTX 4090,
and the ratio of ViT-B for the others. Totals compute for 0.3 s, as the 240 samples that the paper chose for ViT-B."""


def top_k(density, **settings):
    """Settings of block top-k with sparse steps of the optimizer."""
    return {"compression": f"block_topk(density={density})", "sparse_optimizer": True, **settings}


DENSE = [(1000, 2), (500, 1), (100, 1), (TRACE, 2)]
BRIEF = [(1000, 2), (500, 1), (100, 1), (TRACE, 1)]
LATE = {"staleness": 1}
KINDS = {
    "computing only": ({"ddp_comm_hook": noop_hook}, [(FREE, 6)]),
    "ddp": (None, BRIEF),
    "dense": ({}, DENSE),
    "dense at 1 Gbit/s": ({}, [(1000, 2)]),
    "fp16": ({"compression": "fp16"}, BRIEF),
    "powersgd": ({"compression": "powersgd(start=2)"}, [(1000, 4), (500, 4), (100, 4), (TRACE, 12)]),
    "top-k 10 %": (top_k(0.1), [(1000, 9)]),
    "top-k 5 %": (top_k(0.05), [(500, 9), (TRACE, 28)]),
    "top-k 1 %": (top_k(0.01), [(100, 9), (TRACE, 28)]),
    "top-k 10 %, late": (top_k(0.1, **LATE), [(1000, 10)]),
    "top-k 5 %, late": (top_k(0.05, **LATE), [(500, 10), (TRACE, 28)]),
    "top-k 1 %, late": (top_k(0.01, **LATE), [(100, 10), (TRACE, 28)]),
    "controller, late": (
        top_k(0.1, **LATE, callbacks=[TTACallback]),
        [(FREE, 24), (1000, 20), (500, 20), (100, 20), (TRACE, 50)],
    ),
}
"""Settings of the strategy (``None`` is Lightning's own DDP) and phases: the rate of the link in Mbit/s, and steps."""
LEFT_OUT = {True: ("dense at 1 Gbit/s",), False: ("dense", "fp16")}
MAIN = {name: [kind for kind in KINDS if kind not in LEFT_OUT[name == "ViT-B"]] for name in WORKLOADS}
"""What is measured of each model: of others than ViT-B no more dense sums than necessary, which take long."""
THIN = [(500, 8), (100, 8)]
ABLATIONS = {
    "all of it": (top_k(0.01, **LATE), THIN),
    "without staleness": (top_k(0.01), THIN),
    "without sparse optimizer": (top_k(0.01, **LATE, sparse_optimizer=False), THIN),
    "single elements": ({**top_k(0.01, **LATE), "compression": "block_topk(density=0.01, block=1)"}, THIN),
    "single elements, without sparse optimizer": (
        {**top_k(0.01, **LATE), "compression": "block_topk(density=0.01, block=1)", "sparse_optimizer": False},
        THIN,
    ),
    "without adaptation (10 %)": (top_k(0.1, **LATE), THIN),
    "without compression": ({**LATE, "transfer_priority": False}, [(500, 3), (100, 2)]),
}
KINDS |= ABLATIONS
STEPS = 150
QUICK = [(1000, 8), (500, 6), (100, 3), (TRACE, 12)]
TASKS = {
    "ddp, steps": (None, QUICK),
    "dense, steps": ({}, QUICK),
    "fp16, steps": ({"compression": "fp16"}, QUICK),
    "powersgd, steps": ({"compression": "powersgd(start=2)"}, QUICK),
}
for _rate in (0.05, 0.1):
    TASKS[f"dense, rate {_rate}"] = ({"rate": _rate}, [(FREE, STEPS)])
    for _link, _density in ((1000, 0.1), (500, 0.05), (100, 0.01)):
        _kind = f"top-k {100 * _density:g} %, late, {_link}, rate {_rate}"
        TASKS[_kind] = (top_k(_density, **LATE, rate=_rate), [(_link, STEPS)])
        if _rate == 0.05:
            TASKS[f"top-k {100 * _density:g} %, {_link}, rate {_rate}"] = (top_k(_density), [(_link, STEPS)])
for _link in (1000, 500, 100, TRACE):
    _settings = top_k(0.1, **LATE, callbacks=[TTACallback])
    TASKS[f"controller, late, {_link}, rate 0.05"] = (_settings, [(_link, STEPS)])
TASKS["powersgd, rate 0.05"] = ({"compression": "powersgd(start=2)"}, [(FREE, STEPS)])
for _density in (0.1, 0.05, 0.01):
    TASKS[f"top-k {100 * _density:g} %, late, trace, rate 0.05"] = (top_k(_density, **LATE), [(TRACE, STEPS)])
for _link in (100, TRACE):
    _settings = top_k(0.1, **LATE, callbacks=[partial(TTACallback, 448)])
    TASKS[f"controller and batch, late, {_link}, rate 0.05"] = (_settings, [(_link, STEPS)])
KINDS |= TASKS


class Gradients(L.LightningModule):
    """A chain of matrices on one row, which keeps the size of what goes through it."""

    def __init__(self, matrices):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList()
        for i in range(matrices):
            shape = (WIDE, NARROW) if i % 2 == 0 else (NARROW, WIDE)
            self.weights.append(nn.Parameter(torch.randn(shape, generator=generator).mul_(shape[1] ** -0.5)))

        self.losses = []

    def training_step(self, batch, batch_idx):
        row = batch[0].mean(0, keepdim=True).repeat(1, NARROW // 8)
        for weight in self.weights:
            row = nn.functional.linear(row, weight)
        return row.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-4, momentum=0.9)


class Learner(L.LightningModule):
    """The network of ``benchmarks/wan.py``: 1.1 million parameters."""

    def __init__(self, rate):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
        self.rate, self.losses = rate, []

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.rate, momentum=0.9)


class Phases(L.Callback):
    """Asks for the rate of each phase when it begins, and keeps what every step took."""

    def __init__(self, number, phases, folder, late):
        self.number, self.phases, self.folder, self.late = number, phases, folder, late
        self.steps = [{name: [] for name in ("ends", "spent", "update", "host", "density", "split")} for _ in phases]
        self.at, self.left, self.begins = -1, 0, []

    def on_train_start(self, trainer, pl_module):
        if self.late:
            staleness = trainer.strategy.engine.hook_state.staleness
            staleness.control_externally(True)
            staleness.make_all_stale()
        self._begin(trainer.global_rank)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.reduced = time.time()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        now, kept = time.time(), self.steps[self.at]
        kept["ends"].append(now)
        kept["update"].append(now - self.reduced)
        kept["spent"].append(time.process_time())
        device = next(one.device for one in trainer.callbacks if isinstance(one, EmulatedDeviceCallback))
        kept["host"].append(sum(one.host for one in list(device.times)[-2:]))
        engine = getattr(trainer.strategy, "engine", None)
        exchange = None if engine is None or engine.compression is None else engine.compression.averager
        kept["density"].append(getattr(exchange, "density", None))
        kept["split"].append(None if engine is None else engine.plan.local_batch_sizes)
        self.left -= 1
        if not self.left and self.at + 1 < len(self.phases):
            self._begin(trainer.global_rank)

    def _begin(self, rank):
        self.at += 1
        rate, self.left = self.phases[self.at]
        name = f"{self.number}-{self.at}"
        (self.folder / f"{name}.{rank}.part").write_text(json.dumps(rate))
        (self.folder / f"{name}.{rank}.part").replace(self.folder / f"{name}.{rank}")
        while not (self.folder / f"{name}.set").exists():
            time.sleep(0.01)
        self.begins.append(time.time())


def phases_of(kind):
    """All phases of a training: it begins and ends on a link without limit."""
    return [(FREE, 3), *KINDS[kind][1], (FREE, 1)]


def worker(workload, kinds, folder):
    """One rank: all trainings, one after another."""
    torch.set_num_threads(1)
    launch = dict(os.environ)  # Lightning takes a part of it away at the end of a training
    load = WORKLOADS[workload]
    for number, kind in enumerate(kinds):
        os.environ.update(launch)
        settings = None if KINDS[kind][0] is None else dict(KINDS[kind][0])
        torch.manual_seed(0)
        model = load.model(0.05 if settings is None else settings.pop("rate", 0.05))
        callbacks = [] if settings is None else [make() for make in settings.pop("callbacks", ())]
        steps = sum(count for _, count in phases_of(kind))
        late = settings is not None and "staleness" in settings and not callbacks
        phases = Phases(number, phases_of(kind), folder, late)
        trainer = L.Trainer(
            accelerator="cpu", devices=1, num_nodes=2, max_steps=steps, max_epochs=-1, logger=False,
            strategy=DDPStrategy(gradient_as_bucket_view=True) if settings is None else
            HeteroDDPStrategy(**settings, **({} if callbacks else {"local_batch_sizes": load.split}),
                              gradient_as_bucket_view=True),
            callbacks=[*callbacks, EmulatedDeviceCallback(load.profiles), phases],
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        data = load.data(steps)
        trainer.fit(model, DataLoader(data, load.total // 2, shuffle=isinstance(load, Digits)))
        record = {"begins": phases.begins, "steps": phases.steps, "losses": model.losses}
        (folder / f"{number}.{trainer.global_rank}.json").write_text(json.dumps(record))
        del model, trainer, phases, data
        gc.collect()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an interpreter that ends, after trainings that went well


@dataclass
class Links:
    """The links of a cluster, in rates of the paper's."""

    cluster: Cluster
    load: Workload

    @property
    def nodes(self):
        return self.cluster.nodes

    def set_link(self, rank, mbit):
        self.cluster.set_link(rank, self.load.link(mbit))


class LinkServer(threading.Thread):
    """Sets the rate that both workers ask for, and keeps how the trace went."""

    def __init__(self, links, folder):
        super().__init__(daemon=True)
        self.cluster, self.folder, self.ended = links, folder, threading.Event()
        self.fluctuation, self.rates = None, {}

    def run(self):
        while not self.ended.wait(0.01):
            for path in sorted(self.folder.glob("*.0")):
                done = path.with_suffix(".set")
                if not done.exists() and path.with_suffix(".1").exists():
                    self._set(path.stem, json.loads(path.read_text()))
                    done.touch()

    def _set(self, name, rate):
        self._end_trace()
        for rank in range(2):
            self.cluster.set_link(rank, {FREE: 0.0, TRACE: 600.0}.get(rate, rate))
        if rate == TRACE:
            self.fluctuation = Fluctuation(self.cluster, seed=0)
            self.rates[name] = self.fluctuation.rates
            self.rates[name].append((time.time(), 600.0))
            self.fluctuation.start()

    def _end_trace(self):
        if self.fluctuation is not None:
            self.fluctuation.stop()
            self.fluctuation = None

    def stop(self):
        self.ended.set()
        self.join()
        self._end_trace()


def median(values):
    return float(np.median(values)) if len(values) else float("nan")


def row_of(record, workload, kind, number, rate):
    """What the steps of one phase took, on rank 0; the first one, or two if messages come late, do not count."""
    load, steps = WORKLOADS[workload], record["steps"][number]
    seconds = np.diff([record["begins"][number], *steps["ends"]])
    late = "late" in kind or kind in ABLATIONS
    first = min(2 if late else 1, len(seconds) - 1) if rate != TRACE and len(seconds) > 2 else 0
    counted = seconds[first:] if not kind.startswith("controller") or rate == TRACE else seconds[-10:]
    split = load.split if KINDS[kind][0] is not None else (load.total // 2,) * 2
    step = float(np.mean(counted) if rate == TRACE else np.median(counted))
    densities = [density for density in steps["density"] if density is not None]
    return {
        "model": workload,
        "link": str(rate),
        "kind": kind,
        "steps": len(counted),
        "step_ms": 1e3 * step,
        "device_ms": 1e3 * load.seconds(split),
        "samples_per_s": load.total / step,
        "host_ms": 1e3 * median(steps["host"]),
        "update_ms": 1e3 * median(steps["update"]),
        "processor_ms": 1e3 * median(np.diff(steps["spent"])),
        "density": densities[-1] if densities else None,
        "split": steps["split"][-1],
    }


def to_target(record, number, target=0.15, window=10):
    """Steps until the mean loss of ten steps is below the target, and seconds of those that the link was limited in."""
    before = sum(len(steps["ends"]) for steps in record["steps"][:number])
    ends = [record["begins"][number], *record["steps"][number]["ends"]]
    smooth = np.convolve(record["losses"], np.ones(window) / window, "valid")
    reached = np.flatnonzero(smooth < target)
    if not len(reached) or reached[0] + window - before >= len(ends):
        return {"steps_to_target": None, "seconds_to_target": None}
    steps = int(reached[0]) + window
    return {"steps_to_target": steps, "seconds_to_target": ends[steps - before] - ends[0]}


def segments(record, number, rates):
    """Seconds since the trace began, rate of the link, mean step and density, for each time the link was the same."""
    ends, begin = np.array(record["steps"][number]["ends"]), record["begins"][number]
    lasts = np.diff([begin, *ends])
    found = []
    moments = [moment for moment, _ in rates] + [float("inf")]
    for (moment, rate), until in zip(rates, moments[1:], strict=True):
        inside = (ends > moment) & (ends <= until)
        if inside.any():
            densities = [d for d, within in zip(record["steps"][number]["density"], inside, strict=True) if within]
            found.append(
                [round(max(moment - begin, 0.0), 1), rate, round(1e3 * float(lasts[inside].mean()), 1), densities[-1]]
            )
    return found


def measure(workload, kinds, *, subnet="10.79.0", port=29660, timeout=1500):
    """Rows of all kinds and links, for one model."""
    rows = []
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        cluster = stack.enter_context(Cluster([Node(2.0), Node(2.0)], subnet=subnet, port=port, weight=20.0))
        links = LinkServer(Links(cluster, WORKLOADS[workload]), folder)
        links.start()
        stack.callback(links.stop)
        command = [sys.executable, __file__, workload, str(folder), *kinds]
        results = cluster.run(command, timeout=timeout, echo=False)
        if any(result.returncode for result in results):
            raise SystemExit("\n".join(result.stdout[-1000:] + result.stderr[-3000:] for result in results))
        for number, kind in enumerate(kinds):
            record = json.loads((folder / f"{number}.0.json").read_text())
            for at, (rate, _) in enumerate(phases_of(kind)):
                if rate == FREE and at in (0, len(phases_of(kind)) - 1):
                    continue
                row = row_of(record, workload, kind, at, rate)
                if record["losses"]:
                    row |= to_target(record, at)
                if rate == TRACE:
                    row["trace"] = segments(record, at, links.rates[f"{number}-{at}"])
                rows.append(row)
    return rows


if __name__ == "__main__":
    worker(sys.argv[1], sys.argv[3:], Path(sys.argv[2]))
