"""Queue of batches, handed out one by one through an atomic counter in the job's store; no rank waits for another.

The store is that of the process group (``torch.distributed`` keeps one on rank 0's host), so no further server is
needed. Ranks also note there that they have arrived at the end of a mega-batch; when the others stop waiting, the
missing ones can be named.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_hetero.comm.failures.store_calls import StoreCalls
from lightning_hetero.comm.failures.store_keys import forget_keys
from lightning_hetero.core.validation import check_fields

__all__ = ["BatchDispatcher", "ElasticWorkerError", "StorePatience", "job_store"]


@dataclass(frozen=True)
class StorePatience:
    """Longest waits of a worker for the job's store, which normally answers within a millisecond.

    Args:
        answer_seconds: longest wait for an answer, unless a timeout is given, above 0.
        notice_seconds: wait after which the worker logs that it waits, above 0.
        grace_seconds: time for the other workers to notice that a merge failed, ``>= 0``; those that do not are named
            as ended or stuck.

    Raises:
        TypeError: if a value is no number.
        ValueError: if a value is out of its range.
    """

    answer_seconds: float = 300.0
    notice_seconds: float = 30.0
    grace_seconds: float = 3.0

    def __post_init__(self) -> None:
        check_fields(self, ("answer_seconds", "notice_seconds"), include_low=False)
        check_fields(self, ("grace_seconds",))


PATIENCE = StorePatience()


class ElasticWorkerError(RuntimeError):
    """Raised if a worker of an elastic training ends, or does not reach the end of a mega-batch in time."""


def job_store() -> dist.Store:
    """Return the store of the default process group; a local one without a group."""
    if not dist.is_initialized():
        return dist.HashStore()
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store


class BatchDispatcher:
    """Counter of claims and list of arrivals of one mega-batch at a time.

    Args:
        store: shared by all ranks.
        rank: this rank.
        world_size: number of ranks.
        timeout: longest wait for an answer of the store; that of ``patience`` by default.
        patience: how long to wait for what.

    Example:
        >>> dispatcher = BatchDispatcher(dist.HashStore(), rank=0, world_size=1)
        >>> dispatcher.open("0/0")
        >>> dispatcher.claim(8), dispatcher.claim(4)
        (0, 8)
        >>> dispatcher.arrive(), dispatcher.missing()
        (None, [])
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        *,
        timeout: timedelta | None = None,
        patience: StorePatience = PATIENCE,
    ) -> None:
        self.rank, self.world_size, self.patience = rank, world_size, patience
        longest = timeout.total_seconds() if timeout else patience.answer_seconds
        self._calls = StoreCalls(longest, patience.notice_seconds) if world_size > 1 else None
        # Every rank makes its dispatchers in the same order, so its own count tells runs in one job apart.
        run = self._ask(lambda: store.add(f"lightning_hetero/elastic/runs/{rank}", 1))
        self._store = dist.PrefixStore(f"lightning_hetero/elastic/{run}", store)
        if rank == 0:  # all ranks have left the run before
            self._ask(forget_keys, store, f"lightning_hetero/elastic/{run - 1}/")
        self._key = self._last = ""

    def open(self, name: str) -> None:
        """Open a mega-batch under a name that is equal on all ranks and was never used before.

        Rank 0 deletes the keys of the mega-batch before the previous one, which all ranks have left. No rank touches
        the store after its last merge, because rank 0, which may hold the store, may have ended by then.
        """
        if self.rank == 0 and self._last:
            for key in ("claimed", *(f"arrived/{r}" for r in range(self.world_size))):
                self._ask(self._store.delete_key, f"{self._last}/{key}")
        self._last, self._key = self._key, name

    def claim(self, size: int) -> int:
        """Claim ``size`` samples for this rank; return the counter's value before the claim.

        Raises:
            ElasticWorkerError: if the store does not answer.
        """
        return int(self._ask(self._store.add, f"{self._key}/claimed", size)) - size

    def arrive(self) -> None:
        """Note that this rank is at the end of the mega-batch.

        Raises:
            ElasticWorkerError: if the store does not answer.
        """
        self._ask(self._store.set, f"{self._key}/arrived/{self.rank}", "")

    def missing(self) -> list[int]:
        """Return the ranks that have not arrived.

        Raises:
            ElasticWorkerError: if the store does not answer.
        """
        return self._without("arrived")

    def silent(self, grace: float | None = None) -> list[int]:
        """Note that a merge failed here; return the ranks that do not note the same: they ended or are stuck.

        A rank that is alive notices the failure too, once it is done with its batch. If the store is lost meanwhile,
        because rank 0 has ended, the last known answer is returned.

        Args:
            grace: seconds that the other ranks have; ``grace_seconds`` by default.

        Raises:
            ElasticWorkerError: if the store does not answer at all.
        """
        deadline = time.monotonic() + (self.patience.grace_seconds if grace is None else grace)
        silent: list[int] | None = None
        try:
            self._ask(self._store.set, f"{self._key}/failed/{self.rank}", "")
            while silent is None or (silent and time.monotonic() < deadline):
                time.sleep(0.02)
                silent = self._without("failed")
        except ElasticWorkerError:
            if silent is None:
                raise
        return silent

    def _without(self, note: str) -> list[int]:
        """Return the ranks that have not left this note in the running mega-batch."""
        return [r for r in range(self.world_size) if not self._ask(self._store.check, [f"{self._key}/{note}/{r}"])]

    def close(self) -> None:
        """End the thread that calls the store; the next call starts it again."""
        if self._calls is not None:
            self._calls.close()

    def _ask(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args) if self._calls is None else self._calls(lambda: call(*args))
        except (RuntimeError, TimeoutError, dist.DistError) as error:
            raise ElasticWorkerError(
                "the job's store, which hands out the batches, does not answer: the process that holds it (rank 0, or "
                f"the launcher) has ended or is stuck ({error}). Look at its log and start the job again."
            ) from error
