"""Slots of a job whose workers may be lost: what each worker's keeper knows of it, told through the job's store.

A job has as many slots as it began with workers. A slot's keeper, a small process, starts its worker, and starts
another when that one is lost: the slot's next life. What a keeper writes, all workers read.
"""

import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from lightning_hetero.comm.failures.main_thread import debugged

__all__ = ["Pulse", "Slot", "SlotBoard", "job_board"]

SLOT, SLOTS, LIFE = "LIGHTNING_HETERO_SLOT", "LIGHTNING_HETERO_SLOTS", "LIGHTNING_HETERO_LIFE"
LEAST, GENERATION = "LIGHTNING_HETERO_MIN_WORKERS", "LIGHTNING_HETERO_GENERATION"

RUNS, GONE, OVER, SILENT = "runs", "gone", "over", "silent"
"""State of a life: it runs; it was lost, and another follows; no other follows; its keeper's host is silent."""

ENDS = "ends"
"""Last sign of a life: its interpreter ends, and shows nothing any more."""

BEAT_S, SILENCE_S = 1.0, 10.0
"""Seconds between two signs of a keeper, and without one after which its host counts as lost."""


@dataclass(frozen=True)
class Slot:
    """Place of a worker in the job, from what its keeper has put into the environment.

    Args:
        slot: number of the slot: the rank that the launcher gave.
        slots: number of slots: the workers that the job began with.
        life: how often the slot's worker was started before.
        least: fewest workers that train.
    """

    slot: int
    slots: int
    life: int
    least: int = 1

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Slot | None":
        """Return the slot of this process, ``None`` without a keeper.

        Example:
            >>> Slot.of({"LIGHTNING_HETERO_SLOT": "2", "LIGHTNING_HETERO_SLOTS": "4", "LIGHTNING_HETERO_LIFE": "1"})
            Slot(slot=2, slots=4, life=1, least=1)
            >>> Slot.of({}) is None
            True
        """
        if SLOT not in environment:
            return None
        slot, slots, life = (int(environment[name]) for name in (SLOT, SLOTS, LIFE))
        return cls(slot, slots, life, int(environment.get(LEAST, 1)))


def refuse_lone_keeper(environment: Mapping[str, str]) -> None:
    """Refuse to train under a keeper where nothing brings the workers together again.

    Raises:
        RuntimeError: if this process has a keeper, and belongs to no generation of workers.

    Example:
        >>> refuse_lone_keeper({})
        >>> refuse_lone_keeper({"LIGHTNING_HETERO_SLOT": "0", "LIGHTNING_HETERO_GENERATION": "2"})
    """
    if SLOT in environment and GENERATION not in environment:
        raise RuntimeError(
            "this worker has a keeper (lightning_hetero.keeper), which works with Trainer(strategy='hetero_ddp') only: "
            "other strategies and loops do not go on when a worker is lost. Start the script without the keeper."
        )


def job_board(environment: Mapping[str, str], *, host: bool = False) -> "SlotBoard":
    """Return the slots of the job at ``MASTER_ADDR`` and ``MASTER_PORT``.

    Args:
        environment: what the launcher has set.
        host: whether this process holds the store, because the launcher holds none.
    """
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=host, wait_for_workers=False, timeout=timedelta(seconds=60))
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")  # all workers start anew with the launcher
    return SlotBoard(dist.PrefixStore(f"lightning_hetero/slots/{attempt}", store))


class SlotBoard:
    """Board on which keepers tell of their slots.

    Args:
        store: store of the job, under a prefix of its own.
    """

    def __init__(self, store: dist.Store) -> None:
        self.store = store
        self._beats: dict[int, tuple[str, float]] = {}

    def clone(self) -> "SlotBoard":
        """Return the same with a connection of its own, for another thread."""
        return SlotBoard(self.store.clone() if hasattr(self.store, "clone") else self.store)

    def tell(self, slot: int, life: int, state: str) -> None:
        """Say what has become of a life."""
        self.store.set(f"slot/{slot}", f"{life} {state}")

    def beat(self, slot: int, count: int) -> None:
        """Show that the slot's keeper lives."""
        self.store.set(f"beat/{slot}", str(count))

    def read(self, key: str) -> str | None:
        """Return a value of the store at once, ``None`` if there is none yet."""
        return self.store.get(key).decode() if self.store.check([key]) else None

    def state_of(self, slot: int) -> tuple[int, str]:
        """Return the newest life of a slot and its state; ``(-1, "runs")`` before its keeper has said anything."""
        said = self.read(f"slot/{slot}")
        if said is None:
            return -1, RUNS
        life, state = said.split()
        return int(life), state if state == OVER or self._keeper_lives(slot) else SILENT

    def lives(self, slot: int, life: int) -> bool:
        """Return whether this life of a slot runs."""
        newest, state = self.state_of(slot)
        return newest == life and state == RUNS

    def pulse_of(self, slot: int, life: int) -> str:
        """Return the newest sign of this life; empty before the first, or if it gives none."""
        sign = self.read(f"pulse/{slot}") or ""
        return sign if sign.startswith(f"{life} ") else ""

    def finish(self, slot: int, life: int) -> None:
        """Note that a life has finished training."""
        self.store.set(f"finished/{slot}", str(life))

    def begin(self, slot: int) -> None:
        """Note that a slot begins to train, maybe once more."""
        self.store.set(f"finished/{slot}", "")

    def finished(self, slots: Iterable[int], life: int | None = None) -> bool:
        """Return whether a worker of one of these slots, or this life of it, has finished training."""
        lives = [self.read(f"finished/{slot}") for slot in slots]
        return any(one and life in (None, int(one)) for one in lives)

    def _keeper_lives(self, slot: int) -> bool:
        sign, now = self.read(f"beat/{slot}") or "", time.monotonic()
        seen, since = self._beats.get(slot, ("", now))
        if sign != seen or slot not in self._beats:
            self._beats[slot] = seen, since = sign, now
        return now - since < SILENCE_S


class Pulse:
    """Thread that shows a worker's keeper that the process is not stopped.

    It runs whatever the main thread does, as long as the interpreter runs. A process under a debugger shows nothing: it
    may be stopped as long as its user likes.

    Args:
        board: what keepers read.
        slot: place of the worker.
    """

    def __init__(self, board: SlotBoard, slot: Slot) -> None:
        self._board, self._slot, self._over = board.clone(), slot, threading.Event()
        self._thread = threading.Thread(target=self._run, name="lightning_hetero-pulse", daemon=True)

    def start(self) -> "Pulse":
        """Start the thread."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop the thread, and say that the process ends, which must not leave the thread in a call to the store."""
        self._over.set()
        self._thread.join(timeout=2.0)
        with suppress(RuntimeError):
            if not self._thread.is_alive() and self._board.pulse_of(self._slot.slot, self._slot.life):
                self._board.store.set(f"pulse/{self._slot.slot}", f"{self._slot.life} {ENDS}")

    def _run(self) -> None:
        count = 0
        with suppress(RuntimeError):  # the store is gone, and with it the job
            while not debugged():
                count += 1
                self._board.store.set(f"pulse/{self._slot.slot}", f"{self._slot.life} {count}")
                if self._over.wait(BEAT_S):
                    return
            self._board.store.set(f"pulse/{self._slot.slot}", "")
