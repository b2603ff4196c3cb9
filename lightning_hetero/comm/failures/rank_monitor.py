"""Monitor that names the rank all others wait for: stopped, lost with its host, or stuck in its own code.

A collective call waits silently until its timeout, and then does not say for which rank. Here a thread of each rank
leaves signs of life in the job's store; rank 0 reads those of all others, and the others read rank 0's.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from lightning_hetero.comm.failures.bulletin import Bulletin
from lightning_hetero.comm.failures.failure import Failure
from lightning_hetero.comm.failures.main_thread import debugged, in_collective

__all__ = ["ENDED", "MonitorSettings", "RankMonitor", "end_process"]

log = logging.getLogger("lightning_hetero")

OVER = "over"
"""Last sign of a rank that stops monitoring: its silence from then on means nothing."""
AGAIN = "over, and it has begun another"
"""What stands for that sign if the rank has begun another training: it never comes back to this one."""
Stand = tuple[int, int, bool, bool]
"""Epoch, batch, whether in a backward pass, and whether in a collective call that does not end."""

ENDED = "it takes no part any more, because its training has ended"


@dataclass(frozen=True)
class MonitorSettings:
    """Times after which a rank counts as silent, and as lost.

    Args:
        period_s: seconds between two signs of life.
        poll_s: seconds between two looks at the notes of other ranks.
        quiet_s: seconds without progress while others wait, after which a rank is named; it is named again each time
            the wait has doubled.
        lost_s: seconds without a sign of life after which the job ends; the rank is named after half of them. The
            monitor's threads run whatever the main thread does, so the process must be stopped or gone. Also the
            longest wait in a collective call for a rank that has ended its training, and so never comes.
        answer_s: seconds that ranks have to answer a roll call.
    """

    period_s: float = 5.0
    poll_s: float = 0.25
    quiet_s: float = 60.0
    lost_s: float = 60.0
    answer_s: float = 3.0

    def within(self, timeout: timedelta | None) -> "MonitorSettings":
        """Return settings that fit a shorter timeout of collectives, whose error is to come before the end.

        Example:
            >>> MonitorSettings().within(timedelta(seconds=9)).lost_s
            12.0
        """
        if timeout is None or timeout.total_seconds() + self.answer_s >= self.lost_s:
            return self
        lost = timeout.total_seconds() + self.answer_s
        return replace(self, lost_s=lost, period_s=min(self.period_s, lost / 12), poll_s=min(self.poll_s, lost / 12))


SETTINGS = MonitorSettings()


class RankMonitor:
    """Signs of life of all ranks.

    One thread talks to the store, and may block there; the other judges, and so notices a blocked store as well.

    Args:
        bulletin: notes of all ranks, over a connection to the store that no other thread blocks.
        progress: returns where the main thread is: epoch, batch, and whether it is in a backward pass (where it may
            wait for others).
        lost: called once, with the failure that ends this process.
        settings: times; by default those of the module.

    Attributes:
        suspects: ranks that others wait for, in words.
        cut_off: whether the connection to the store is closed.
    """

    def __init__(
        self,
        bulletin: Bulletin,
        progress: Callable[[], tuple[int, int, bool]],
        lost: Callable[[Failure], Any],
        settings: MonitorSettings | None = None,
    ) -> None:
        self.settings = settings or SETTINGS
        self._bulletin, self._progress, self._lost = bulletin, progress, lost
        self._over, self._spared = threading.Event(), False
        self._known = threading.Lock()
        now = time.monotonic()
        self._answered = self._looked = now
        self._seen: dict[int, tuple[str, float, float]] = dict.fromkeys(range(bulletin.world_size), ("", now, now))
        self._named: dict[int, float] = {}
        self._deadline: float | None = None
        self.suspects, self.cut_off = "", False
        self._threads = [
            threading.Thread(target=target, name=f"lightning_hetero-{target.__name__}", daemon=True)
            for target in (self._beat, self._judge)
        ]

    def start(self) -> "RankMonitor":
        """Start both threads."""
        for thread in self._threads:
            thread.start()
        return self

    def spare(self) -> None:
        """Let this process end by itself from now on: it handles an error of its own, and may save a checkpoint."""
        self._spared = True

    def stop(self) -> None:
        """Stop both threads, except one that is blocked in a store that does not answer."""
        self._over.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=1.0)

    @property
    def _watched(self) -> list[int]:
        """Ranks that this one watches: all others on rank 0, rank 0 elsewhere; the traffic is linear in the ranks."""
        return self._bulletin.others if self._bulletin.rank == 0 else [0]

    def _beat(self) -> None:
        count, due = 0, 0.0
        try:
            while not self._over.wait(self.settings.poll_s if count else 0.0):
                if self._bulletin.poll():
                    self.learn()
                self._answered = time.monotonic()
                if self._answered < due:
                    continue
                count, due = count + 1, self._answered + self.settings.period_s
                epoch, batch, waits = self._progress()
                self._bulletin.sign(f"{count} {epoch} {batch} {int(waits)} {int(in_collective())} {int(debugged())}")
                for rank in self._bulletin.others if self._never_comes else self._watched:
                    sign = self._bulletin.sign_of(rank)
                    again = sign == OVER and self._bulletin.has_begun_another(rank)
                    self._note(rank, AGAIN if again else sign)
            self._bulletin.sign(OVER)
        except (RuntimeError, ValueError) as error:  # the store is gone; the other thread notices
            self.cut_off = True
            log.debug("rank %d talks to the store no more: %s", self._bulletin.rank, error)

    def _note(self, rank: int, sign: str) -> None:
        before, alive, moved = self._seen[rank]
        now = time.monotonic()
        if sign != before:
            alive = now
        if sign.split()[1:4] != before.split()[1:4]:
            moved = now
        self._seen[rank] = sign, alive, moved

    def learn(self) -> None:
        """Act on the first failure of the job: rank 0 says it, and this process is to end."""
        first, rank = self._bulletin.first, self._bulletin.rank
        if first is None or not self._known.acquire(blocking=False):
            return
        if rank == 0 and first.rank != 0 and not first.lost:
            log.error("%s%s", first, f"\n{first.trace}" if first.trace else "")
        self._deadline = time.monotonic() + (0.0 if first.lost else self.settings.lost_s)
        if first.lost:
            self._end(first)

    def _end(self, failure: Failure) -> None:
        if not (self._spared or self._over.is_set()):
            self._over.set()
            self._lost(failure)

    def _judge(self) -> None:
        since, before = time.monotonic(), self._stand()
        while not self._over.wait(self.settings.period_s / 2):
            now = time.monotonic()
            if now - self._looked > 3 * self.settings.period_s:  # this very process was stopped
                self._answered, since = now, now
                self._seen = {rank: (sign, now, now) for rank, (sign, _, _) in self._seen.items()}
            self._looked = now
            here = self._stand()
            since, before = (since, before) if here == before else (now, here)
            self._speak(now, now - since if any(here[2:]) else 0.0, here)
            if self._deadline is not None and now > self._deadline and self._bulletin.first is not None:
                self._end(self._bulletin.first)

    def _stand(self) -> Stand:
        """Return where the main thread is, and whether it waits in vain elsewhere.

        So it does in a collective call if a rank has begun another training, and all others wait, too. Else one of them
        may still come, as to a ``gather``, which that rank has left when its part was sent.
        """
        epoch, batch, backward = self._progress()
        in_vain = not backward and self._never_comes and all(map(self._waits, self._bulletin.others))
        return epoch, batch, backward, in_vain and in_collective()

    def _speak(self, now: float, waiting: float, here: Stand) -> None:
        suspects, me = self._suspected(now, waiting, here), self._bulletin.rank
        self.suspects = "; ".join(f"rank {rank}: {what}, for {seconds:.0f} s" for rank, seconds, what, _ in suspects)
        for rank, seconds, what, gone in suspects:
            if gone and seconds > self.settings.lost_s and not self._seen[rank][0].endswith(" 1"):
                self._end(Failure(rank, f"{what}, for {seconds:.0f} s", lost=True))
                return
            if seconds > self._named.get(rank, self._quiet_s if gone else self.settings.quiet_s):
                self._named[rank] = 2 * seconds
                ask = "" if what == ENDED else " Is its process stopped, swapping, or stuck?"
                log.warning("rank %d waits for rank %d: %s, for %.0f s.%s", me, rank, what, seconds, ask)
        for rank in set(self._named) - {rank for rank, *_ in suspects}:
            del self._named[rank]
            log.info("rank %d goes on", rank)

    @property
    def _quiet_s(self) -> float:
        """Seconds without a sign of life after which a rank is named."""
        return min(self.settings.quiet_s, self.settings.lost_s / 2)

    def _suspected(self, now: float, waiting: float, here: Stand) -> list[tuple[int, float, str, bool]]:
        """Return the ranks that others wait for: for how long, why, and whether they can never come."""
        suspects: list[tuple[int, float, str, bool]] = []
        blind = now - self._answered > self._quiet_s
        if blind and self._bulletin.rank and not self._has_ended(0):
            suspects.append((0, now - self._answered, f"{self._bulletin.holder} does not answer", True))
        for rank in self._watched:
            sign, alive, moved = self._seen[rank]
            if sign == "":  # it has not begun
                continue
            if self._has_ended(rank):  # it may have caught its error, and go on with something else
                ended = min(waiting, now - alive)
                if ended > self._quiet_s and not blind:
                    suspects.append((rank, ended, ENDED, True))
            elif now - alive > self._quiet_s and not blind:
                suspects.append((rank, now - alive, "it shows no sign of life", True))
            elif here[2] and waiting > self.settings.quiet_s:
                what = self._elsewhere(sign, here)
                if what:
                    suspects.append((rank, min(waiting, now - moved), what, False))
        return suspects

    def _elsewhere(self, sign: str, here: Stand) -> str:
        """Return where another rank is, if that is not the backward pass in which this one waits; else nothing."""
        epoch, batch, backward = map(int, sign.split()[1:4])
        if (epoch, batch, backward) == here[:3]:
            return ""
        at = f"it is in batch {batch} of epoch {epoch}"
        if (epoch, batch) == here[:2]:
            return f"{at} and has not come to its backward pass"
        return f"{at}, and rank {self._bulletin.rank} in batch {here[1]} of epoch {here[0]}"

    @property
    def _never_comes(self) -> bool:
        """``True`` if a rank that this one watches has begun another training."""
        return any(self._seen[rank][0] == AGAIN for rank in self._watched)

    def _waits(self, rank: int) -> bool:
        """Return whether a rank has ended, or was in a backward pass or a collective call at its last sign."""
        return self._has_ended(rank) or "1" in self._seen[rank][0].split()[3:5]

    def _has_ended(self, rank: int) -> bool:
        """Return whether a rank has said that its training is over."""
        return self._seen[rank][0] in (OVER, AGAIN) or (rank == 0 and self._bulletin.over)


def end_process(text: str) -> Any:
    """End the process; an exception would not reach a main thread that waits in a collective call."""
    log.critical(text)
    logging.shutdown()
    os._exit(1)
