"""Keeper of a worker: starts the training script, and starts it again when it is lost, while the others go on.

Run it in the place of the script, under torchrun or any launcher that sets ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``
and ``MASTER_PORT``::

    torchrun --nproc-per-node=4 -m lightning_hetero.keeper train.py --lr 0.1

The launcher sees the keeper, which stays, so it does not restart the other workers.
"""

import argparse
import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import DistError

from lightning_hetero.comm.membership.members import Generation
from lightning_hetero.comm.membership.members_watch import STUCK
from lightning_hetero.comm.membership.slots import (
    BEAT_S,
    ENDS,
    GONE,
    LEAST,
    LIFE,
    OVER,
    RUNS,
    SLOT,
    SLOTS,
    SlotBoard,
    job_board,
)

__all__ = ["Keeper", "main"]

log = logging.getLogger("lightning_hetero")

END_S = 60.0
"""Least seconds that an interpreter gets to end."""


class Keeper:
    """Keeper of one slot.

    Args:
        command: command of the worker.
        board: what keepers tell each other and the workers.
        slot: number of the slot.
        slots: number of slots.
        restarts: how often a lost worker is started again.
        least: fewest workers that train.
        silence: seconds without a sign of life after which the worker is killed, because it was stopped.
    """

    def __init__(
        self,
        command: Sequence[str],
        board: SlotBoard,
        *,
        slot: int,
        slots: int,
        restarts: int = 3,
        least: int = 1,
        silence: float = 30.0,
    ) -> None:
        self.command, self.board, self.slot, self.slots = list(command), board, slot, slots
        self.restarts, self.least, self.silence = restarts, least, silence
        self._worker: subprocess.Popen[bytes] | None = None
        self._told, self._over = 0, threading.Event()

    def run(self) -> int:
        """Run the worker until it ends by itself, is told to end, or was lost too often; return its exit code.

        If the job's store is lost, nobody can meet any more: end the worker, and return 1.
        """
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._pass_on)
        beats = threading.Thread(target=self._beat, name="lightning_hetero-keeper")
        beats.start()
        try:
            return self._lives()
        except DistError as error:
            reason = str(error).partition("\n")[0]
            log.error("worker %d ends: the job's store, through which workers meet, is lost (%s)", self.slot, reason)  # noqa: TRY400
            if self._worker is not None:
                self._worker.kill()
            return 1
        finally:
            self._over.set()
            beats.join()

    def _lives(self) -> int:
        life, failures = 0, 0
        while True:
            code = self._live(life)
            failures += code not in (0, STUCK)
            ended = self.board.finished(range(self.slots))
            last = code == 0 or bool(self._told) or failures > self.restarts or ended
            self.board.tell(self.slot, life, OVER if last else GONE)
            if last and code and not self._told and not self.board.finished([self.slot], life):
                code = self._outcome_without(code)
            if last:
                return code if code >= 0 else 128 - code
            log.warning(
                "worker %d was lost (exit code %d); its keeper starts it again (restart %d)",
                *(self.slot, code, life + 1),
            )
            if life == 0 and Generation.newest(self.board) is None:
                log.warning("no fit with strategy='hetero_ddp' has begun here: nothing else goes on without a worker")
            life += 1

    def _outcome_without(self, code: int) -> int:
        """Wait for the others, which go on without this slot; return 0 if they finish training, else ``code``."""
        others = [slot for slot in range(self.slots) if slot != self.slot]
        without = ": the others go on without it" if self._run(others) >= self.least else ""
        log.warning("worker %d was lost (exit code %d), and is not started again%s", self.slot, code, without)
        while not self._told:
            if self.board.finished(others):
                log.warning("the others have finished training without worker %d", self.slot)
                return 0
            if not self._run(others):
                break
            time.sleep(BEAT_S)
        return code

    def _run(self, slots: Iterable[int]) -> int:
        """Return how many of these slots run."""
        return sum(self.board.state_of(slot)[1] in (RUNS, GONE) for slot in slots)

    def outlast(self, seconds: float = 60.0) -> None:
        """Wait until no other slot runs: this process holds the store that they read."""
        until = time.monotonic() + seconds
        others = [slot for slot in range(self.slots) if slot != self.slot]
        while time.monotonic() < until and self._run(others):
            time.sleep(BEAT_S / 4)

    def _live(self, life: int) -> int:
        """Run one life of the worker; return its exit code, negative for a signal."""
        environment = {
            **os.environ,
            SLOT: str(self.slot),
            SLOTS: str(self.slots),
            LIFE: str(life),
            LEAST: str(self.least),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # no worker holds the store
        }
        self.board.tell(self.slot, life, RUNS)
        worker = self._worker = self._start(environment)
        sign, heard = "", time.monotonic()
        while True:
            with suppress(subprocess.TimeoutExpired):
                return worker.wait(timeout=BEAT_S)
            newest, now = self.board.pulse_of(self.slot, life), time.monotonic()
            if newest != sign or (not newest and self._may_yet_begin(worker.pid)):
                sign, heard = newest, now
            ends = newest.endswith(ENDS)
            if now - heard > (max(self.silence, END_S) if ends else self.silence):
                log.warning("worker %d has shown no sign of life for %.0f s and is killed", self.slot, now - heard)
                worker.kill()
                if ends and self.board.finished([self.slot], life):
                    worker.wait()
                    log.warning(
                        "worker %d had finished training and its script; its interpreter did not end", self.slot
                    )
                    return 0

    def _may_yet_begin(self, pid: int) -> bool:
        """Return whether a worker without a sign may give one: its imports take long, if it runs and has others."""
        return not (is_stopped(pid) or self.board.finished(range(self.slots)))

    def _start(self, environment: dict[str, str]) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(self.command, env=environment, preexec_fn=_end_with_parent)

    def _beat(self) -> None:
        count = 0
        while not self._over.wait(BEAT_S if count else 0.0):
            count += 1
            try:
                self.board.beat(self.slot, count)
            except RuntimeError:  # the store is gone, and with it the job
                return

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on to the worker, which is then not started again."""
        if number != signal.SIGUSR1:
            self._told = number
        if self._worker is not None and self._worker.poll() is None:
            self._worker.send_signal(number)


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, as by SIGSTOP; ``False`` where the kernel does not say so in ``/proc``.

    Example:
        >>> is_stopped(os.getpid())
        False
    """
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def _end_with_parent() -> None:
    """Have the kernel end this process when its parent ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _number(kind: type, least: float, what: str) -> Callable[[str], Any]:
    """Return a reader of numbers that are at least ``least``."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}") from None
        if not value >= least:
            raise argparse.ArgumentTypeError(f"{text} is below {least:g}")
        return value

    return read


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(
        prog="python -m lightning_hetero.keeper",
        description="Start a training script, and start it again if its worker is lost, while the others go on.",
        allow_abbrev=False,
    )
    whole = _number(int, 0, "a whole number")
    found.add_argument("--max-restarts", type=whole, default=3, help="how often a lost worker is started again (3)")
    workers = _number(int, 1, "a whole number")
    found.add_argument("--min-workers", type=workers, default=1, help="fewest workers that train (1)")
    seconds = _number(float, 3 * BEAT_S, "a number")
    found.add_argument("--silence", type=seconds, default=30.0, help="seconds until a stopped worker is killed (30)")
    found.add_argument("-m", dest="module", action="store_true", help="the script is a module")
    found.add_argument("script", help="training script, or module")
    found.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the keeper of this slot; return the worker's exit code."""
    options, environment = parser(), os.environ
    given = options.parse_args(arguments)
    missing = [name for name in NEEDED if name not in environment]
    if missing:
        command = f"torchrun --nproc-per-node=4 -m lightning_hetero.keeper {given.script}"
        options.error(f"{', '.join(missing)} not set. Start it by torchrun: {command}")
    if not given.module and not os.path.exists(given.script):
        options.error(f"{given.script} does not exist in {os.getcwd()}")
    slot, slots = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    if given.min_workers > slots:
        options.error(f"--min-workers {given.min_workers}: the job has {slots} workers")
    host = slot == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    keeper = Keeper(
        [sys.executable, *(["-m"] if given.module else []), given.script, *given.args],
        job_board(environment, host=host),
        slot=slot,
        slots=slots,
        restarts=given.max_restarts,
        least=given.min_workers,
        silence=given.silence,
    )
    code = keeper.run()
    if host:
        keeper.outlast()
    return code


if __name__ == "__main__":
    sys.exit(main())
