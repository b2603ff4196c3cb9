"""Training data, split over ranks by the plans of a run."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.agreement.shared_counter import SharedCounter
from lightning_hetero.comm.agreement.workers import Workers
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.batching.stream_steps import StreamRules
from lightning_hetero.core.policies.base import Planner, moves_total
from lightning_hetero.data.cost.division import CostDivision
from lightning_hetero.data.division import Division
from lightning_hetero.data.index_stream import IndexStream
from lightning_hetero.data.sampler import UnevenBatchSampler
from lightning_hetero.data.step_share import StepSampler
from lightning_hetero.data.streams.own import ClaimedStreamSampler, OwnStreamSampler
from lightning_hetero.data.streams.sampler import StreamSampler, WholeStreamSampler
from lightning_hetero.data.streams.source import SampleStream
from lightning_hetero.engine.cost_learning import CostLearning
from lightning_hetero.engine.plan_store import PlanStore
from lightning_hetero.engine.sample_costs import SampleCosts
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
        costs: costs of the samples, if the settings ask for a division by cost.
        cost_learning: what is learned of the cost of shares, ``None`` if batches are not divided by cost.
    """

    def __init__(self, config: HeteroConfig, control: ControlPlane, device: torch.device, local_rank: int) -> None:
        self.config, self.control, self.device, self.local_rank = config, control, device, local_rank
        self.plans = PlanStore(control.rank == 0 and control.world_size > 1)
        self.sampler: StepSampler | None = None
        self.workers: Workers | None = None
        self.batch_size, self.min_local = 0, config.min_local_batch_size or 1
        self._memory_bound: int | None = None
        self._taken: dict[str, Any] = {}
        self._shards: dict[str, Any] = {}
        self.costs = SampleCosts(config, control)
        self.cost_learning: CostLearning | None = None

    def require_samples(self, number: int) -> None:
        """Require at least ``number`` samples per batch on this rank."""
        self.min_local = max(self.min_local, number)

    def bound_by_memory(self, number: int | None) -> None:
        """Allow at most ``number`` samples per batch on this rank; ``None`` for no bound."""
        self._memory_bound = number

    def leave_whole(self) -> None:
        """Note that the training data is not sharded."""
        self.sampler = self.cost_learning = None

    def shard(
        self,
        stream: IndexStream,
        batch_size: int,
        *,
        drop_last: bool,
        planner: Planner | None,
        epoch: int,
        division: Division | None = None,
        dataset: Any = None,
    ) -> UnevenBatchSampler:
        """Make this rank's sampler over a stream; a collective call. See :meth:`HeteroEngine.shard`."""
        if self.config.shard == "claim":
            raise ValueError(
                "shard='claim' hands out the shards of a stream, and the training dataset is map-style: its samples "
                "are split by index. Leave shard out."
            )
        self.control.require_equal(
            "the training data",
            f"{len(stream)} samples, order {stream.fingerprint():08x}, batch_size={batch_size}, drop_last={drop_last}"
            + ("" if division is None else f", {type(division).__name__} {division.fingerprint():08x}"),
        )
        start = self._begin(batch_size, planner, epoch)
        assert self.workers is not None
        division = self._by_cost(dataset, planner) if division is None else division
        sampler = self.sampler = UnevenBatchSampler(
            stream,
            partial(getattr, self.plans, "history"),  # called in every step, so not a Python function
            self.control.rank,
            drop_last=drop_last,
            min_local=self.workers.min_local,
            start=start,
            division=division,
        )
        return sampler

    def shard_stream(self, stream: SampleStream, *, planner: Planner | None, epoch: int) -> StreamSampler:
        """Make this rank's sampler over a loader's stream; a collective call. See :meth:`HeteroEngine.shard_stream`."""
        if moves_total(planner) or self.config.max_total_batch_size is not None:
            raise ValueError(
                f"{type(planner).__name__} moves the total batch up to a share of the data, and the length of a stream "
                "is not known. Leave max_total_batch_size and AdaptiveBatchCallback out, or use a map-style dataset."
            )
        if self.config.cost_fn is not None:
            raise ValueError(
                f"cost_fn={self.config.cost_fn!r} divides batches whose samples are known by index, and the training "
                "data is a stream. Leave cost_fn out, or use a map-style dataset."
            )
        self.cost_learning = None
        control, settings = self.control, (stream.shard, stream.drop_last)
        control.require_equal("shard and drop_last of the training data", settings)
        batch_size, lengths = self._measured(stream)
        start = self._begin(batch_size, planner, epoch)
        assert self.workers is not None
        rules = StreamRules(self.workers.min_local, self.workers.max_local, stream.drop_last)
        known = None if None in lengths else sum(lengths) if stream.shard == "mine" else lengths[0]
        kind: Callable[..., StreamSampler] = OwnStreamSampler if stream.shard == "mine" else WholeStreamSampler
        if stream.shard == "claim":
            kind = partial(ClaimedStreamSampler, counter=SharedCounter.of_job(control.rank, control.world_size))
        history = partial(getattr, self.plans, "history")
        sampler = kind(stream, history, control, rules, start=start, num_samples=known)
        sampler.resume_from({**self._taken, **self._shards})
        self.sampler = sampler
        return sampler

    def _measured(self, stream: SampleStream) -> tuple[int, list[Any]]:
        """Return the batch size of a stream, and its length on each rank; a collective call.

        Raises:
            RuntimeError: on every rank if the stream of one raises an error.
            ValueError: if no rank has a sample.
        """
        try:
            mine: Any = stream.batch_size, stream.num_samples()
        except Exception as error:  # noqa: BLE001 - every rank has to raise one
            mine = error
        everyone = self.control.gather_objects(
            f"{type(mine).__name__}: {mine}" if isinstance(mine, Exception) else mine
        )
        if isinstance(mine, Exception):
            raise mine
        failed = [f"rank {rank}: {told}" for rank, told in enumerate(everyone) if isinstance(told, str)]
        if failed:
            raise RuntimeError(f"the data stream of another rank has raised an error ({'; '.join(failed)}).")
        sizes = [size for size, _ in everyone]
        if max(sizes) == 0:
            raise ValueError(
                "no rank's loader has yielded a batch, so that its batch size is not known. Give the loader a "
                "batch_size, or look why it is empty."
            )
        return int(np.max(sizes)), [length for _, length in everyone]

    def go_on_from(self, taken: dict[str, Any]) -> None:
        """Resume a stream after what a state says its steps have taken; call it before the data is sharded."""
        self._taken = dict(taken)

    def add_shards(self, shards: dict[str, Any]) -> None:
        """Add how far claimed shards were read, as :meth:`shards` has told; call it before the data is sharded."""
        self._shards = dict(shards)

    def shards(self, position: tuple[int, int]) -> dict[str, Any]:
        """Return how far all ranks have read each claimed shard; empty and not collective if none are claimed."""
        sampler = self.sampler
        return sampler.shards(position) if isinstance(sampler, ClaimedStreamSampler) else {}

    def _begin(self, batch_size: int, planner: Planner | None, epoch: int) -> tuple[int, int]:
        """Meet the workers and adopt the plan to begin with; return the first position that is trained on."""
        config, rank = self.config, self.control.rank
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
        return start

    def _by_cost(self, dataset: Any, planner: Planner | None) -> CostDivision | None:
        """Return the division by cost that the settings ask for, ``None`` if there is none; a collective call."""
        costs = self.costs.of(dataset)
        if costs is None or self.workers is None:
            self.cost_learning = None
            return None
        if moves_total(planner):
            raise ValueError(
                f"{type(planner).__name__} changes the total batch by the gradient noise scale, which compares shares "
                "drawn at random; cost_fn gives workers samples by their cost. Leave one of them out."
            )
        workers = self.workers
        division = CostDivision(
            costs, self.costs.first_weights, min_local=workers.min_local, max_local=workers.max_local
        )
        self.control.require_equal("the costs of the samples (cost_fn)", f"{division.fingerprint():08x}")
        self.cost_learning = CostLearning(division)
        return division
