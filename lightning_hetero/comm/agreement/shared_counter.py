"""Counter in the job's store, shared by all ranks and their loader workers: each number is given once."""

import os
from collections.abc import Iterator
from itertools import count
from typing import Any

import torch.distributed as dist

from lightning_hetero.comm.membership.slots import GENERATION

__all__ = ["SharedCounter"]


class SharedCounter:
    """Numbers 0, 1, 2 and so on under a key, each for whoever asks first.

    A loader worker is another process, which must not use its parent's connection to the store; it opens its own.

    Args:
        store: store of the job, ``None`` for a single rank, whose workers take every so manieth number in turn.
        prefix: beginning of all keys, never used before in this job.

    Raises:
        ValueError: if the store can be reached by its own process only, and a loader worker asks.

    Example:
        >>> from itertools import islice
        >>> counter = SharedCounter(dist.HashStore(), "example")
        >>> list(islice(counter.numbers("a"), 2)), next(counter.numbers("a")), next(counter.numbers("b"))
        ([0, 1], 2, 0)
    """

    def __init__(self, store: dist.Store | None, prefix: str) -> None:
        self._prefix, self._pid = prefix, os.getpid()
        self._store = store if store is None else _lowest(store)
        self._alone = store is None
        self._address = None if store is None else _address(store)

    @classmethod
    def of_job(cls, rank: int, world_size: int) -> "SharedCounter":
        """Make the counter of a run; every rank makes its counters in the same order.

        Args:
            rank: this rank.
            world_size: number of ranks; a single one needs no store.
        """
        if world_size == 1:
            return cls(None, "")
        store: dist.Store = dist.distributed_c10d._get_default_store()
        run = store.add(f"lightning_hetero/counters/{rank}", 1)
        return cls(store, f"lightning_hetero/counter/{os.environ.get(GENERATION, '')}/{run}")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_store": None, "_pid": -1}

    def numbers(self, key: str, worker: int = 0, workers: int = 1) -> Iterator[int]:
        """Yield the numbers under a key that nobody else has got.

        Args:
            key: what is counted.
            worker: loader worker that asks, from 0 on.
            workers: number of loader workers, at least 1.
        """
        store = self._connected()
        if store is None:
            yield from count(worker, workers)
            return
        store = dist.PrefixStore(self._prefix, store)  # below it keys are the same for whoever opens the store
        while True:
            yield store.add(key, 1) - 1

    def _connected(self) -> dist.Store | None:
        if self._pid == os.getpid() or self._alone:
            return self._store
        if self._address is None:
            raise ValueError(
                "the job's store can be reached by its own process only, so that loader workers cannot claim shards. "
                "Set num_workers=0, or start the job with torchrun."
            )
        self._store, self._pid = _opened(*self._address), os.getpid()
        return self._store


def _address(store: dist.Store) -> tuple[str, int] | None:
    """Return the host and port of a store, the path of its file and -1, or ``None`` if it has neither."""
    store = _lowest(store)
    if isinstance(store, dist.TCPStore):
        return store.host, store.port
    return (store.path, -1) if isinstance(store, dist.FileStore) else None  # type: ignore[attr-defined]


def _lowest(store: dist.Store) -> dist.Store:
    """Return the store below all others, the one that a loader worker opens."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _opened(place: str, port: int) -> dist.Store:
    if port < 0:
        return dist.FileStore(place)
    return dist.TCPStore(place, port, is_master=False, wait_for_workers=False)
