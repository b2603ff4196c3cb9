"""Notes of all ranks in the job's store: the first failure, a roll call, and the end of rank 0."""

import os
import socket
import time

import torch.distributed as dist

from lightning_hetero.comm.failures.failure import Failure

__all__ = ["Bulletin", "launcher_holds_store"]

FIRST, ROLL, OVER = "first", "roll", "over"
WAIT = 0.02
"""Seconds between two looks of a rank that waits for others."""


def launcher_holds_store() -> bool:
    """Return whether the job's store is torchrun's own, so that it outlives rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


class Bulletin:
    """Notes that every rank reads within a fraction of a second, whatever its main thread does.

    Each note raises a number in the store; :meth:`poll` reads no more than that number while it stays the same.

    Args:
        rank: this rank.
        world_size: number of ranks.
        store: store of these notes only.

    Attributes:
        first: the first failure of the job, once it is known.
        over: whether rank 0 has ended without a failure.

    Example:
        >>> store = dist.HashStore()
        >>> one, other = Bulletin(0, 2, store), Bulletin(1, 2, store)
        >>> one.roll_call(0.0)
        [1]
        >>> one.report(Failure(0, "KeyError: 'x'")) == other.report(Failure(1, "RuntimeError: Connection closed"))
        True
    """

    def __init__(self, rank: int, world_size: int, store: dist.Store) -> None:
        self.rank, self.world_size, self._store = rank, world_size, store
        self.first: Failure | None = None
        self.over = False
        self._seen = 0

    @property
    def others(self) -> list[int]:
        """All ranks but this one."""
        return [rank for rank in range(self.world_size) if rank != self.rank]

    @property
    def holder(self) -> str:
        """The job's store in words, with the process that holds it."""
        return "the job's store, which the launcher holds," if launcher_holds_store() else "the store that it holds"

    def sign(self, text: str) -> None:
        """Leave a sign of life of this rank."""
        self._store.set(f"sign/{self.rank}", text)

    def sign_of(self, rank: int) -> str:
        """Return the newest sign of life of a rank, empty if there is none yet."""
        name = f"sign/{rank}"
        return self._store.get(name).decode() if self._store.check([name]) else ""

    def sign_in(self) -> None:
        """Note host and number of this process."""
        self._store.set(f"process/{self.rank}", f"{os.getpid()} {socket.gethostname()}")

    def child(self, rank: int) -> int | None:
        """Return the process number of a rank that this process has started itself; ``None`` for any other."""
        if not self._store.check([f"process/{rank}"]):
            return None
        pid, host = self._store.get(f"process/{rank}").decode().split(maxsplit=1)
        if host != socket.gethostname():
            return None
        try:
            os.waitid(os.P_PID, int(pid), os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except (ChildProcessError, AttributeError):
            return None
        return int(pid)

    def poll(self) -> bool:
        """Read what is new, and answer a roll call; return whether anything was."""
        number = self._store.add("number", 0)
        if number == self._seen:
            return False
        if self._store.check([ROLL]):
            self._store.set(f"{ROLL}/{self.rank}", "")
        if self._store.check([OVER]):
            self.over = True
        self.known()
        self._store.set(f"read/{number}/{self.rank}", "")
        self._seen = number
        return True

    def known(self) -> Failure | None:
        """Return the first failure of the job, ``None`` if there is none so far."""
        if self.first is None and self._store.check([FIRST]):
            self.first = Failure.from_json(self._store.get(FIRST).decode())
        return self.first

    def report(self, failure: Failure) -> Failure:
        """Note a failure, unless there is one; return the first one."""
        text = self._store.compare_set(FIRST, "", failure.to_json())
        self._store.add("number", 1)
        self.first = Failure.from_json(text.decode())
        return self.first

    def end(self) -> None:
        """Note that rank 0 has ended without a failure."""
        self._store.set(OVER, "")
        self._store.add("number", 1)

    def roll_call(self, seconds: float) -> list[int]:
        """Return the ranks that do not answer within so many seconds; none if a failure becomes known meanwhile."""
        self._store.set(ROLL, "")
        self._store.set(f"{ROLL}/{self.rank}", "")
        self._store.add("number", 1)
        deadline = time.monotonic() + seconds
        while True:
            silent = self._without(f"{ROLL}/")
            if self.known() is not None:
                return []
            if not any(map(self.remains, silent)) or time.monotonic() > deadline:
                return silent
            time.sleep(WAIT)

    def remains(self, rank: int) -> bool:
        """Return whether a rank has not said that it leaves."""
        return not self._store.check([f"gone/{rank}"])

    def leave(self) -> None:
        """Note that this rank reads no more."""
        self._store.set(f"gone/{self.rank}", "")

    def begin_another(self) -> None:
        """Note that this rank begins another training, unless the notes of this one have been deleted."""
        if self._store.check([f"process/{self.rank}"]):
            self._store.set(f"another/{self.rank}", "")

    def has_begun_another(self, rank: int) -> bool:
        """Return whether a rank has begun another training."""
        return self._store.check([f"another/{rank}"])

    def settle(self, seconds: float) -> None:
        """Wait until the other ranks have read all notes, left or failed; the process with the store may end then."""
        deadline = time.monotonic() + seconds
        failed = None if self.first is None else self.first.rank
        while time.monotonic() < deadline:
            behind = self._without(f"read/{self._store.add('number', 0)}/")
            if not any(rank != failed and self.remains(rank) for rank in behind):
                return
            time.sleep(WAIT)

    def _without(self, note: str) -> list[int]:
        """Return the other ranks that have not left this note."""
        names = [f"{note}{rank}" for rank in self.others]
        if self._store.check(names):
            return []
        return [rank for rank, name in zip(self.others, names, strict=True) if not self._store.check([name])]
