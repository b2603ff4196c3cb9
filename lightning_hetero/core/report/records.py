"""Schema of a run's record: a JSON object per line, of which each kind is a class here.

A file begins with one :class:`RunHeader`. Then comes a :class:`RoundRecord` for each sync round, with a
:class:`ChangeRecord`, :class:`GainRecord` or :class:`StragglerRecord` where it belongs. An :class:`EndRecord` ends the
file, unless the run was killed or still runs. All times are seconds; a list over workers is in the order of ranks.

Readers ignore fields that they do not know. A change of meaning gives the schema another :data:`VERSION`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.report import field_types as types

__all__ = [
    "FILE_NAME",
    "VERSION",
    "ChangeRecord",
    "EndRecord",
    "GainRecord",
    "Record",
    "RoundRecord",
    "RunHeader",
    "StragglerRecord",
    "WorkerRecord",
]

VERSION, FILE_NAME = 1, "hetero_run.jsonl"
"""Version of the schema, and name of the file in the logger's directory."""


@dataclass(frozen=True)
class WorkerRecord:
    """One worker.

    Args:
        identity: hardware identity, as in checkpoints.
        device: name of the device.
        capacity: peak FLOP/s, by which open-loop splits go.
        min_local: fewest samples.
        max_local: most samples (memory), ``None`` for no bound.

    Example:
        >>> WorkerRecord("host/cpu:0", "Xeon, 2 cores").min_local
        1
    """

    identity: str
    device: str
    capacity: types.Amount = math.nan
    min_local: types.Count = 1
    max_local: types.Count | None = None


@checked_keywords
@dataclass(frozen=True)
class RunHeader:
    """First line of a record.

    Args:
        started: Unix time in whole seconds.
        package: version of this package.
        front_end: what runs the training loop: ``"Trainer"``, ``"Fabric"``, ``"Accelerate"``, ``"Transformers"`` or
            ``"own loop"``.
        strategy: name of the strategy.
        policy: name of the policy.
        workers: all workers.
        total_batch_size: ``B`` at the start.
        settings: settings of the strategy that differ from their defaults, as text.
        command: command line of rank 0.
        versions: versions of Python and of the packages.
        hostname: host of rank 0.
        by_cost: whether batches are divided by the cost of their samples: the sizes of rounds and changes are then
            planned work, in average samples, and ``rows`` are the samples that ran.
        version: version of the schema.

    Example:
        >>> RunHeader(1790000000, "0.2.0", "Trainer", "hetero_ddp", "perf_model", (), 48).version
        1
    """

    kind: ClassVar[str] = "run"
    started: types.Count
    package: str
    front_end: str
    strategy: str
    policy: str
    workers: tuple[WorkerRecord, ...]
    total_batch_size: types.Count
    settings: Mapping[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    hostname: str = ""
    by_cost: bool = False
    version: types.Natural = VERSION


@checked_keywords
@dataclass(frozen=True)
class RoundRecord:
    """One sync round: medians over those steps since the last round that all workers have timed.

    Phases are seconds per micro-batch, without waiting for others, except ``sync``; a step has ``accumulation``
    micro-batches. In a long run, one line may stand for several rounds; its times are their means, weighted by
    ``count``.

    Args:
        time: seconds since the run began.
        epoch: epoch of the running step.
        step: step of the epoch.
        count: steps since the last round in the file.
        timed: steps that the medians are over; 0 leaves all times empty.
        sizes: ``b_i``, samples of each worker by the plan.
        accumulation: micro-batches of a step.
        step_time: seconds of a step, NaN if none was measured from end to end.
        data: seconds that each device waits for its loader.
        forward: seconds of each forward pass, and of all that no other phase covers.
        backward: ``P_i``.
        optimizer: seconds of each optimizer's step.
        sync: seconds of the all-reduce after the backward pass, waiting for other workers included.
        link: least seconds of the all-reduce over all workers: what the last worker to arrive sees.
        jitter: relative deviation of single steps' computing times of each worker.
        predicted: seconds of a step of the running split as the time model predicted them at the round before, or when
            the split was adopted; NaN without a model.
        error: standard error of ``predicted``.
        even: seconds of a step of equal sizes by the time model.
        nodes: ``(q, s, k, m)`` of each worker for a whole step (C eq. 3), empty without a model.
        gamma: share of the backward pass before the first bucket.
        t_o: seconds of synchronizing all buckets but the last.
        t_u: seconds of synchronizing the last bucket.
        max_local: most samples of each worker, empty for no bound.
        density: share of the gradient that is sent, NaN if all of it is.
        stale: whether gradients are applied one step late.
        sent_bytes: bytes that a worker sends in a step, NaN if unknown.
        noise_scale: gradient noise scale, NaN if it is not measured.
        goodput: statistical efficiency times samples/s, NaN if it is not known.
        kept: why the split stays, empty if it changes.
        rows: samples that each worker ran in a step, on average, where they are not ``sizes``; empty where they are.
        sample: newest timed steps, ``[step][worker][value]``: the values of :data:`SAMPLED`, then each bucket's end.

    Example:
        >>> RoundRecord(12.5, epoch=0, step=40, count=10, timed=8, sizes=(24, 8)).total
        32
    """

    kind: ClassVar[str] = "round"
    SAMPLED: ClassVar[tuple[str, ...]] = types.SAMPLED
    time: types.Seconds
    epoch: types.Count
    step: types.Count
    count: types.Count
    timed: types.Count
    sizes: types.Sizes
    accumulation: types.Natural = 1
    step_time: types.Seconds = math.nan
    data: types.WorkerSeconds = ()
    forward: types.WorkerSeconds = ()
    backward: types.WorkerSeconds = ()
    optimizer: types.WorkerSeconds = ()
    sync: types.WorkerSeconds = ()
    link: types.Seconds = math.nan
    jitter: types.WorkerAmounts = ()
    predicted: types.Amount = math.nan
    error: types.Amount = math.nan
    even: types.Amount = math.nan
    nodes: types.Coefficients = ()
    gamma: types.Share = math.nan
    t_o: types.Amount = math.nan
    t_u: types.Amount = math.nan
    max_local: types.Bounds = ()
    density: types.Amount = math.nan
    stale: bool = False
    sent_bytes: types.Amount = math.nan
    noise_scale: types.Number = math.nan
    goodput: types.Amount = math.nan
    kept: str = ""
    rows: types.WorkerAmounts = ()
    sample: types.Sample = ()

    @property
    def total(self) -> int:
        """Samples of a micro-batch of all workers."""
        return sum(self.sizes)

    @property
    def ran(self) -> tuple[float, ...]:
        """Samples that each worker ran in a micro-batch."""
        return self.rows or self.sizes


@dataclass(frozen=True)
class ChangeRecord:
    """A plan was adopted, from an epoch and step on, that may lie ahead.

    Args:
        time: seconds since the run began.
        epoch: first epoch of the plan.
        step: its first step.
        sizes: samples of each worker.
        reason: why, as in the log.
        predicted: predicted seconds of a step, NaN without a model.

    Example:
        >>> ChangeRecord(12.5, 0, 41, (24, 8), "optimum of the time model").kind
        'change'
    """

    kind: ClassVar[str] = "change"
    time: types.Seconds
    epoch: types.Count
    step: types.Count
    sizes: types.Sizes
    reason: str
    predicted: types.Amount = math.nan


@dataclass(frozen=True)
class GainRecord:
    """Measured step time before and after a change of the split at the same total.

    Args:
        time: seconds since the run began.
        epoch: epoch of the change.
        step: its step.
        before: median seconds of a step before.
        after: median seconds of a step after.
        predicted: seconds that were predicted, NaN without a model.

    Example:
        >>> GainRecord(14.0, 0, 41, before=0.273, after=0.241, predicted=0.244).kind
        'gain'
    """

    kind: ClassVar[str] = "gain"
    time: types.Seconds
    epoch: types.Count
    step: types.Count
    before: types.Seconds
    after: types.Seconds
    predicted: types.Amount = math.nan


@dataclass(frozen=True)
class StragglerRecord:
    """A worker, or the link, begins or ceases to make all others wait.

    Args:
        time: seconds since the run began.
        event: ``"begin"`` or ``"end"``.
        rank: rank of the worker, -1 for the link that all share.
        phase: ``"data"``, ``"forward"``, ``"backward"``, ``"optimizer"`` or ``"link"``.
        epoch: epoch since which, or until which, it lasted.
        step: its step.
        cost: seconds that it adds to a step.
        lost: seconds that the others have waited for it so far.
        relieved: how it ended: ``"split"`` (its share fell), ``"recovered"``, ``"others"`` (others are slower now),
            ``"slower"`` (it was slow from the start, and is slower still), ``"run ended"``, or empty.

    Example:
        >>> StragglerRecord(9.0, "begin", 2, "data", 0, 31, cost=0.05, lost=0.0).rank
        2
    """

    kind: ClassVar[str] = "straggler"
    time: types.Seconds
    event: types.Event
    rank: types.Rank
    phase: str
    epoch: types.Count
    step: types.Count
    cost: types.Seconds
    lost: types.Seconds
    relieved: str = ""


@dataclass(frozen=True)
class EndRecord:
    """Last line of a run that ended by itself.

    Args:
        time: seconds since the run began.
        epoch: epoch that it reached.
        step: step of the epoch.
        steps: synchronized steps of this run.
        status: ``"finished"``, or the error that ended it.
        memory: most bytes that each worker had allocated on its GPU, or its process on a CPU; NaN if unknown.
        overhead: seconds that recording took.
        dropped: lines left out: rounds that had no time to be recorded, and what was merged or dropped for the bound.

    Example:
        >>> EndRecord(99.0, 2, 0, steps=400).status
        'finished'
    """

    kind: ClassVar[str] = "end"
    time: types.Seconds
    epoch: types.Count
    step: types.Count
    steps: types.Count
    status: str = "finished"
    memory: types.WorkerAmounts = ()
    overhead: types.Amount = 0.0
    dropped: types.Count = 0


Record = RunHeader | RoundRecord | ChangeRecord | GainRecord | StragglerRecord | EndRecord
"""Any line of a file."""
