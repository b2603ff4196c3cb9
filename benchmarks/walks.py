"""Measure how far the eye travels in the code: files of the package that walks visit, and changes from one to another.

The walks, those of trainings on rank 0 of two gloo ranks on this machine, with three buckets of gradients:

- ``step``: a training step of Lightning's Trainer with the default policy, without a sync round: data, forward,
  backward, optimizer and callbacks, from the start of one batch to the start of the next.
- ``compressed_step``: such a step with gradients compressed by block top-k, not a dense one.
- ``gradient``: the way of the gradient in it, from the hook of the first bucket to what is handed over after backward:
  all from Lightning's ``on_before_backward`` to ``on_before_optimizer_step``, where nothing else of the package runs.
  ``gradient_blocks`` is the same where the optimizer takes blocks.
- ``decision``: ``TimeToAccuracyPlanner.decide`` of a moving total, on its first observations. Its milliseconds are
  without a profiler.

What is counted, by ``sys.setprofile``:

- ``calls``: of Python functions whose code stands in a file of the package. Lambdas, comprehensions (up to Python 3.11)
  and each time that a generator goes on are calls in their file; methods that ``dataclass`` writes stand in none.
- ``changes``: how often execution comes into another file of the package than it was in last, by a call or by a return:
  a call from A into B and back is two. Code of Lightning, torch and Python is no file; what it calls may be one.
- ``changes_by_calls``: the same with returns left out: a call from A into B and back is one, a call in A then another.
- What gloo calls back is part of the walk, as a path of its own from the file that handed it over, whether its thread
  runs it or the rank's own because it need not wait. Threads that serve in the background (heartbeats) are left out.

Figures of a training are medians over steps 20 to 39, each column by itself; ``--trace`` shows the last of these steps.
"""

import argparse
import os
import random
import sys
import time
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import groupby
from multiprocessing import get_context

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightning as L
import numpy as np
import torch
from hardware import write_table
from torch.utils.data import DataLoader, TensorDataset

import lightning_hetero
from lightning_hetero import BatchPlan, BlockTopK, HeteroDDPStrategy

# Where to find what makes a decision; the script knows no other module of the package.
from lightning_hetero.compression.wire_format import message_size
from lightning_hetero.core import StepObservations
from lightning_hetero.core.link.message_link import MessageLink
from lightning_hetero.core.noise.running import RunningNoiseScale
from lightning_hetero.core.policies.base import PlanContext
from lightning_hetero.core.policies.time_to_accuracy import TimeToAccuracyPlanner

PACKAGE = os.path.join(os.path.dirname(lightning_hetero.__file__), "")
FIRST, LAST = 20, 40  # steps that are counted
LAYERS, WIDTH = 3, 512  # a bucket each
NUM_BLOCKS = 1_000_000 // 16  # of the model whose messages are decided on
LONGEST = 1000  # visits that a trace lists; a decision has many thousands

STEP = "on_train_batch_start", "on_train_batch_start"
BACKWARD = "on_before_backward", "on_before_optimizer_step"
COMPRESSED = {"compression": BlockTopK(density=0.01)}
TRAININGS = {  # arguments of the strategy, and the hooks of Lightning's from which and to which a walk goes
    "step": ({}, *STEP),
    "compressed_step": (COMPRESSED, *STEP),
    "gradient": (COMPRESSED, *BACKWARD),
    "gradient_blocks": ({**COMPRESSED, "sparse_optimizer": True}, *BACKWARD),
}


def file_of(frame):
    """The file of a frame, below the folder of the package; empty for one that is not in it."""
    file = frame.f_code.co_filename
    return file[len(PACKAGE) :] if file.startswith(PACKAGE) else ""


def name_of(frame):
    return getattr(frame.f_code, "co_qualname", frame.f_code.co_name).replace(".<locals>", "")


class Walk:
    """The files in which execution is, one after the other, and what runs there; each callback is a path of its own."""

    now = None  # the walk that is under way

    def __init__(self):
        self.paths, self.calls, self.changes_by_calls = [], Counter(), 0

    def begin(self, file=None):
        """Follow this thread on a new path from now on, a callback's from the file that handed it over."""
        path, called = [] if file is None else [(file, [])], file
        self.paths.append(path)

        def follow(frame, event, _):
            nonlocal called
            if event == "return":  # be it from Lightning's code: what counts is where execution goes on
                if (back := frame.f_back) and (file := file_of(back)) and (not path or path[-1][0] != file):
                    path.append((file, [f"(back in {name_of(back)})"]))
            elif event == "call" and (file := file_of(frame)):
                self.calls[file] += 1
                self.changes_by_calls += called not in (None, file)
                called = file
                if not path or path[-1][0] != file:
                    path.append((file, []))
                path[-1][1].append(name_of(frame))

        Walk.now = self
        sys.setprofile(follow)

    def row(self):
        """Its figures."""
        changes = {"changes": sum(len(path) - 1 for path in self.paths), "changes_by_calls": self.changes_by_calls}
        return {"files": len(self.calls), **changes, "calls": sum(self.calls.values())}

    def trace(self):
        """Files in the order of visits with what runs there, callbacks at the end, and calls of each file."""
        lines = []
        for path in self.paths if sum(map(len, self.paths)) < LONGEST else ():
            lines.append(f"callback from {path[0][0]}" if lines else "visits")
            for number, (file, names) in enumerate(path, 1):
                counts = [(name, len(list(again))) for name, again in groupby(names)]
                does = ", ".join(name if count == 1 else f"{name} x{count}" for name, count in counts)
                lines.append(f"{number:4d}  {file}: {does}")
        return "\n".join([*lines, "calls", *(f"{count:6d}  {file}" for file, count in self.calls.most_common())])


class Watch(L.Callback):
    """Keeps the walks from one of Lightning's hooks to another."""

    def __init__(self, begin, end):
        self.walks = []
        setattr(self, end, self.stop)
        setattr(self, begin, self.start)

    def start(self, trainer, *_):
        self.stop()
        if FIRST <= trainer.global_step < LAST:
            Walk().begin()

    def stop(self, *_):
        sys.setprofile(None)
        if Walk.now is not None:
            self.walks.append(Walk.now)
        Walk.now = None


def follow_callbacks():
    """Follow what torch calls back, in threads where no profiler can be set before; or at once if it need not wait."""
    then = torch._C.Future.then

    def followed(future, callback):
        frame, at_once = sys._getframe(), True
        while frame and not file_of(frame):
            frame = frame.f_back
        file = file_of(frame) if frame else ""

        def call(done):
            before = sys.getprofile()
            if not file or Walk.now is None or not (before is None or at_once):
                return callback(done)
            Walk.now.begin(file)
            try:
                return callback(done)
            finally:
                sys.setprofile(before)

        given = then(future, call)
        at_once = False
        return given

    torch._C.Future.then = followed


class Perceptron(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3, momentum=0.9)


def train(rank, port):
    """Figures and trace of each training on this rank."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    follow_callbacks()
    launch = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": 2, "MASTER_PORT": port}
    found, quiet = {}, ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    for name, (settings, begin, end) in TRAININGS.items():
        os.environ.update({key: str(value) for key, value in launch.items()}, MASTER_ADDR="127.0.0.1")
        watch = Watch(begin, end)
        trainer = L.Trainer(
            strategy=HeteroDDPStrategy(replan=10 * LAST, bucket_cap_mb=1, **settings),
            accelerator="cpu",
            devices=2,
            max_steps=LAST + 1,
            callbacks=[watch],
            **dict.fromkeys(quiet, False),
        )
        trainer.fit(Perceptron(), DataLoader(TensorDataset(torch.randn(64 * LAST, WIDTH)), 16))
        rows = [walk.row() for walk in watch.walks]
        found[name] = {key: np.median([row[key] for row in rows]) for key in rows[0]}, watch.walks[-1].trace()
    return found


def decide():
    """Figures and trace of a decision for two workers, one of three times the other's speed, on a thin link."""
    sizes = np.array([[20.0, 20.0], [30.0, 10.0]] * 16)
    zeros, seconds = np.zeros_like(sizes), []
    seen = StepObservations(sizes, zeros, 0.05 + sizes * [0.001, 0.003], zeros, zeros, zeros + 0.4, zeros)
    noise = RunningNoiseScale().update(trace=400.0, global_sq_norm=11.0, total_batch_size=40, steps=50)
    size = message_size(NUM_BLOCKS, 16, "bfloat16", 2)
    link = MessageLink(0.1, size, (1e5, 1e5), seconds=0.4)
    context = PlanContext(40, ("a", "b"), (1, 1), link=link, noise=noise)
    planner = TimeToAccuracyPlanner(initial_total=40, max_total_batch_size=1000, moves_batch=True)
    for _ in range(7):
        begin = time.process_time()
        planner.decide(seen, BatchPlan(40, (30, 10)), context)
        seconds.append(time.process_time() - begin)
    walk = Walk()
    walk.begin()
    planner.decide(seen, BatchPlan(40, (30, 10)), context)
    sys.setprofile(None)
    return {**walk.row(), "milliseconds": 1e3 * np.median(seconds)}, walk.trace()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default=os.devnull, help="file for the figures")
    parser.add_argument("--trace", action="store_true", help="print files in the order of visits, and calls of each")
    args = parser.parse_args()
    port = random.SystemRandom().randrange(20_000, 32_000)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as ranks:
        found = [ranks.submit(train, rank, port) for rank in range(2)][0].result()
    found["decision"] = decide()
    for name, (_, trace) in found.items() if args.trace else ():
        sys.stdout.write(f"== {name}\n{trace}\n\n")
    write_table([{"walk": name, **row} for name, (row, _) in found.items()], args.json, "walks through the code")


if __name__ == "__main__":
    main()
