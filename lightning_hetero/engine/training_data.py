"""Training data, split over ranks by the plans of a run."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.agreement.workers import Workers
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.batching.plan import NO_LIMIT, PlanHistory
from lightning_hetero.core.policies.base import Planner, moves_total
from lightning_hetero.data.cost.division import CostDivision
from lightning_hetero.data.division import Division
from lightning_hetero.data.index_stream import IndexStream
from lightning_hetero.data.sampler import UnevenBatchSampler
from lightning_hetero.data.step_share import StepSampler
from lightning_hetero.data.streams.own import ClaimedStreamSampler
from lightning_hetero.data.streams.sampler import StreamSampler
from lightning_hetero.data.streams.source import SampleStream
from lightning_hetero.data.units.own_shards import OwnShards, counted_rows
from lightning_hetero.data.units.sampler import UnitSampler
from lightning_hetero.data.units.sources import LoaderSet
from lightning_hetero.engine.cost_learning import CostLearning
from lightning_hetero.engine.plan_store import PlanStore
from lightning_hetero.engine.sample_costs import SampleCosts
from lightning_hetero.engine.stream_data import StreamData
from lightning_hetero.hardware import capacity, device_name, identity

__all__ = ["TrainingData"]

log = logging.getLogger("lightning_hetero")


def _silent(text: str) -> None:
    """Say nothing: rank 0 does."""


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
        own: steps over data that each rank holds by itself, ``None`` if there is none.
        workers: workers of the run, ``None`` before data was sharded.
        batch_size: samples per rank on average: the loader's batch size.
        min_local: smallest batch that this rank can run.
        streams: samplers over streams, and how far a state has read them.
        costs: costs of the samples, if the settings ask for a division by cost.
        cost_learning: what is learned of the cost of shares, ``None`` if batches are not divided by cost.
    """

    def __init__(self, config: HeteroConfig, control: ControlPlane, device: torch.device, local_rank: int) -> None:
        self.config, self.control, self.device, self.local_rank = config, control, device, local_rank
        self.plans = PlanStore(control.rank == 0 and control.world_size > 1)
        self.sampler: StepSampler | None = None
        self.own: OwnShards | None = None
        self.workers: Workers | None = None
        self.batch_size, self.min_local = 0, config.min_local_batch_size or 1
        self._memory_bound: int | None = None
        self._even_ranks = control.world_size
        self.streams = StreamData(config, control)
        self.costs = SampleCosts(config, control)
        self.cost_learning: CostLearning | None = None

    def require_samples(self, number: int) -> None:
        """Require at least ``number`` samples per batch on this rank."""
        self.min_local = max(self.min_local, number)

    def bound_by_memory(self, number: int | None) -> None:
        """Allow at most ``number`` samples per batch on this rank; ``None`` for no bound."""
        self._memory_bound = number

    def lower_memory_bound(self, number: int) -> None:
        """Allow at most ``number`` samples on this rank, if that is less than before; all ranks know at the next round.

        A split that the user has fixed keeps its sizes.
        """
        if not self.config.fixes_split:
            self._memory_bound = min(number, self._memory_bound or number)

    def pack(self) -> npt.NDArray[np.float64]:
        """Return this rank's memory bound for the message of a sync round."""
        return np.array([float(self._memory_bound or NO_LIMIT)])

    def unpack(self, everyone: npt.NDArray[np.float64], control: ControlPlane) -> None:
        """Take in the memory bounds of all ranks."""
        if self.workers is not None:
            self.workers = self.workers.bounded(everyone[:, 0].astype(int).tolist())

    def keep_total_of(self, ranks: int) -> None:
        """Take the total batch of so many ranks, those that the job began with; call it before data is sharded."""
        self._even_ranks = ranks

    def leave_whole(self) -> None:
        """Note that the training data is not sharded."""
        self.sampler = self.own = self.cost_learning = None

    def leave_own(
        self, length: Callable[[], int | None], epoch: int, rows: Callable[[Any], int] | None = None
    ) -> OwnShards:
        """Let every rank train on its own data; a collective call. See :meth:`HeteroEngine.leave_own`."""
        self.sampler = self.cost_learning = None
        weighted = self.config.weight_fn is not None
        rows = counted_rows(weighted) if rows is None or weighted else rows
        warn = log.warning if self.control.rank == 0 else _silent
        self.own = OwnShards(self.control.gather_objects, length, rows, self.plans.start_of(epoch), warn)
        return self.own

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
        self.batch_size = batch_size
        costs = None if division is not None else self.costs.of(dataset, planner)
        start = self._begin(batch_size * self._even_ranks, planner, epoch, costs)
        assert self.workers is not None
        division = self._by_cost(costs) if division is None else division
        sampler = UnevenBatchSampler(
            stream,
            self._history,
            self.control.rank,
            drop_last=drop_last,
            min_local=self.workers.min_local,
            multiple=self.workers.multiple,
            start=start,
            division=division,
        )
        self.sampler = sampler
        return sampler

    def shard_stream(self, stream: SampleStream, *, planner: Planner | None, epoch: int) -> StreamSampler:
        """Make this rank's sampler over a loader's stream; a collective call. See :meth:`HeteroEngine.shard_stream`."""
        self.streams.check(stream, planner)
        self.costs.refuse_unknown("a stream", "use a map-style dataset")
        self.cost_learning = None
        self.batch_size, known = self.streams.measured(stream)
        start = self._begin(self.batch_size * self._even_ranks, planner, epoch)
        assert self.workers is not None
        sampler = self.streams.sampler(stream, self._history, self.workers, start, known)
        self.sampler = sampler
        return sampler

    def shard_units(
        self,
        loaders: LoaderSet,
        *,
        planner: Planner | None,
        epoch: int,
        division: Division | None = None,
        dataset: Any = None,
    ) -> UnitSampler:
        """Make this rank's samplers over loaders whose steps are made of units; a collective call.

        Raises:
            ValueError: if the total batch is to move or shares are to be multiples, which such steps do not allow, or
                ``cost_fn`` is set and samples are not known one by one.
        """
        if moves_total(planner) or self.config.max_total_batch_size is not None:
            who = "max_total_batch_size" if planner is None else type(planner).__name__
            raise ValueError(
                f"{who} moves the total batch, and here a step is made of whole batches of a batch sampler, of several "
                "loaders or of a dataset of batches, which fix it. Leave it out, or give a single DataLoader with a "
                "batch_size and, for the order, a sampler."
            )
        if self.config.local_batch_multiple > 1:
            raise ValueError(
                f"local_batch_multiple={self.config.local_batch_multiple} needs batches that are cut from single "
                "samples, and here a step is made of whole batches of a batch sampler, of several loaders or of a "
                "dataset of batches. Leave it out, or give a single DataLoader with a batch_size and, for the order, a "
                "sampler."
            )
        known = not (loaders.joint or loaders.counted)
        if not known:
            self.costs.refuse_unknown("several loaders or a dataset of batches", "give a single DataLoader of samples")
        self.cost_learning = None
        divided = "" if division is None else f", {type(division).__name__} {division.fingerprint():08x}"
        self.control.require_equal("the training data", loaders.describe() + divided)
        loaders.compare_by(self.control.require_equal)
        world_size = self.control.world_size
        own = loaders.total(world_size)  # draws an order, which may be collective
        total = int(self.control.broadcast_object(own if self.control.rank == 0 else None))
        self.batch_size = max(1, total // world_size)
        costs = self.costs.of(dataset, planner) if division is None and known else None
        start = self._begin(max(total, world_size), planner, epoch, costs)
        assert self.workers is not None
        if division is None and known:
            division = self._by_cost(costs)
        low, high = self.workers.min_local, self.workers.max_local
        sampler = UnitSampler(
            loaders, self._history, self.control.rank, min_local=low, max_local=high, start=start, division=division
        )
        self.sampler = sampler
        return sampler

    def shards(self, position: tuple[int, int]) -> dict[str, Any]:
        """Return how far all ranks have read each claimed shard; empty and not collective if none are claimed."""
        return self.sampler.shards(position) if isinstance(self.sampler, ClaimedStreamSampler) else {}

    def _begin(
        self, even_total: int, planner: Planner | None, epoch: int, costs: npt.NDArray[np.float64] | None = None
    ) -> tuple[int, int]:
        """Meet the workers, and adopt the plan to begin with; return the first position that is trained on."""
        self.own = None
        config, given = self.config, self.config.max_local_batch_sizes
        rank = self.control.rank
        own = given[rank] if isinstance(given, tuple) else given
        self.workers = Workers.gather(
            self.control,
            identity(self.device, self.local_rank),
            capacity(self.device),
            min_local=self.min_local,
            bounds=(own, self._memory_bound),  # type: ignore[arg-type]
            multiple=config.local_batch_multiple,
            device=device_name(self.device),
        )
        start, fixed = self.plans.start_of(epoch), config.local_batch_sizes
        total = sum(fixed) if fixed is not None else even_total
        cost = None if costs is None else self.costs.first_weights
        self.plans.begin(self.control, self.workers, config, total, planner, start, cost)
        return start

    def _by_cost(self, costs: npt.NDArray[np.float64] | None) -> CostDivision | None:
        """Return the division by these costs of samples, ``None`` without costs."""
        workers = self.workers
        if costs is None or workers is None:
            self.cost_learning = None
            return None
        division = CostDivision(
            costs, self.costs.first_weights, min_local=workers.min_local, max_local=workers.max_local
        )
        self.cost_learning = CostLearning(division)
        return division

    @property
    def _history(self) -> Callable[[], PlanHistory]:
        return partial(getattr, self.plans, "history")  # called in every step, so not a Python function
