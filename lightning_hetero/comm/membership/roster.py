"""Roster: generations of workers that train together, agreed through the job's store.

Each change of the members makes a new generation. Whoever notices that one is due opens it; all living members of the
generation before come, newcomers that wait there join, and the first to come writes down who belongs to it. If that
one is lost before, the next generation is opened.
"""

import atexit
import functools
import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from lightning_hetero.comm.failures.store_keys import forget_keys
from lightning_hetero.comm.membership.group_sockets import keep_groups, shut_down_groups
from lightning_hetero.comm.membership.members import Generation, Member, MembershipError, TrainingOverError, is_open
from lightning_hetero.comm.membership.members_watch import MembersWatch
from lightning_hetero.comm.membership.slots import OVER, SILENT, Pulse, Slot, SlotBoard, job_board

__all__ = ["Roster", "RosterSettings"]

log = logging.getLogger("lightning_hetero")

LET_GO = "Connection closed: a worker was lost or has left, and this one waited in vain for the sum of gradients"
"""Error of a sum that gloo will not end."""


@dataclass(frozen=True)
class RosterSettings:
    """Times of a roster, in seconds.

    Args:
        poll_s: between two looks into the store.
        notice_s: wait after which the log says who is missing.
        join_s: longest wait for the fewest workers that train.
        stuck_s: after a member was lost, longest time for which this worker waits in its step. A worker that waits for
            longer ends, so that its keeper starts another.
    """

    poll_s: float = 0.02
    notice_s: float = 10.0
    join_s: float = 600.0
    stuck_s: float = 15.0


SETTINGS = RosterSettings()


class MembersStore(dist.Store):
    """Store whose waits end when a member is lost or has left, and hardly before: it may have much to do.

    Args:
        store: where the values are.
        broken: returns whether a member is lost or has left.
    """

    def __init__(self, store: dist.Store, broken: Callable[[], bool]) -> None:
        super().__init__()
        self._store, self._broken = store, broken

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until there are values for all keys.

        Raises:
            RuntimeError: if a member is lost or has left before, or no value comes within the default timeout of torch.
        """
        until = time.monotonic() + dist.default_pg_timeout.total_seconds()
        while not self._store.check(keys):
            if self._broken() or time.monotonic() > until:
                raise RuntimeError("Connection closed: a worker was lost, has left, or did not connect in time")
            time.sleep(SETTINGS.poll_s)

    @property
    def underlying_store(self) -> dist.Store:
        """Store where the values are."""
        return self._store

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._store.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        return self._store.num_keys()


class Roster:
    """Members of the job, as one worker sees them.

    Args:
        board: what keepers tell.
        slot: place of this worker.
        settings: times; by default those of the module.

    Attributes:
        generation: the generation that this worker belongs to, ``None`` before the first.
        fits: number of fits that this process has begun.
    """

    def __init__(self, board: SlotBoard, slot: Slot, settings: RosterSettings | None = None) -> None:
        self.board, self.slot, self._settings = board, slot, settings or SETTINGS
        self.me = Member(slot.slot, slot.life)
        self.generation: Generation | None = None
        self.fits = 0
        self._watch: MembersWatch | None = None
        self._fail: Callable[[str], int] | None = None
        self._store: MembersStore | None = None  # torch keeps its part in C++ alone

    @classmethod
    @functools.cache
    def of_process(cls) -> "Roster | None":
        """Return the roster of this process, ``None`` without a keeper; it begins to show that the process lives."""
        slot = Slot.of(os.environ)
        if slot is None:
            return None
        board = job_board(os.environ)
        found, pulse = cls(board, slot), Pulse(board, slot).start()
        for end in (keep_groups, shut_down_groups, found.leave, pulse.stop):  # in reverse
            atexit.register(end)  # groups of two workers that end could wait for each other, or for a message
        return found

    def begin_fit(self) -> None:
        """Count a fit, which may follow another one of this process."""
        self.fits += 1
        if self.fits > 1:
            self.board.begin(self.me.slot)

    @property
    def _present(self) -> Generation:
        assert self.generation is not None
        return self.generation

    @property
    def rank(self) -> int:
        """Rank of this worker in its generation."""
        return self._present.members.index(self.me)

    @property
    def world_size(self) -> int:
        """Number of workers in the generation."""
        return len(self._present.members)

    def make_store(self) -> dist.Store:
        """Return a new store of the generation, for its process groups; what the one before left in the job's goes."""
        present = self._present.number
        forget_keys(self.board.store, f"generation/{present - 1}/")

        def broken() -> bool:
            return bool(self.lost) if self._watch is None else self._watch.broken  # nobody watches after the last fit

        self._store = MembersStore(dist.PrefixStore(f"generation/{present}", self.board.store), broken)
        return self._store

    # how a generation begins

    def meet(self) -> Generation:
        """Return the next generation that has this worker among its members; waits for them.

        Raises:
            TrainingOverError: if the training has ended without this worker.
            TimeoutError: if too few workers come.
            MembershipError: if too few can come any more.
        """
        self.leave()
        newest = Generation.newest(self.board)
        number = 0 if newest is None else newest.number + 1
        while True:
            found = self._agree(number)
            if found is not None and self.me in found.members:
                break
            number += 1
        self.generation = found
        self.watch()
        return found

    def watch(self) -> None:
        """Watch the members of the generation."""
        self.leave()
        watched = self.board.clone(), self._present, self.me
        self._watch = MembersWatch(*watched, self._settings.stuck_s, self._let_go).start()

    def fail_by(self, fail: Callable[[str], int]) -> None:
        """Call this with an error when the worker waits in vain; it fails the calls that gloo does not, and counts."""
        self._fail = fail

    def _let_go(self) -> None:
        """Make the calls fail in which this worker waits; those of the others in the same groups fail, too."""
        log.debug("rank %d lets go of %d connections", self.rank, shut_down_groups())
        if self._fail is not None and self._fail(LET_GO):
            log.warning(
                "worker %d leaves a sum of gradients that gloo does not end: a connection was lost", self.me.slot
            )

    def leave(self) -> None:
        """Stop watching the members."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()

    def finish(self) -> None:
        """Say that the training is over, and stop watching: what is lost from now on is not replaced."""
        self.leave()
        self.board.finish(self.me.slot, self.me.life)

    def note(self, what: str, text: str) -> None:
        """Write down something of this fit, for workers that begin it when nobody has a state any more."""
        self.board.store.set(f"fit {self.fits}/{what}", text)

    def noted(self, what: str) -> str | None:
        """Return what was written down of this fit, ``None`` if nothing was."""
        return self.board.read(f"fit {self.fits}/{what}")

    def _agree(self, number: int) -> Generation | None:
        """Come for a generation; return it, ``None`` if its first member was lost before it had written it down."""
        store = self.board.store
        store.set(f"{number}/in/{self.me.slot}", str(self.me.life))
        me = f"{self.me.slot} {self.me.life}"
        leader = store.compare_set(f"{number}/led by", "", me).decode()  # in one call, in which nobody can be lost
        if leader == me:
            return self._lead(number)
        while True:
            gone = not self.board.lives(*map(int, leader.split()))
            found = Generation.read(self.board, number)  # read after the leader, who may write and then be lost
            if found is not None or gone:
                return found
            self._refuse_after_end(Generation.read(self.board, number - 1))
            time.sleep(self._settings.poll_s)

    def _lead(self, number: int) -> Generation:
        """Wait for the members, and write them down."""
        before = Generation.newest(self.board)
        begun, named = time.monotonic(), 0.0
        while True:
            self._refuse_after_end(before)
            arrived = self._arrived(number)
            missing = self._missing(() if before is None else before.members, arrived)
            if not missing and len(arrived) >= self.slot.least:
                break
            self._refuse_too_few({one.slot for one in arrived})
            waited = time.monotonic() - begun
            absent = missing or sorted(set(range(self.slot.slots)) - {one.slot for one in arrived})
            who = f"worker{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}"
            if not missing and waited > self._settings.join_s:
                raise TimeoutError(
                    f"{len(arrived)} workers came within {waited:.0f} s, and at least {self.slot.least} have to train: "
                    f"{who} did not come. Start more, or lower --min-workers."
                )
            if waited - named > self._settings.notice_s:
                named = waited
                log.warning("waiting for %s to come back, for %.0f s", who, waited)
            time.sleep(self._settings.poll_s)
        found = Generation(number, tuple(sorted(arrived)))
        found.write(self.board)
        return found

    def _arrived(self, number: int) -> list[Member]:
        """Return living workers that have come for a generation."""
        found = []
        for slot in range(self.slot.slots):
            life = self.board.read(f"{number}/in/{slot}")
            if life is not None and (slot == self.me.slot or self.board.lives(slot, int(life))):
                found.append(Member(slot, int(life)))
        return found

    def _missing(self, before: Iterable[Member], arrived: list[Member]) -> list[int]:
        """Return slots to wait for: living members of the generation before, or all slots if none of these lives."""
        staying = [one for one in before if one in arrived or one.lives(self.board)]
        if staying:
            return [one.slot for one in staying if one not in arrived]
        here = {one.slot for one in arrived}
        ended = (OVER, SILENT)
        return [one for one in range(self.slot.slots) if one not in here and self.board.state_of(one)[1] not in ended]

    def _refuse_too_few(self, arrived: set[int]) -> None:
        """Refuse to wait for workers that cannot come.

        Raises:
            MembershipError: if fewer than the fewest that train are left.
        """
        over = [one for one in range(self.slot.slots) if one not in arrived and self.board.state_of(one)[1] == OVER]
        left = self.slot.slots - len(over)
        if left < self.slot.least:
            raise MembershipError(
                f"{left} of {self.slot.slots} workers are left, and at least {self.slot.least} have to train: no other "
                f"follows on {', '.join(map(str, over))}. Raise --max-restarts, or lower --min-workers."
            )

    def _refuse_after_end(self, before: Generation | None) -> None:
        """Refuse to join if members of the generation before have finished training.

        Raises:
            TrainingOverError: if this worker was not one of them.
        """
        members = () if before is None else before.members
        if self.me not in members and any(self.board.finished([one.slot], one.life) for one in members):
            raise TrainingOverError(
                f"worker {self.me.slot} was started again after the others had finished training: nothing is left to "
                "do, and its script ends here"
            )

    # while it lasts

    @property
    def lost(self) -> list[Member]:
        """Members of the generation that do not live any more."""
        return [] if self.generation is None else self.generation.lost(self.board, self.me)

    @property
    def next_is_open(self) -> bool:
        """``True`` if someone has come for the next generation, as far as the watching thread knows."""
        return self._watch is not None and self._watch.next_is_open

    def changes(self, patience_s: float) -> bool:
        """Return whether the members change: one was lost, or the next generation is open; waits for a while."""
        until = time.monotonic() + patience_s
        while True:
            if self.lost or is_open(self.board, self._present.number + 1):
                return True
            if time.monotonic() > until:
                return False
            time.sleep(self._settings.poll_s)
