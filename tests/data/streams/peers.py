"""Ranks that are threads of one process, with what a control plane gives each of them."""

import threading

import numpy as np


class Board:
    """What ranks have told, call by call."""

    def __init__(self, ranks):
        self.ranks, self._told, self._changed = ranks, {}, threading.Condition()

    def tell(self, call, rank, value):
        with self._changed:
            self._told.setdefault(call, {})[rank] = value
            self._changed.notify_all()

    def read(self, call):
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._told[call]) == self.ranks, timeout=30):
                raise TimeoutError(f"call {call}: only ranks {sorted(self._told[call])} have come")
            return [self._told[call][rank] for rank in range(self.ranks)]


class ThreadPeers:
    """One rank among threads."""

    def __init__(self, board, rank):
        self.rank, self.world_size, self._board, self.calls = rank, board.ranks, board, 0

    def gather_objects(self, value):
        call, self.calls = self.calls, self.calls + 1
        self._board.tell(call, self.rank, value)
        return self._board.read(call)

    def gather_later(self, values):
        call, self.calls = self.calls, self.calls + 1
        self._board.tell(call, self.rank, np.array(values))
        return lambda: np.stack(self._board.read(call))

    def gather(self, values):
        return self.gather_later(values)()


def on_threads(ranks, run):
    """``run(peers)`` on every rank at once: the results, and an exception in place of one that was raised."""
    board, results = Board(ranks), [None] * ranks

    def one(rank):
        try:
            results[rank] = run(ThreadPeers(board, rank))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results
