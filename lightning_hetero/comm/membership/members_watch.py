"""Thread that notices newcomers and lost members, and frees or ends a process that is stuck after a loss."""

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable

from lightning_hetero.comm.membership.members import Generation, Member, is_open
from lightning_hetero.comm.membership.slots import SlotBoard

__all__ = ["STUCK", "MembersWatch"]

log = logging.getLogger("lightning_hetero")

STUCK = 75
"""Exit code of a worker that ends so that its keeper starts another; it does not count as a failure."""
LET_GO_S = 2.0
"""Seconds of waiting, after a member was lost or has left, before this worker lets go of the calls that it waits in."""
LOOK_S = 0.25
"""Seconds between two looks."""
IDLE = 0.05
"""Share of a core below which the main thread waits rather than computes."""


def main_thread_seconds() -> float:
    """Return the computing time of the main thread; always 0 where the system does not tell."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(threading.main_thread().ident or 0))


class MembersWatch:
    """Watch over the members of one generation.

    Args:
        board: what keepers tell, over a connection that no other thread uses.
        generation: the generation.
        me: this worker.
        stuck_s: seconds after a member was lost, or has left, after which this process ends if it has not left the
            generation, and its main thread waits. A long computation is no fault: it leads to a call that fails.
        let_go: makes the calls fail in which this process waits for others, as far as it can; called before.

    Attributes:
        next_is_open: whether someone has come for the next generation.
        broken: whether a member is lost or has left.
    """

    def __init__(
        self, board: SlotBoard, generation: Generation, me: Member, stuck_s: float, let_go: Callable[[], object]
    ) -> None:
        self._board, self._generation, self._me, self._stuck_s, self._let_go = board, generation, me, stuck_s, let_go
        self.next_is_open = self.broken = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lightning_hetero-members", daemon=True)

    def start(self) -> "MembersWatch":
        """Start the thread."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop the thread."""
        self._over.set()
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        since, begun, held = None, 0.0, True
        while not self._over.wait(LOOK_S):
            try:
                self.next_is_open = is_open(self._board, self._generation.number + 1)
                lost = self._generation.lost(self._board, self._me)
                lost += self._generation.left(self._board, self._me) if self.next_is_open else []
            except RuntimeError as error:  # the store is gone, and with it the job
                log.debug("worker %d watches the members no more: %s", self._me.slot, error)
                return
            self.broken, now, spent = bool(lost), time.monotonic(), main_thread_seconds()
            if not lost:
                since = None
            elif since is None or spent - begun > IDLE * (now - since + LOOK_S):
                since, begun = now, spent
            elif now - since > self._stuck_s:
                self._end(lost, now - since)
            elif held and now - since > LET_GO_S:
                held = False
                self._let_go()

    def _end(self, lost: list[Member], waited: float) -> None:
        """End the process, and write where each of its threads is."""
        who = ", ".join(f"worker {one.slot}" for one in lost)
        log.critical(
            "worker %d ends, and its keeper starts another: %s was lost or has left, and this one waits, for %.0f s",
            *(self._me.slot, who, waited),
        )
        faulthandler.dump_traceback(all_threads=True)
        logging.shutdown()
        os._exit(STUCK)
