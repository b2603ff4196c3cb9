"""Training data that comes as a stream: the sampler over it, and how far a checkpoint has read it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.agreement.shared_counter import SharedCounter
from lightning_hetero.comm.agreement.workers import Workers
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.batching.plan import PlanHistory
from lightning_hetero.core.batching.stream_steps import StreamRules
from lightning_hetero.core.policies.base import Planner, moves_total
from lightning_hetero.data.streams.own import ClaimedStreamSampler, OwnStreamSampler
from lightning_hetero.data.streams.sampler import StreamSampler, WholeStreamSampler
from lightning_hetero.data.streams.source import SampleStream

__all__ = ["StreamData"]


class StreamData:
    """Samplers over the streams of a run.

    Args:
        config: settings of the run.
        control: control plane by which ranks agree.
    """

    def __init__(self, config: HeteroConfig, control: ControlPlane) -> None:
        self._config, self._control = config, control
        self._taken: dict[str, Any] = {}
        self._shards: dict[str, Any] = {}

    def check(self, stream: SampleStream, planner: Planner | None) -> None:
        """Check that the settings go with a stream, and that ranks agree on it; a collective call.

        Raises:
            ValueError: if the total batch is to move.
            PlanMismatchError: if ranks differ.
        """
        if moves_total(planner) or self._config.max_total_batch_size is not None:
            raise ValueError(
                f"{type(planner).__name__} moves the total batch up to a share of the data, and the length of a stream "
                "is not known. Leave max_total_batch_size and AdaptiveBatchCallback out, or use a map-style dataset."
            )
        self._control.require_equal(
            "shard, drop_last, batch_size, num_workers (with shard='whole') and num_shards (with shard='claim') of the "
            "training data",
            stream.described(),
        )

    def measured(self, stream: SampleStream) -> tuple[int, int | None]:
        """Return the batch size of a stream, and its samples if that is known; a collective call.

        Raises:
            RuntimeError: on every rank if the stream of one raises an error.
            ValueError: if no rank has a sample.
        """
        try:
            mine: Any = stream.batch_size, stream.num_samples()
        except Exception as error:  # noqa: BLE001 - every rank has to raise one
            mine = error
        told = f"{type(mine).__name__}: {mine}" if isinstance(mine, Exception) else mine
        everyone = self._control.gather_objects(told)
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
        lengths = [length for _, length in everyone]
        known = None if None in lengths else sum(lengths) if stream.shard == "mine" else lengths[0]
        return int(np.max(sizes)), known

    def sampler(
        self,
        stream: SampleStream,
        history: Callable[[], PlanHistory],
        workers: Workers,
        start: tuple[int, int],
        known: int | None,
    ) -> StreamSampler:
        """Return this rank's sampler over a stream.

        Args:
            stream: loader of this rank, and who has which samples.
            history: returns the plans of the run.
            workers: limits of the ranks.
            start: first position that is trained on.
            known: samples of an epoch, ``None`` if not known.
        """
        rules = StreamRules(workers.min_local, workers.max_local, stream.drop_last, workers.multiple)
        kind: Callable[..., StreamSampler] = OwnStreamSampler if stream.shard == "mine" else WholeStreamSampler
        if stream.shard == "claim":
            counter = SharedCounter.of_job(self._control.rank, self._control.world_size)
            kind = partial(ClaimedStreamSampler, counter=counter)
        sampler = kind(stream, history, self._control, rules, start=start, num_samples=known)
        sampler.resume_from({**self._taken, **self._shards})
        return sampler

    def go_on_from(self, taken: dict[str, Any]) -> None:
        """Resume a stream after what a state says its steps have taken; call it before the data is sharded."""
        self._taken = dict(taken)

    def add_shards(self, shards: dict[str, Any]) -> None:
        """Add how far a state says that claimed shards were read; call it before the data is sharded."""
        self._shards = dict(shards)
