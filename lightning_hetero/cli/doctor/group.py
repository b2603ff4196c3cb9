"""Ranks that are checked together: what one of them measures reaches the first, and no wait is without end."""

import os
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_hetero.cli.doctor.job import Job
from lightning_hetero.comm.agreement.control_plane import ControlPlane

__all__ = ["Failure", "Ranks", "RanksError", "interruptible"]

T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """Error of a rank in place of what it was to measure."""

    text: str


class RanksError(RuntimeError):
    """Error of a check that needs all ranks; the message names those that are missing."""


class Ranks:
    """Ranks of a job, or a process of its own.

    Args:
        job: place of this process.
        timeout: longest wait for another rank, in seconds.
        on_hang: called with a sentence if this process itself does not come back; then the process is ended.
    """

    def __init__(self, job: Job, *, timeout: float = 60.0, on_hang: Callable[[str], None] | None = None) -> None:
        self.job, self.timeout, self._on_hang = job, timeout, on_hang
        self.control = ControlPlane(0, 1)
        self._store: Any = None

    def join(self, environment: Mapping[str, str]) -> None:
        """Meet the other ranks.

        Args:
            environment: variables of torchrun.

        Raises:
            RanksError: if some do not come, or cannot be reached.
        """
        if self.job.alone:
            return
        try:
            self._store = interruptible(lambda: _store(self.job, environment, self.timeout))
            self._await_all("joined", self.timeout)
            self.control = interruptible(self._connected)
        except (RuntimeError, ValueError, OSError) as error:
            if isinstance(error, RanksError):
                raise
            raise RanksError(
                f"this process found no way to the other {self.job.world_size - 1} of WORLD_SIZE="
                f"{self.job.world_size}: {_first_line(error)}. Are all started with the same MASTER_ADDR and "
                "MASTER_PORT, does a firewall let them pass, and does GLOO_SOCKET_IFNAME name an interface?"
            ) from error

    def gather(self, what: str, measure: Callable[[], Any], seconds: float = 0.0) -> list[Any]:
        """Measure on every rank, and return what all have measured; a :class:`Failure` for a rank that failed.

        Args:
            what: name of the check, for errors.
            measure: what this rank does.
            seconds: how long it should take.

        Raises:
            RanksError: if ranks do not come back in time.
        """
        limit = seconds + self.timeout
        value = self._measured(what, measure, 2.0 * limit)
        if self.control.world_size == 1:
            return [value]
        self._await_all(what, limit)
        try:
            return interruptible(lambda: self.control.gather_objects(value))
        except RuntimeError as error:
            raise RanksError(f"a rank was lost after {what!r}: {_first_line(error)}.") from error

    def leave(self) -> None:
        """Leave the other ranks, after everything is measured."""
        if dist.is_initialized() and not self.job.alone:
            self.control.close()
            dist.destroy_process_group()

    def _connected(self) -> ControlPlane:
        timeout = timedelta(seconds=self.timeout)
        store, rank, world_size = dist.PrefixStore("group", self._store), self.job.rank, self.job.world_size
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
        return ControlPlane(rank, world_size, timeout=timeout)

    def _measured(self, what: str, measure: Callable[[], Any], limit: float) -> Any:
        sentence = f"rank {self.job.rank} did not come back from {what!r} within {limit:g} s."
        guard = threading.Timer(limit, self._give_up, (sentence,))
        guard.daemon = True
        guard.start()
        try:
            return measure()
        except Exception as error:  # noqa: BLE001 - what fails on one rank must be told, not end the others' wait
            return Failure(f"{type(error).__name__}: {_first_line(error)}")
        finally:
            guard.cancel()

    def _give_up(self, sentence: str) -> None:
        """End a process that hangs, as one does that waits for a GPU."""
        if self._on_hang is not None:
            self._on_hang(sentence)
        os._exit(1)

    def _await_all(self, what: str, seconds: float) -> None:
        """Wait until every rank is here."""
        keys = [f"{what}/{rank}" for rank in range(self.job.world_size)]
        try:
            self._store.set(keys[self.job.rank], "here")
            interruptible(lambda: self._store.wait(keys, timedelta(seconds=seconds)))
        except RuntimeError as error:
            missing = [rank for rank, key in enumerate(keys) if not self._is_there(key)]
            if not missing:
                raise RanksError(f"the ranks lost each other at {what!r}: {_first_line(error)}.") from error
            named = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
            raise RanksError(_absent(named, what, seconds, self.job.world_size)) from error

    def _is_there(self, key: str) -> bool:
        try:
            return bool(self._store.check([key]))
        except RuntimeError:  # the process that keeps the store is gone
            return True


def interruptible(wait: Callable[[], T]) -> T:
    """Return what a wait of torch returns; a thread waits, because Python heeds no signal while torch does.

    Without it, Ctrl-C would count only after the wait, and a launcher would kill the process before it has written.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(wait())
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result()


def _absent(named: str, what: str, seconds: float, world_size: int) -> str:
    if what == "joined":
        return (
            f"WORLD_SIZE={world_size}, and {named} did not come within {seconds:g} s. Start as many processes "
            "(torchrun does), or unset WORLD_SIZE. A script would wait for them, too."
        )
    return f"{named} did not end {what!r} within {seconds:g} s, or was lost; the output of that process says why."


def _store(job: Job, environment: Mapping[str, str], timeout: float) -> Any:
    """Return the store of torchrun's agent, or one that rank 0 keeps."""
    agent = environment.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True"
    store = dist.TCPStore(
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        job.world_size,
        is_master=job.rank == 0 and not agent,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        multi_tenant=True,
    )
    return dist.PrefixStore(f"lightning-hetero-doctor/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _first_line(error: BaseException) -> str:
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[enforce fail at [^]]*\] ?", "", line).rstrip(".")
