"""One rank of a benchmark run: trains a small convolutional network and writes what each step took.

Started on every node by the benchmarks of this folder; not meant to be run by hand.
"""

import argparse
import json
import os
import tempfile
import time
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities.warnings import PossibleUserWarning
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_hetero import BatchPlan, DynamicBatchPIDCallback, GNSCallback, HeteroDDPStrategy, PerfModelCallback
from lightning_hetero.core import StepObservations
from lightning_hetero.engine.watch import time_budget
from lightning_hetero.report import read_run

MAX_SHARE = time_budget.MAX_SHARE

torch.set_num_threads(1)
warnings.filterwarnings("ignore", category=PossibleUserWarning)
warnings.filterwarnings("ignore", category=FutureWarning)


class Images(Dataset):
    """Random images; what is in them does not matter for time."""

    def __init__(self, n, size):
        self.n, self.x = n, torch.randn(64, 1, size, size)

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return self.x[i % 64], i % 10


class ConvNet(L.LightningModule):
    def __init__(self, width, size):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.AvgPool2d(4),
            nn.Flatten(),
            nn.Linear(width * (size // 4) ** 2, 10),
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3, momentum=0.9)


class Perceptron(ConvNet):
    """Four hidden layers, for a given number of parameters."""

    def __init__(self, hidden, size):
        L.LightningModule.__init__(self)
        layers = [nn.Flatten(), nn.Linear(size**2, hidden), nn.ReLU()]
        for _ in range(3):
            layers += [nn.Linear(hidden, hidden), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.Linear(hidden, 10))


class Steps(L.Callback):
    """Times every step, by the clock and by the processor; adopts the plans of a script at their steps."""

    def __init__(self, script):
        self.script, self.seconds, self.cpu_seconds, self.sizes = script, [], [], []

    def on_train_start(self, trainer, pl_module):
        self.last, self.last_cpu = time.perf_counter(), time.process_time()
        self._adopt(trainer, 0)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        now, cpu = time.perf_counter(), time.process_time()
        self.seconds.append(now - self.last)
        self.cpu_seconds.append(cpu - self.last_cpu)
        self.sizes.append(len(batch[0]))
        self._adopt(trainer, batch_idx + 1)
        self.last, self.last_cpu = now, cpu

    def _adopt(self, trainer, step):
        if str(step) in self.script:
            sizes = self.script[str(step)]
            trainer.strategy.adopt(BatchPlan(sum(sizes), tuple(sizes)), "script")


class Switched(L.Callback):
    """Takes the noise scale, with its callback, out of the training for some steps, and back, again and again."""

    STEPS = 10  # with it, and as many without

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (batch_idx + 1) % self.STEPS:
            return
        engine = trainer.strategy.engine
        if (batch_idx + 1) // self.STEPS % 2:
            self.callbacks, self.noise = trainer.callbacks, engine.noise
            trainer.callbacks = [callback for callback in self.callbacks if not isinstance(callback, GNSCallback)]
            engine.measure_noise(None)
            engine.hook_state.forget_squares()
        else:
            trainer.callbacks = self.callbacks
            engine.measure_noise(self.noise)

    def on_train_end(self, trainer, pl_module):
        if abs(2 * self.noise.number - trainer.global_step) > self.STEPS:
            raise SystemExit(f"the noise scale saw {self.noise.number} of {trainer.global_step} steps, not half")


class RecordSwitched(L.Callback):
    """Takes the recorder out of the training for every other sync round; no round is left out to save time."""

    switches = True

    def __init__(self):
        self.rounds = []  # whether it was recorded, its steps, and their seconds by the clock and by the processor

    def on_train_start(self, trainer, pl_module):
        self.rank0 = trainer.global_rank == 0
        time_budget.MAX_SHARE = 1.0 if self.switches else MAX_SHARE
        self.recorder, self.round = trainer.strategy.engine.rounds.watch.recorder, 0
        self.mark = 0, time.perf_counter(), time.process_time()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        rounds = trainer.strategy.engine.rounds
        if rounds.schedule.last == self.round:
            return
        now = batch_idx, time.perf_counter(), time.process_time()
        took = (b - a for a, b in zip(self.mark, now, strict=True))
        self.rounds.append((rounds.watch.recorder is not None, *took))
        self.round, self.mark = rounds.schedule.last, now
        if self.switches:
            rounds.watch.recorder = None if rounds.watch.recorder is not None else self.recorder

    def on_train_end(self, trainer, pl_module):
        on = [one[0] for one in self.rounds]
        if self.switches and self.rank0 and (self.recorder is None or on != [i % 2 == 0 for i in range(len(on))]):
            raise SystemExit("the recorder was not switched off and on")


class Rounds(RecordSwitched):
    """Notes the sync rounds, and leaves the recorder as it is."""

    switches = False


class Observations(L.Callback):
    """Keeps everything that the ranks observed."""

    def __init__(self):
        self.rows, self.predicted = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        seen = trainer.strategy.observations()
        if seen.num_steps and (not self.rows or seen is not self.rows[-1]):
            self.rows.append(seen)

    def stacked(self):
        if not self.rows:
            return {}
        return {n: np.concatenate([getattr(r, n) for r in self.rows]).tolist() for n in StepObservations.FIELDS}


def strategy_of(kind):
    callbacks = {
        "perf_model": [PerfModelCallback()],
        "gns_switched": [PerfModelCallback(), GNSCallback()],
        "pid": [DynamicBatchPIDCallback()],
    }.get(kind, [])
    if kind == "ddp":
        return "ddp", callbacks
    if kind in ("recorded", "unrecorded", "rounds"):
        return HeteroDDPStrategy(report=False if kind == "unrecorded" else tempfile.gettempdir()), callbacks
    if kind == "record_switched":
        return HeteroDDPStrategy(report=tempfile.gettempdir(), replan=20), callbacks
    if kind == "script":
        return HeteroDDPStrategy(policy="even", replan=10), callbacks
    return HeteroDDPStrategy(policy="even" if kind == "even" else None), callbacks


def recording(kind):
    """CPU seconds that the run's record took, as its last line says; 0.0 without one."""
    if kind != "recorded" or int(os.environ["RANK"]):
        return 0.0
    return read_run(tempfile.gettempdir()).end.overhead


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", default="perf_model")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--switched", type=int, default=1, help="times as many steps where something is switched")
    parser.add_argument("--samples", type=int, default=0)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--size", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=0, help="a perceptron with layers of this width instead")
    parser.add_argument("--script", default="{}")
    parser.add_argument("--bare", action="store_true", help="do not keep what ranks observed: all kinds run the same")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    launch = dict(os.environ)  # Lightning takes a part of it away at the end of a training
    runs = []
    for kind in args.kind.split(","):
        os.environ.update(launch)
        runs.append(train(kind, args))
    if int(launch["RANK"]) == 0:
        with open(args.out, "w") as file:
            json.dump(runs if len(runs) > 1 else runs[0], file)


def train(kind, args):
    """One short training under a strategy; several may follow one another in the same processes."""
    world = int(os.environ["WORLD_SIZE"])
    L.seed_everything(0, verbose=False)
    strategy, callbacks = strategy_of(kind)
    steps, observations = Steps(json.loads(args.script)), Observations()
    extra = [steps] if kind == "ddp" or args.bare else [steps, observations]
    switches = {"gns_switched": Switched, "record_switched": RecordSwitched, "rounds": Rounds}
    switch = switches[kind]() if kind in switches else None
    extra += [] if switch is None else [switch]
    count = args.steps * (1 if switch is None else args.switched)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=world // int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        max_steps=count,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, *extra],
    )
    data = Images(args.samples or count * args.batch * world, args.size)
    model = Perceptron(args.hidden, args.size) if args.hidden else ConvNet(args.width, args.size)
    trainer.fit(model, DataLoader(data, args.batch))
    history = [
        (e.epoch, e.step, e.plan.local_batch_sizes, e.plan.step_time, e.reason)
        for e in getattr(trainer.strategy, "plan_history", ())
    ]
    return {
        "seconds": steps.seconds,
        "cpu_seconds": steps.cpu_seconds,
        "parameters": sum(p.numel() for p in model.parameters()),
        "history": history,
        "recording": recording(kind),
        "rounds": getattr(switch, "rounds", []),
        "observations": observations.stacked(),
    }


if __name__ == "__main__":
    main()
