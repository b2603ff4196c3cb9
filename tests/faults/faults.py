"""Faults as data: what goes wrong, on which rank, and at which of its batches.

Each class says how the fault is made, in the process of the rank; what must then hold is in
:mod:`tests.faults.invariants`. A fault counts each time that it happens, in a file that outlives the process.
"""

import ctypes
import faulthandler
import io
import os
import resource
import signal
import socket
import struct
import subprocess
import time
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import psutil
import torch
import torch.distributed as dist

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.compression import MessageFormat
from lightning_hetero.compression.message_header import HEADER_BYTES, checksum, seal


def resealed(form, message):
    """The message with a checksum that fits what is in it, as a faulty sender would write it."""
    data = message.numpy()
    first, second = checksum(data[HEADER_BYTES:], form.positions)
    data[40:56].view(np.int64)[:] = seal(first, data[8:40].view(np.int64).tolist()), second
    return message


COLLECTIVES = ("allreduce", "allgather", "broadcast", "gather", "send", "recv", "barrier")
"""Methods of a process group by which ranks talk; all of torch's own collectives and ours end in them."""

BUG = "a bug of the user's"


class Injector:
    """The one place where a fault enters a training: called with the loss of each batch of this rank, returns it.

    Args:
        fault: what goes wrong, ``None`` in an undisturbed run.
        rank: this rank.
        folder: where injections are counted, and where the run is recorded.
    """

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


@dataclass(frozen=True)
class Fault:
    """A fault of one rank, from one of its batches on.

    Args:
        rank: whose.
        at: batches of this rank before it.
    """

    rank: int = 1
    at: int = 4

    batches: ClassVar[int] = 1
    """Batches in which it strikes."""
    times: ClassVar[int | None] = 1
    """How often it happens in a whole run; ``None`` for at least once."""
    error: ClassVar[tuple[str, str]] = ("", "")
    """Kind of the error of its rank, and a pattern of its text."""

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


# a rank is gone


class Kill(Fault):
    """The kernel takes its memory, or a node is lost."""

    error = ("Died", "signal 9")

    def strike(self, injector, loss):
        os.kill(os.getpid(), signal.SIGKILL)


class Segfault(Fault):
    """A kernel or an extension reads what is not its own."""

    error = ("Died", "signal 11")

    def strike(self, injector, loss):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler.disable()  # pytest's would write the stacks
        ctypes.string_at(0)


class Raise(Fault):
    """The user's code fails."""

    error = ("ZeroDivisionError", BUG)

    def strike(self, injector, loss):
        raise ZeroDivisionError(BUG)


class Sigterm(Fault):
    """The scheduler tells one rank to end."""

    def strike(self, injector, loss):
        os.kill(os.getpid(), signal.SIGTERM)


@dataclass(frozen=True)
class OutOfMemory(Fault):
    """A batch does not fit in the device's memory, in one of its two passes."""

    where: str = "forward"
    error: ClassVar[tuple[str, str]] = ("OutOfMemoryError", "out of memory")

    def strike(self, injector, loss):
        def full(*_):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        if self.where == "forward":
            full()
        loss.register_hook(full)


# a rank is slow


@dataclass(frozen=True)
class Freeze(Fault):
    """The process stands still with all its threads, as under memory pressure or in a moved virtual machine."""

    seconds: float = 0.5

    def strike(self, injector, loss):
        subprocess.Popen(["sh", "-c", f"sleep {self.seconds}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)


@dataclass(frozen=True)
class Pause(Fault):
    """Only the training waits, as in a debugger or for a file; the process's other threads go on."""

    seconds: float = 0.5

    def strike(self, injector, loss):
        time.sleep(self.seconds)


@dataclass(frozen=True)
class Slow(Fault):
    """Some batches take so many times as long as the others, which take about a millisecond."""

    factor: float = 30.0
    batches: ClassVar[int] = 3
    times: ClassVar[int] = 3

    def strike(self, injector, loss):
        time.sleep(self.factor / 1000)


# a rank computes nonsense


class NaN(Fault):
    """A batch has the loss NaN."""

    factor = float("nan")

    def strike(self, injector, loss):
        return loss * self.factor

    def settings(self, folder):
        return {"on_nonfinite": "skip"}


class Inf(NaN):
    """A batch has an infinite loss."""

    factor = float("inf")


def parameters_of(loss):
    """Parameters that a loss depends on."""
    found, queue = [], [loss.grad_fn]
    while queue:
        node = queue.pop()
        if hasattr(node, "variable"):
            found.append(node.variable)
        queue += [following for following, _ in node.next_functions if following is not None]
    return found


class Diverge(Fault):
    """One weight changes by one unit in the last place, as by a bit that flips in memory."""

    def strike(self, injector, loss):
        one = injector.parameters[0].data.view(-1)[:1]
        one.copy_(torch.nextafter(one, one + 1))


# ranks that hold different things


class WrongPlan(Fault):
    """Of what rank 0 has decided in a sync round, one number arrives wrong."""

    batches: ClassVar[int] = 0
    error = ("PlanMismatchError", r"must be equal on all ranks; got rank 0: .* rank 1: ")

    def prepare(self, injector):
        decide = ControlPlane.decide

        def wrong(control, decision):
            decided = decide(control, decision)
            if not injector.running or not isinstance(decided, tuple) or len(decided) != 4:
                return decided
            injector.count()
            entry, predicted, following, choice = decided
            return entry, predicted, following + 3, choice

        ControlPlane.decide = wrong

    def settings(self, folder):
        return {"replan": 2}


@dataclass(frozen=True)
class CorruptMessage(Fault):
    """A compressed message arrives cut off, with another bit, with impossible indices, or a second time."""

    kind: str = "truncated"
    batches: ClassVar[int] = 0
    error: ClassVar[tuple[str, str]] = ("ValueError", r"message of rank 1, bucket \d+, step \d+ is refused")

    def prepare(self, injector):
        write, sent = MessageFormat.write_header, []

        def damaged(form, message, *args, **kwargs):
            write(form, message, *args, **kwargs)
            if not injector.running or not sent:
                sent[:] = [message.clone()]
                return
            injector.count()
            if self.kind == "truncated":
                message[len(message) // 2 :] = 0
            elif self.kind == "flipped":
                message[form.values_at] ^= 4
            elif self.kind == "indices":
                message[form.places_at : form.values_at] = 255
                resealed(SimpleNamespace(positions=form.positions), message)
            else:
                message.copy_(sent[0])

        MessageFormat.write_header = damaged


# the link


@dataclass(frozen=True)
class LinkDelay(Fault):
    """Whatever the rank sends leaves later: a wrapper around the calls of its process groups, which needs no root."""

    seconds: float = 0.005
    batches: ClassVar[int] = 0
    times: ClassVar[int | None] = None

    def prepare(self, injector):
        for name in COLLECTIVES:
            setattr(dist.ProcessGroup, name, self._delayed(injector, getattr(dist.ProcessGroup, name)))

    def _delayed(self, injector, call):
        def delayed(*args, **kwargs):
            if injector.running:
                injector.messages += 1
                if self.hits(injector.messages):
                    injector.count()
                    time.sleep(self.seconds)
            return call(*args, **kwargs)

        return delayed

    def hits(self, message):
        """Return whether this message is delayed, the first having the number 1."""
        return True


@dataclass(frozen=True)
class LinkLoss(LinkDelay):
    """Every tenth message is lost, and sent again after the shortest time that TCP waits for an answer."""

    seconds: float = 0.2

    def hits(self, message):
        return message % 10 == 1


@dataclass(frozen=True)
class LinkDown(LinkDelay):
    """Nothing arrives for some time; then all that was sent meanwhile."""

    seconds: float = 0.5
    times: ClassVar[int | None] = 1

    def hits(self, message):
        return message == 1


class LinkCut(Fault):
    """All connections of a rank to the others are closed for good, as by a firewall; the job's store stays in reach."""

    error = ("RuntimeError|ElasticWorkerError", "onnection|merge")

    def strike(self, injector, loss):
        store = int(os.environ["MASTER_PORT"])
        for one in psutil.Process().net_connections("tcp"):
            if one.status == psutil.CONN_ESTABLISHED and store not in (one.laddr.port, one.raddr.port):
                with suppress(OSError), socket.socket(fileno=os.dup(one.fd)) as copy:
                    copy.shutdown(socket.SHUT_RDWR)


# files


class DiskFull(Fault):
    """The record of the run is on a disk that is full."""

    batches: ClassVar[int] = 0

    def prepare(self, injector):
        injector.count()

    def settings(self, folder):
        place = Path(folder) / "record"
        place.mkdir(exist_ok=True)
        with suppress(FileExistsError):
            (place / "hetero_run.jsonl").symlink_to("/dev/full")
        return {"report": str(place), "replan": 2}


class ReadOnly(DiskFull):
    """The folder of the record can only be read, also by root."""

    def settings(self, folder):
        return {"report": "/proc/of-the-run", "replan": 2}


class OfFile(Fault):
    """Damage to a checkpoint between two runs."""

    def damage(self, path, folder):
        """Damage a file, and count it in the folder of the run that is to read it."""
        content = bytearray(path.read_bytes())
        self.change(content)
        assert content != path.read_bytes()
        path.write_bytes(content)
        Injector(None, self.rank, folder).count()

    def change(self, content):
        """Change the content of a file."""
        raise NotImplementedError


class TruncateCheckpoint(OfFile):
    """The second half of a checkpoint is missing when a run goes on from it."""

    def change(self, content):
        del content[len(content) // 2 :]


class FlipByte(OfFile):
    """One byte has changed in the middle of the largest record of a checkpoint; between records nothing is read."""

    def change(self, content):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            record = max(archive.infolist(), key=lambda one: one.file_size)
        name, extra = struct.unpack_from("<HH", content, record.header_offset + 26)
        content[record.header_offset + 30 + name + extra + record.file_size // 2] ^= 0xFF


# clocks


@dataclass(frozen=True)
class ClockJump(Fault):
    """The time of day is set, forwards or back."""

    hours: float = 5.0

    def strike(self, injector, loss):
        honest, honest_ns = time.time, time.time_ns
        time.time = lambda: honest() + 3600 * self.hours
        time.time_ns = lambda: honest_ns() + int(3600e9 * self.hours)


FAULTS = (
    Kill(0),
    Kill(1),
    Segfault(),
    Raise(0),
    Raise(1),
    Sigterm(),
    OutOfMemory(where="forward"),
    OutOfMemory(where="backward"),
    Freeze(),
    Pause(0),
    Slow(),
    NaN(),
    Inf(0),
    Diverge(),
    WrongPlan(),
    CorruptMessage(kind="truncated"),
    CorruptMessage(kind="flipped"),
    CorruptMessage(kind="indices"),
    CorruptMessage(kind="duplicated"),
    LinkDelay(),
    LinkLoss(),
    LinkDown(),
    LinkCut(),
    DiskFull(0),
    ReadOnly(0),
    ClockJump(hours=5.0),
    ClockJump(hours=-5.0),
    TruncateCheckpoint(),
    FlipByte(),
)
