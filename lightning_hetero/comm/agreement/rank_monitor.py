"""Monitor that names the rank all others wait for: stopped, lost with its host, or stuck in its own code.

A collective call waits silently until its timeout, and then does not say for which rank. Here a thread of each rank
leaves signs of life in the job's store; rank 0 reads those of all others, and the others read rank 0's.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from lightning_hetero.comm.agreement.group_lifetime import forget_keys

__all__ = ["MonitorSettings", "RankMonitor"]

log = logging.getLogger("lightning_hetero")

OVER = "over"
"""Last sign of a rank that stops monitoring: its silence from then on means nothing."""


@dataclass(frozen=True)
class MonitorSettings:
    """Times after which a rank counts as silent, and as lost.

    Args:
        period_s: seconds between two signs of life.
        quiet_s: seconds without one, or without progress while others wait, after which a rank is named; it is named
            again each time the wait has doubled.
        lost_s: seconds without a sign of life after which the job ends. The monitor's threads run whatever the main
            thread does, so the process must be stopped or gone.
    """

    period_s: float = 5.0
    quiet_s: float = 60.0
    lost_s: float = 600.0


SETTINGS = MonitorSettings()


class RankMonitor:
    """Signs of life of all ranks.

    One thread talks to the store, and may block there; the other judges, and so notices a blocked store as well.

    Args:
        rank: this rank.
        world_size: number of ranks.
        store: the job's store; keys are under a prefix of their own.
        progress: returns where the main thread is: epoch, batch, and whether it is in a backward pass (where it may
            wait for others).
        lost: called with a message to end the process.
        settings: times; by default those of the module.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: dist.Store,
        progress: Callable[[], tuple[int, int, bool]],
        lost: Callable[[str], None] | None = None,
        settings: MonitorSettings | None = None,
    ) -> None:
        self._settings = settings or SETTINGS
        self.rank, self.world_size, self._progress = rank, world_size, progress
        self._lost = _end_process if lost is None else lost
        own = store.clone() if hasattr(store, "clone") else store  # a connection that no other thread blocks
        run = store.add(f"lightning_hetero/monitor/{rank}", 1)  # all ranks start equally many monitors
        self._store = dist.PrefixStore(f"lightning_hetero/monitor/{run}", own)
        if rank == 0:  # all ranks have stopped the monitor before
            forget_keys(own, f"lightning_hetero/monitor/{run - 1}/")
        self._over = threading.Event()
        now = time.monotonic()
        self._answered = self._looked = now
        self._seen: dict[int, tuple[str, float, float]] = dict.fromkeys(range(world_size), ("", now, now))
        self._named: dict[int, float] = {}
        self.suspects = ""
        self._threads = [
            threading.Thread(target=target, name=f"lightning_hetero-{target.__name__}", daemon=True)
            for target in (self._beat, self._judge)
        ]

    def start(self) -> "RankMonitor":
        """Start both threads."""
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        """Stop both threads, except one that is blocked in a store that does not answer."""
        self._over.set()
        for thread in self._threads:
            thread.join(timeout=1.0)

    def _beat(self) -> None:
        count = 0
        try:
            while not self._over.wait(self._settings.period_s if count else 0.0):
                count += 1
                epoch, batch, waits = self._progress()
                self._store.set(str(self.rank), f"{count} {epoch} {batch} {int(waits)}")
                for rank in self._watched:
                    if self._store.check([str(rank)]):
                        self._note(rank, self._store.get(str(rank)).decode())
                self._answered = time.monotonic()
            self._store.set(str(self.rank), OVER)
        except (RuntimeError, ValueError) as error:  # the store is gone; the other thread notices
            log.debug("rank %d talks to the store no more: %s", self.rank, error)

    @property
    def _watched(self) -> list[int]:
        """Ranks that this one watches: all others on rank 0, rank 0 elsewhere; the traffic is linear in the ranks."""
        return [rank for rank in range(self.world_size) if rank != self.rank] if self.rank == 0 else [0]

    def _note(self, rank: int, sign: str) -> None:
        before, alive, moved = self._seen[rank]
        now = time.monotonic()
        if sign != before:
            alive = now
        if sign.split()[1:] != before.split()[1:]:
            moved = now
        self._seen[rank] = sign, alive, moved

    def _judge(self) -> None:
        since, before = time.monotonic(), self._progress()
        while not self._over.wait(self._settings.period_s / 2):
            now = time.monotonic()
            if now - self._looked > 3 * self._settings.period_s:  # this very process was stopped
                self._answered, since = now, now
                self._seen = {rank: (sign, now, now) for rank, (sign, _, _) in self._seen.items()}
            self._looked = now
            here = self._progress()
            since, before = (since, before) if here == before else (now, here)
            self._speak(now, now - since if here[2] else 0.0, here)

    def _speak(self, now: float, waiting: float, here: tuple[int, int, bool]) -> None:
        suspects = []
        if now - self._answered > self._settings.quiet_s and self.rank and self._seen[0][0] != OVER:
            suspects.append((0, now - self._answered, "the store that it holds does not answer", True))
        for rank in self._watched:
            sign, alive, moved = self._seen[rank]
            if sign in ("", OVER):  # it has not begun, or has ended
                continue
            if now - alive > self._settings.quiet_s and not (suspects or now - self._answered > self._settings.quiet_s):
                suspects.append((rank, now - alive, "it shows no sign of life", True))
            elif waiting > self._settings.quiet_s and sign.split()[1:] == [str(here[0]), str(here[1]), "0"]:
                what = f"it is in batch {here[1]} of epoch {here[0]} and has not come to its backward pass"
                suspects.append((rank, min(waiting, now - moved), what, False))
        self.suspects = "; ".join(f"rank {rank}: {what}, for {seconds:.0f} s" for rank, seconds, what, _ in suspects)
        for rank, seconds, what, gone in suspects:
            if gone and seconds > self._settings.lost_s:
                self._over.set()
                self._lost(
                    f"rank {self.rank} ends the training, which cannot go on: rank {rank} is lost ({what}, for "
                    f"{seconds:.0f} s). Look at that process and its host, and start again from the last checkpoint."
                )
                return
            if seconds > self._named.get(rank, self._settings.quiet_s):
                self._named[rank] = 2 * seconds
                log.warning(
                    "rank %d waits for rank %d: %s, for %.0f s. Is its process stopped, swapping, or stuck?",
                    *(self.rank, rank, what, seconds),
                )
        for rank in set(self._named) - {rank for rank, *_ in suspects}:
            del self._named[rank]
            log.info("rank %d goes on", rank)


def _end_process(text: str) -> Any:
    """End the process; an exception would not reach a main thread that waits in a collective call."""
    log.critical(text)
    logging.shutdown()
    os._exit(1)
