"""What goes wrong, in which mode of training, and what must then hold: one row for each fault.

A fault is made in the process of its rank, and counts each time that it happens in a file that outlives the process.
``docs/reliability.py`` writes the table of faults and modes from this file.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil
import torch
import torch.distributed as dist
import transformers
from torch import nn

from lightning_hetero import AdaptiveBatchCallback, BlockTopK, GNSCallback, HeteroElasticStrategy
from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.core.compression.settings import LowRank
from tests.helpers import Points, collected, covered
from tests.loops import FRONT_ENDS, SAMPLES
from tests.ranks import RankError, put, run_ranks
from tests.transformers.runs import Rows, arguments, of, trained

COLLECTIVES = ("allreduce", "allgather", "broadcast", "gather", "send", "recv", "barrier")
"""Methods of a process group by which ranks talk; all of torch's own collectives and ours end in them."""
BUG = "a bug of the user's"
WALL = 45.0
"""Seconds after which a run counts as hanging, far below torch's limit of 30 minutes."""


class Injector:
    """The one place where a fault enters a training: called with the loss of each batch of this rank, returns it."""

    def __init__(self, fault, rank, folder):
        self.fault, self.rank, self.folder = fault, rank, Path(folder)
        self.batches = self.messages = 0
        self.parameters, self.weights = [], []
        self.mine = fault is not None and fault.rank == rank
        if self.mine:
            fault.prepare(self)

    def __call__(self, loss):
        batch, self.batches, self.parameters = self.batches, self.batches + 1, parameters_of(loss)
        self.weights.append(torch.cat([parameter.detach().flatten() for parameter in self.parameters]))
        if not self.mine or not self.fault.at <= batch < self.fault.at + self.fault.batches:
            return loss
        self.count()
        changed = self.fault.strike(self, loss)
        return loss if changed is None else changed

    def count(self):
        """Count an injection, before it happens: it may be the last that this process does."""
        self.folder.mkdir(exist_ok=True)
        with open(self.folder / "injected", "ab", buffering=0) as file:
            file.write(b".")

    @property
    def running(self):
        """Whether the batch of the fault has come."""
        return self.batches > self.fault.at

    def end(self):
        """Leave the weights before each batch and at the end behind, however the training ends."""
        last = [parameter.detach().flatten() for parameter in self.parameters]
        torch.save([*self.weights, torch.cat(last)] if last else [], self.folder / f"left{self.rank}")


def parameters_of(loss):
    """Parameters that a loss depends on."""
    found, queue = [], [loss.grad_fn]
    while queue:
        node = queue.pop()
        if hasattr(node, "variable"):
            found.append(node.variable)
        queue += [following for following, _ in node.next_functions if following is not None]
    return found


# what must hold


@dataclass(frozen=True)
class Outcome:
    """How a run ended: results of ranks or kind and text of their errors, weights, and how often the fault happened."""

    results: list[dict[str, Any]] | None
    errors: dict[int, tuple[str, str]]
    injected: int
    left: dict[int, list[torch.Tensor]]

    def said(self, words):
        """For each rank, what it has logged with these words."""
        return [[line for line in result["said"] if words in line] for result in self.results]


def every_sample_once(mode, outcome):
    assert not outcome.errors, outcome.errors
    for epoch in range(mode.epochs):
        assert covered(outcome.results, epoch) == list(range(mode.samples))


def nothing_changed(fault, mode, outcome, undisturbed):
    """The run ends as the undisturbed one: the same batches and weights, if two runs give the same at all."""
    every_sample_once(mode, outcome)
    for rank, result in enumerate(outcome.results):
        assert np.isfinite(result["weights"]).all()
        np.testing.assert_array_equal(result["weights"], outcome.results[0]["weights"])
        if mode.repeats:
            assert result["seen"] == undisturbed.results[rank]["seen"]
            np.testing.assert_array_equal(result["weights"], undisturbed.results[rank]["weights"])


def nothing_changed_but_a_warning(fault, mode, outcome, undisturbed):
    """Training goes on, and one line on one rank says what was not written."""
    nothing_changed(fault, mode, outcome, undisturbed)
    assert sorted(map(len, outcome.said("hetero_run.jsonl"))) == [*[0] * (mode.ranks - 1), 1]


def step_is_skipped(fault, mode, outcome, undisturbed):
    """The step is left out on all ranks, or the replica at a merge; the log names the rank, and weights are finite."""
    every_sample_once(mode, outcome)
    for result in outcome.results:
        assert np.isfinite(result["weights"]).all()
        np.testing.assert_array_equal(result["weights"], outcome.results[0]["weights"])
    if not mode.in_step:
        assert any(outcome.said(f"rank [{fault.rank}]"))
        return
    assert [len(lines) for lines in outcome.said(f" step {fault.at} ")] == [1] * mode.ranks
    assert [len(lines) for lines in outcome.said(" nan ")] == [int(rank == fault.rank) for rank in range(mode.ranks)]
    for weights in outcome.left.values():
        moved = [not torch.equal(*pair) for pair in pairwise(weights[: fault.at + 3])]
        assert moved == [step != fault.at for step in range(fault.at + 2)]


def difference_is_told(fault, mode, outcome, undisturbed):
    """Rank 0 says once which parameter differs, and on which ranks; training goes on."""
    every_sample_once(mode, outcome)
    told = [line for line in outcome.said(f"rank {fault.rank}")[0] if re.search(r"2\.(weight|bias)", line)]
    assert len(told) == 1, told


LOST = ("RuntimeError", "DistBackendError", "DistNetworkError", "ElasticWorkerError")
"""Kinds of errors of a lost connection."""


def all_end(fault, mode, outcome, undisturbed):
    """Every rank ends: that of the fault with its error, the others with the same cause and equal weights."""
    assert set(outcome.errors) == set(range(mode.ranks))
    kind, text = outcome.errors.pop(fault.rank)
    assert re.fullmatch(fault.error[0], kind)
    assert re.search(fault.error[1], text), text
    for other, said in outcome.errors.values():
        assert other in LOST, said
        assert not fault.cause or re.search(rf"rank {fault.rank} .*{fault.cause}", said), said
    if mode.in_step:  # no update that only some of the others have taken
        others = [weights[-1] for rank, weights in outcome.left.items() if rank != fault.rank]
        assert len(others) == mode.ranks - 1
        assert all(torch.equal(weights, others[0]) for weights in others)


def done_in_pieces(fault, mode, outcome, undisturbed):
    """Under Lightning's `hetero_ddp`, the batch is trained on in pieces, with the same gradient; else all ranks end."""
    if not mode.in_pieces:
        all_end(fault, mode, outcome, undisturbed)
        return
    assert not outcome.errors
    taken = [sorted({(epoch, step, i) for epoch, step, own in r["seen"] for i in own}) for r in outcome.results]
    for epoch in range(mode.epochs):  # a set: the first attempt, and the pieces
        assert sorted(i for own in taken for e, _, i in own if e == epoch) == list(range(mode.samples))
    assert [len(lines) for lines in outcome.said(f"batch {fault.at} of epoch 0")] == [
        int(r == fault.rank) for r in range(mode.ranks)
    ]
    for rank, result in enumerate(outcome.results):
        np.testing.assert_array_equal(result["weights"], outcome.results[0]["weights"])
        if mode.repeats:
            np.testing.assert_allclose(result["weights"], undisturbed.results[rank]["weights"], rtol=0, atol=1e-12)


def all_end_with_one_error(fault, mode, outcome, undisturbed):
    """Every rank raises the same error, which names the rank of the fault, or what each rank holds."""
    assert set(outcome.errors) == set(range(mode.ranks))
    assert {kind for kind, _ in outcome.errors.values()} == {fault.error[0]}
    assert all(re.search(fault.error[1], text) for _, text in outcome.errors.values()), outcome.errors


def all_stop_together(fault, mode, outcome, undisturbed):
    """Every rank ends as Lightning does when told to: before the same batch, the second one after the signal."""
    assert {kind for kind, _ in outcome.errors.values()} == {"SIGTERMException"}
    assert len(outcome.errors) == mode.ranks
    if mode.in_step:
        assert [len(weights) - 1 for weights in outcome.left.values()] == [fault.at + 2] * mode.ranks


# faults


@dataclass(frozen=True)
class Fault:
    """A fault of one rank, from one of its batches on."""

    rank: int = 1
    at: int = 4

    batches: ClassVar[int] = 1
    """Batches in which it strikes."""
    times: ClassVar[int | None] = 1
    """How often it happens in a whole run; ``None`` for at least once."""
    error: ClassVar[tuple[str, str]] = ("", "")
    """Kind of the error of its rank, and a pattern of its text."""
    cause: ClassVar[str] = ""
    """What the errors of all other ranks say of it."""
    anew: ClassVar[bool] = False
    """Whether its ranks are new processes: its methods of a process group have to be below those that we wrap."""
    invariant: ClassVar[Callable[..., None]] = nothing_changed

    def prepare(self, injector):
        """Set up what strikes elsewhere than in a batch."""

    def strike(self, injector, loss):
        """Strike in the forward pass of a batch; a value that is returned takes the loss's place."""

    def settings(self, folder):
        """Settings of the training under which its invariant is promised."""
        return {}

    def __str__(self):
        own = [f"{v}" for k, v in vars(self).items() if k not in ("rank", "at")]
        return "-".join([type(self).__name__, *own, f"rank{self.rank}"])


class Kill(Fault):
    """The kernel takes its memory, or a node is lost."""

    error, invariant = ("Died", "signal 9"), all_end

    def strike(self, injector, loss):
        os.kill(os.getpid(), signal.SIGKILL)


class KillInAgreement(Kill):
    """A process is lost when it comes to an agreement on a plan, rank 0 when it has decided."""

    batches = 0

    def prepare(self, injector):
        owner, name = (dist, "broadcast_object_list") if self.rank == 0 else (ControlPlane, "gather")
        call = getattr(owner, name)

        def struck(*args, **kwargs):
            if injector.running:
                injector.count()
                self.strike(injector, None)
            return call(*args, **kwargs)

        put(owner, name, struck)

    def settings(self, folder):
        return {"replan": 2}


class Raise(Fault):
    """The user's code fails."""

    error, cause, invariant = ("ZeroDivisionError", BUG), f"ZeroDivisionError: {BUG}", all_end

    def strike(self, injector, loss):
        raise ZeroDivisionError(BUG)


class Sigterm(Fault):
    """The scheduler tells one rank to end."""

    invariant = all_stop_together

    def strike(self, injector, loss):
        os.kill(os.getpid(), signal.SIGTERM)


class OutOfMemory(Fault):
    """A batch does not fit in the device's memory."""

    error, cause, invariant = ("OutOfMemoryError", "out of memory"), "OutOfMemoryError", done_in_pieces

    def strike(self, injector, loss):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@dataclass(frozen=True)
class Freeze(Fault):
    """The process stands still with all its threads, as under memory pressure or in a moved virtual machine."""

    seconds: float = 0.5

    def strike(self, injector, loss):
        with subprocess.Popen(["sh", "-c", f"sleep {self.seconds}; kill -CONT {os.getpid()}"]):
            os.kill(os.getpid(), signal.SIGSTOP)


@dataclass(frozen=True)
class Pause(Fault):
    """Only the training waits, as in a debugger or for a file; the process's other threads go on."""

    seconds: float = 0.5

    def strike(self, injector, loss):
        time.sleep(self.seconds)


class NaN(Fault):
    """A batch has the loss NaN."""

    invariant = step_is_skipped

    def strike(self, injector, loss):
        return loss * float("nan")

    def settings(self, folder):
        return {"on_nonfinite": "skip"}


class Diverge(Fault):
    """One weight changes by one unit in the last place, as by a bit that flips in memory."""

    invariant = difference_is_told

    def strike(self, injector, loss):
        one = injector.parameters[0].data.view(-1)[:1]
        one.copy_(torch.nextafter(one, one + 1))


class WrongPlan(Fault):
    """Of what rank 0 has decided in a sync round, one number arrives wrong."""

    batches, invariant = 0, all_end_with_one_error
    error = ("PlanMismatchError", r"rank 0: .* rank 1: ")

    def prepare(self, injector):
        broadcast = dist.broadcast_object_list

        def wrong(box, *args, **kwargs):
            broadcast(box, *args, **kwargs)
            numbers = [i for i, part in enumerate(box[0]) if type(part) is int] if isinstance(box[0], tuple) else []
            if injector.running and numbers:
                injector.count()
                box[0] = (*box[0][: numbers[0]], box[0][numbers[0]] + 3, *box[0][numbers[0] + 1 :])

        put(dist, "broadcast_object_list", wrong)

    def settings(self, folder):
        return {"replan": 2}


class CorruptMessage(Fault):
    """A compressed message is overwritten on its way, so that its indices are impossible."""

    batches, times, invariant = 0, None, all_end_with_one_error
    error = ("ValueError", r"rank 1, bucket \d+")

    def prepare(self, injector):
        broadcast = dist.broadcast

        def damaged(tensor, src=None, *args, **kwargs):
            if injector.running and tensor.dtype == torch.uint8 and tensor.ndim == 1 and src == self.rank:
                injector.count()
                tensor.fill_(255)
            return broadcast(tensor, src, *args, **kwargs)

        put(dist, "broadcast", damaged)


@dataclass(frozen=True)
class LinkDelay(Fault):
    """Whatever the rank sends leaves later, or every tenth message, as when TCP sends it again."""

    seconds: float = 0.005
    every: int = 1
    batches: ClassVar[int] = 0
    times: ClassVar[int | None] = None

    anew: ClassVar[bool] = True

    def prepare(self, injector):
        for name in COLLECTIVES:
            setattr(dist.ProcessGroup, name, self._delayed(injector, getattr(dist.ProcessGroup, name)))

    def _delayed(self, injector, call):
        def delayed(*args, **kwargs):
            if injector.running:
                injector.messages += 1
                if injector.messages % self.every == 1 % self.every:
                    injector.count()
                    time.sleep(self.seconds)
            return call(*args, **kwargs)

        return delayed


@dataclass(frozen=True)
class LinkDown(LinkDelay):
    """Nothing arrives for some time; then all that was sent meanwhile."""

    seconds: float = 0.5
    every: int = 10**9
    times: ClassVar[int | None] = 1


class LinkCut(Fault):
    """All connections of a rank to the others are closed for good, as by a firewall; the job's store stays in reach."""

    error, invariant = ("RuntimeError|ElasticWorkerError", "onnection|merge"), all_end

    def strike(self, injector, loss):
        store = int(os.environ["MASTER_PORT"])
        for one in psutil.Process().net_connections("tcp"):
            if one.status == psutil.CONN_ESTABLISHED and store not in (one.laddr.port, one.raddr.port):
                with suppress(OSError), socket.socket(fileno=os.dup(one.fd)) as copy:
                    copy.shutdown(socket.SHUT_RDWR)


class DiskFull(Fault):
    """The record of the run is on a disk that is full."""

    batches, invariant = 0, nothing_changed_but_a_warning

    def prepare(self, injector):
        injector.count()

    def settings(self, folder):
        place = Path(folder) / "record"
        place.mkdir(exist_ok=True)
        with suppress(FileExistsError):
            (place / "hetero_run.jsonl").symlink_to("/dev/full")
        return {"report": str(place), "replan": 2}


class ClockJump(Fault):
    """The time of day is set forwards by five hours, so that the clocks of hosts differ from then on."""

    def strike(self, injector, loss):
        honest, honest_ns = time.time, time.time_ns
        put(time, "time", lambda: honest() + 5 * 3600)
        put(time, "time_ns", lambda: honest_ns() + int(5 * 3600e9))


class DamagedCheckpoint(Fault):
    """The second half of a checkpoint is missing when a run goes on from it."""

    error, invariant = ("DamagedCheckpointError", "saved.ckpt"), all_end_with_one_error

    def damage(self, path, folder):
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        Injector(None, self.rank, folder).count()


FAULTS = (
    *(Kill(0), Kill(1), KillInAgreement(0), KillInAgreement(1), Raise(0), Raise(1), Sigterm(), OutOfMemory()),
    *(Freeze(), Pause(0), NaN(), Diverge(), WrongPlan(), CorruptMessage()),
    *(LinkDelay(), LinkDelay(seconds=0.2, every=10), LinkDown(), LinkCut()),
    *(DiskFull(0), ClockJump(), DamagedCheckpoint()),
)

# modes

SIZES = (6, 4)
FIXED = {"local_batch_sizes": SIZES}
SPARSE = BlockTopK(density=0.3, block=8, warmup_steps=2)


@dataclass(frozen=True)
class Mode:
    """A way to train.

    Args:
        train: ``train(rank, settings, injector, **kwargs)``, with ``save`` and ``resume`` among the keywords.
        settings: its settings.
        repeats: whether two runs give the same weights to the last bit; decisions by measured times do not.
        in_step: whether all ranks take equally many batches.
        in_pieces: whether a batch that does not fit is trained on in pieces.
    """

    train: Callable[..., dict[str, Any]]
    settings: dict[str, Any] = field(default_factory=dict)
    repeats: bool = True
    in_step: bool = True
    in_pieces: bool = False
    ranks: int = 2
    samples: int = SAMPLES
    epochs: int = 2


def _front_end(name, ranks=2, **more):
    def train(rank, settings, injector, **kwargs):
        def loss(output, x, y):
            return injector(nn.functional.mse_loss(output, y))

        given = {key: make() for key, make in more.items()}
        return FRONT_ENDS[name](rank, settings, 5, world_size=ranks, loss=loss, **given, **kwargs)

    return train


def _elastic(rank, settings, injector, **kwargs):
    settings = {key: value for key, value in settings.items() if key != "on_nonfinite"}  # which it always does
    strategy = HeteroElasticStrategy(merge="mean", mega_batch_size=20, **settings)
    return _front_end("lightning")(rank, strategy, injector, **kwargs)


class Suffers(nn.Module):
    """A model of Transformers' kind, whose forward pass returns the loss; notes what it is given."""

    def __init__(self, injector):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()
        self.injector, self.seen = [injector], []  # in a list: a module would otherwise be asked to register it

    def forward(self, x, labels, index):
        self.seen.append((0, len(self.seen), index.tolist()))
        return {"loss": self.injector[0](nn.functional.mse_loss(self.net(x)[:, 0], labels))}


def _transformers(rank, settings, injector, **kwargs):
    rows = Rows([{"x": x, "labels": y[0], "index": i} for x, y, i in Points(MODES["transformers"].samples)])
    model = Suffers(injector)
    given = {f"hetero_{name}": value for name, value in settings.items()}
    args = arguments(sum(SIZES), SIZES, **given, output_dir=str(injector.folder / "out"))
    result = trained(of(transformers.Trainer)(model=model, args=args, train_dataset=rows), **kwargs)
    return {"weights": result["weights"], "seen": model.seen}


LIGHTNING = _front_end("lightning")
ADAPTIVE = _front_end("lightning", callbacks=lambda: [AdaptiveBatchCallback(20), GNSCallback(every_n_steps=1)])
CLUSTERS = {"local_batch_sizes": (4, 3, 3), "hierarchy": [[0], [1, 2]], "compression": SPARSE}

MODES = {
    "plain": Mode(LIGHTNING, FIXED, in_pieces=True),
    "compressed": Mode(LIGHTNING, {**FIXED, "compression": SPARSE}, in_pieces=True),
    "powersgd": Mode(LIGHTNING, {**FIXED, "compression": LowRank(rank=1, start=2)}, in_pieces=True),
    "stale": Mode(LIGHTNING, {**FIXED, "staleness": 1}, repeats=False, in_pieces=True),
    "hierarchical": Mode(_front_end("lightning", ranks=3), CLUSTERS, in_pieces=True, ranks=3),
    "adaptive": Mode(ADAPTIVE, repeats=False, in_pieces=True),
    "elastic": Mode(_elastic, repeats=False, in_step=False),
    "accelerate": Mode(_front_end("accelerate"), FIXED),
    "fabric": Mode(_front_end("fabric"), FIXED),
    "transformers": Mode(_transformers, samples=70, epochs=1),
}

# which faults are put into which modes

OWN_LOOPS = ("accelerate", "fabric", "transformers")
DENSE = tuple(mode for mode in MODES if mode not in ("compressed", "hierarchical"))
SAME_STEP = ("powersgd", "hierarchical", "adaptive")
LEFT_OUT = (
    # nothing is promised
    (("Diverge",), ("elastic",), "its replicas differ until they are merged"),
    (("WrongPlan",), ("elastic",), "it has no plan"),
    (("DiskFull",), ("elastic",), "it writes no record"),
    (("CorruptMessage",), DENSE, "only block top-k, in two of the modes, has messages of its own"),
    (("Sigterm",), OWN_LOOPS, "their ends have tests of their own: R18"),
    (("DamagedCheckpoint",), ("accelerate", "transformers"), "their folders have tests of their own: R16"),
    # too dear for what it would tell
    (("KillInAgreement",), tuple(MODES)[1:], "an agreement is the same in every mode, and Kill is in every mode"),
    (("DamagedCheckpoint",), (*SAME_STEP, "stale", "elastic"), "the file is read by the same code as in plain"),
    (("LinkDelay",), (*SAME_STEP, *OWN_LOOPS), "as LinkDown, which is in every mode"),
)
"""Pairs that are not run: which faults, in which modes, and why."""


def left_out(fault, mode):
    """Why a pair is not run; empty if it is."""
    return next((why for kinds, modes, why in LEFT_OUT if str(fault).startswith(kinds) and mode in modes), "")


PAIRS = [(fault, mode) for fault in FAULTS for mode in MODES if not left_out(fault, mode)]


# a run


def _train(rank, fault, mode, folder, kwargs):
    said, injector, before = collected(), Injector(fault, rank, folder), sys.excepthook
    sys.excepthook = lambda *_: None  # as Python itself calls it with what ends a process, and prints
    own = {} if fault is None else fault.settings(folder)
    try:
        result = MODES[mode].train(rank, {**MODES[mode].settings, **own}, injector, **kwargs)
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        raise
    finally:
        sys.excepthook = before
        injector.end()
    return {**result, "said": said}


def train(fault, mode, folder, **kwargs):
    """Outcome of a mode's training with a fault in it."""
    folder.mkdir(exist_ok=True)
    ranks = MODES[mode].ranks
    if fault is not None and mode == "elastic":  # on a busy machine, a rank may never claim a second batch
        fault = replace(fault, at=0)
    try:
        given = (fault, mode, str(folder), kwargs)
        start = "fork" if fault is not None and fault.anew else "pool"
        results, errors = run_ranks(_train, ranks, *given, timeout=WALL, start=start, grace=0.0), {}
    except RankError as error:
        results, errors = None, {rank: (kind, text) for rank, kind, text in error.errors}
    counted = folder / "injected"
    left = {rank: torch.load(path) for rank in range(ranks) if (path := folder / f"left{rank}").exists()}
    return Outcome(results, errors, len(counted.read_bytes()) if counted.exists() else 0, left)


def check(fault, mode, outcome, undisturbed):
    """Check the invariant of a fault, and that it has happened as often as it should."""
    assert not undisturbed.errors
    assert outcome.injected == fault.times if fault.times is not None else outcome.injected > 0
    type(fault).invariant(fault, MODES[mode], outcome, undisturbed)
