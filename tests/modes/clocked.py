"""Batches that ranks claim in the order of a virtual clock, so that counts are exact."""

import time

import lightning as L

from lightning_hetero.elastic.batch_queue import BatchDispatcher, job_store


class VirtualClock(BatchDispatcher):
    """Lets a rank claim only when its virtual time, the samples it trained on times its cost, is the least of all."""

    def __init__(self, rank, costs):
        super().__init__(job_store(), rank, len(costs))
        self.cost, self.now = costs[rank], 0.0

    def claim(self, size):
        self._store.set(f"{self._key}/time/{self.rank}", repr(self.now))
        others = [r for r in range(self.world_size) if r != self.rank]
        while any((self._time(r), r) < (self.now, self.rank) for r in others):
            time.sleep(0.0005)
        return super().claim(size)

    def _time(self, rank):
        key = f"{self._key}/time/{rank}"
        return float(self._store.get(key)) if self._store.check([key]) else -1.0

    def arrive(self):
        self._store.set(f"{self._key}/time/{self.rank}", "inf")
        self.now = 0.0
        super().arrive()


class Clocked(L.Callback):
    """Puts the virtual clock in, and lets it run."""

    def __init__(self, costs):
        self.costs = costs

    def on_fit_start(self, trainer, pl_module):
        trainer.strategy.engine.dispatcher = VirtualClock(trainer.global_rank, self.costs)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        clock = trainer.strategy.engine.dispatcher
        clock.now += clock.cost * len(batch[0])
