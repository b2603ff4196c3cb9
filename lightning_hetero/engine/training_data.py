"""Training data, split over ranks by the plans of a run."""

from functools import partial

import torch

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.agreement.workers import Workers
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.policies.base import Planner
from lightning_hetero.data.index_stream import IndexStream
from lightning_hetero.data.sampler import UnevenBatchSampler
from lightning_hetero.engine.plan_store import PlanStore
from lightning_hetero.hardware import capacity, identity

__all__ = ["TrainingData"]


class TrainingData:
    """Sharding of a run's training data within the limits of each worker.

    Args:
        config: settings of the run.
        control: control plane by which ranks agree on workers and plans.
        device: device of this rank.
        local_rank: slot on this host, part of the identity of a CPU worker.

    Attributes:
        plans: plans of the run.
        sampler: sampler of the sharded data, ``None`` before there is any.
        workers: workers of the run, ``None`` before data was sharded.
        batch_size: samples per rank on average: the loader's batch size.
        min_local: smallest batch that this rank can run.
    """

    def __init__(self, config: HeteroConfig, control: ControlPlane, device: torch.device, local_rank: int) -> None:
        self.config, self.control, self.device, self.local_rank = config, control, device, local_rank
        self.plans = PlanStore(control.rank == 0 and control.world_size > 1)
        self.sampler: UnevenBatchSampler | None = None
        self.workers: Workers | None = None
        self.batch_size, self.min_local = 0, config.min_local_batch_size or 1
        self._memory_bound: int | None = None

    def require_samples(self, number: int) -> None:
        """Require at least ``number`` samples per batch on this rank."""
        self.min_local = max(self.min_local, number)

    def bound_by_memory(self, number: int | None) -> None:
        """Allow at most ``number`` samples per batch on this rank; ``None`` for no bound."""
        self._memory_bound = number

    def leave_whole(self) -> None:
        """Note that the training data is not sharded."""
        self.sampler = None

    def shard(
        self, stream: IndexStream, batch_size: int, *, drop_last: bool, planner: Planner | None, epoch: int
    ) -> UnevenBatchSampler:
        """Make this rank's sampler over a stream; a collective call. See :meth:`HeteroEngine.shard`."""
        config, rank = self.config, self.control.rank
        self.control.require_equal(
            "the training data",
            f"{len(stream)} samples, order {stream.fingerprint():08x}, batch_size={batch_size}, drop_last={drop_last}",
        )
        given, self.batch_size = config.max_local_batch_sizes, batch_size
        own = given[rank] if isinstance(given, tuple) else given
        self.workers = Workers.gather(
            self.control,
            identity(self.device, self.local_rank),
            capacity(self.device),
            min_local=self.min_local,
            bounds=(own, self._memory_bound),  # type: ignore[arg-type]
        )
        start, fixed = self.plans.start_of(epoch), config.local_batch_sizes
        total = sum(fixed) if fixed is not None else batch_size * self.control.world_size
        self.plans.begin(self.control, self.workers, config, total, planner, start)
        self.sampler = UnevenBatchSampler(
            stream,
            partial(getattr, self.plans, "history"),  # called in every step, so not a Python function
            rank,
            drop_last=drop_last,
            min_local=self.workers.min_local,
            start=start,
        )
        return self.sampler
