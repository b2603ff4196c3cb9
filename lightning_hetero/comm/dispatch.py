"""Hand out batches one by one through an atomic counter in the job's store; no rank waits for another.

The store is that of the process group (``torch.distributed`` keeps one on rank 0's host), so nothing has to be started
or reached besides it. Ranks also note there that they have arrived at the end of a mega-batch, which names those who
have not when the others stop waiting.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

__all__ = ["BatchDispatcher", "ElasticWorkerError", "job_store"]


class ElasticWorkerError(RuntimeError):
    """A worker of an elastic training ended, or did not come to the end of a mega-batch in time."""


def job_store() -> dist.Store:
    """The store of the default process group; a local one without a group."""
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

    Example:
        >>> dispatcher = BatchDispatcher(dist.HashStore(), rank=0, world_size=1)
        >>> dispatcher.open("0/0")
        >>> dispatcher.claim(8), dispatcher.claim(4)
        (0, 8)
        >>> dispatcher.arrive(), dispatcher.missing()
        (None, [])
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        # Every rank makes its dispatchers in the same order, so its own count tells runs in one job apart.
        run = store.add(f"lightning_hetero/elastic/runs/{rank}", 1)
        self._store = dist.PrefixStore(f"lightning_hetero/elastic/{run}", store)
        self._key = self._last = ""

    def open(self, name: str) -> None:
        """Turn to a mega-batch, by a name that all ranks give it and none was given before.

        Rank 0 forgets the one before the last, which all ranks have left. None touches the store after its last merge,
        because then rank 0, which may hold the store, may have ended.
        """
        if self.rank == 0 and self._last:
            with self._answering():
                for key in ("claimed", *(f"arrived/{r}" for r in range(self.world_size))):
                    self._store.delete_key(f"{self._last}/{key}")
        self._last, self._key = self._key, name

    def claim(self, size: int) -> int:
        """Count ``size`` samples as this rank's; the value of the counter before.

        Raises:
            ElasticWorkerError: if the store does not answer.
        """
        with self._answering():
            return int(self._store.add(f"{self._key}/claimed", size)) - size

    def arrive(self) -> None:
        """Note that this rank is at the end of the mega-batch.

        Raises:
            ElasticWorkerError: if the store does not answer.
        """
        with self._answering():
            self._store.set(f"{self._key}/arrived/{self.rank}", "")

    def missing(self) -> list[int]:
        """Ranks that have not arrived.

        Raises:
            ElasticWorkerError: if the store does not answer.
        """
        with self._answering():
            return [r for r in range(self.world_size) if not self._store.check([f"{self._key}/arrived/{r}"])]

    @contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, dist.DistError) as error:
            raise ElasticWorkerError(
                "the job's store, which hands out the batches, does not answer: the process that holds it (rank 0, or "
                f"the launcher) has ended or is stuck ({error}). Look at its log and start the job again."
            ) from error
