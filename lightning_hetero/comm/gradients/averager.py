"""Averagers of gradient buckets: the interface between DDP's communication hook and whatever sends gradients.

The hook knows an averager only by the interface :class:`GradientAverager`. An averager owns its state: the flags of the
running step, its part of a checkpoint, and its report of the bytes sent.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from lightning_hetero.comm.collectives import async_ops
from lightning_hetero.comm.collectives.topology import Topology
from lightning_hetero.comm.gradients.squared_norms import BucketSquares

__all__ = ["DDPMean", "Future", "GradientAverager", "StepFlags", "StepReport", "UserHook"]

Future = torch.futures.Future[Any]


@dataclass
class StepReport:
    """Traffic, density and encoding time, summed over steps.

    Args:
        steps: number of steps.
        sent: bytes that this rank sent to others, without those inside its cluster.
        received: bytes that it received.
        density: share of the gradient's elements that was applied, summed over steps.
        encode: seconds of error feedback, selection and writing.
    """

    steps: int = 0
    sent: float = 0.0
    received: float = 0.0
    density: float = 0.0
    encode: float = 0.0

    def add(self, sent: float, density: float, encode: float = 0.0) -> None:
        """Add a step that received as many bytes as it sent."""
        self.steps += 1
        self.sent += sent
        self.received += sent
        self.density += density
        self.encode += encode


@dataclass
class StepFlags:
    """Kind of the average of the running step.

    Args:
        exact: whether it is the sum of all ranks' gradients, rather than a compressed one.
        single_message: whether all buckets travel together with the last one.
        skipped: whether the step was left out on all ranks because a gradient was not finite; on GPU a number on the
            device, 0 if the step was not left out.
    """

    exact: bool = True
    single_message: bool = False
    skipped: bool | torch.Tensor = False

    def begin(self, *, exact: bool, single_message: bool = False) -> None:
        """Begin a step."""
        self.exact, self.single_message, self.skipped = exact, single_message, False

    def skip(self, skipped: bool | torch.Tensor = True) -> None:
        """Note that the step was left out, or the number on the device that tells whether it was."""
        self.skipped = skipped

    def add_other_step(self) -> None:
        """Note that the sum also contains gradients of another step."""
        self.exact = False


class GradientAverager(ABC):
    """Averager of the buckets of a backward pass over all ranks.

    Attributes:
        flags: kind of the running step's average.
        report: traffic since the last :meth:`take_report`.
    """

    kind: ClassVar[str] = ""
    """Name in checkpoints."""
    takes_norms: ClassVar[bool] = False
    """Whether :meth:`average` takes the norms of this rank's gradient while weighting it, in one pass over memory."""
    may_be_stale: ClassVar[bool] = False
    """Whether a :class:`~lightning_hetero.comm.gradients.stale_averager.StaleAverager` can take its place."""
    waits: ClassVar[bool] = True
    """Whether :meth:`average` may wait for other ranks before it returns, so that its time is synchronization."""
    skips_nonfinite: ClassVar[bool] = False
    """Whether a step whose gradient is not finite is left out on all ranks."""
    shards: ClassVar[bool] = False
    """Whether FSDP averages in its place, because the model is sharded."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.flags, self.report = StepFlags(), StepReport()

    @abstractmethod
    def average(self, bucket: dist.GradBucket, squares: BucketSquares | None = None) -> Future:
        """Average one bucket; DDP hands buckets over in the same order on all ranks.

        Args:
            bucket: weighted gradients of this rank, ``W r_i g_i``.
            squares: takes the norms if :attr:`takes_norms`; ``None`` if none are due.
        """

    @property
    def stale_parts(self) -> bool | list[bool]:
        """``True`` if the last bucket holds only sums of the previous step, ``False`` if only sums of this one.

        For a bucket that holds both, a list with an entry for each of its parameters.
        """
        return False

    def after_backward(self) -> None:  # noqa: B027 - most averagers have nothing to do here
        """Hand over the gradients that the optimizer gets in place of DDP's buckets."""

    def undo_failed(self) -> None:  # noqa: B027 - most averagers change nothing before a sum has arrived
        """Undo what a backward pass that has failed changed on this rank: its step is done again."""

    @property
    def undecided(self) -> bool:
        """``True`` while ``"auto"`` has not yet chosen how gradients are sent."""
        return False

    def end_step(self, *, may_be_stale: bool) -> bool:
        """End a synchronized step; return whether to go on with this averager, or with the mean of plain DDP.

        Args:
            may_be_stale: whether gradients may be stale.
        """
        return True

    def settle(self) -> None:  # noqa: B027
        """Wait for the device's decision on the last step, if the host does not know it yet.

        Raises:
            ValueError: if a message of that step was malformed, naming rank and bucket; the same on all ranks.
        """

    @property
    def blocks(self) -> "GradientAverager | None":
        """This averager, if its density can be set and an optimizer can take its blocks."""
        return None

    @property
    def sends_blocks(self) -> bool:
        """``True`` if it currently sends only some blocks of the gradient."""
        return False

    @property
    def user_hook(self) -> Callable[..., Any] | None:
        """The user's communication hook, ``None`` for an averager of this package."""
        return None

    def unsupported_reason(self) -> str | None:
        """Return why DDP cannot rebuild its buckets under this averager, ``None`` if it can."""
        return None

    def take_report(self) -> StepReport | None:
        """Return the traffic since the last call, ``None`` without any."""
        self.settle()
        if self.report.steps == 0:
            return None
        report, self.report = self.report, StepReport()
        return report

    def residuals(self) -> dict[str, torch.Tensor]:
        """Return this rank's residuals (not sent yet) by parameter: flat parts of the weighted sum, ``r_i g_i``."""
        return {}

    def load_residuals(self, residuals: Mapping[str, torch.Tensor]) -> None:  # noqa: B027
        """Set the residuals; parameters that are not named begin with 0."""

    def extra_state(self) -> dict[str, Any]:
        """Return the further state that an identical continuation on the same number of ranks needs."""
        return {}

    def load_extra_state(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Restore the state that :meth:`extra_state` returned."""


class DDPMean(GradientAverager):
    """The mean of plain DDP: ``sum_i (W r_i g_i) / W`` by an all-reduce of each bucket.

    Args:
        world_size: number of ranks, ``W``.
        topology: topology of the all-reduces; flat over all ranks by default.
    """

    takes_norms = True
    may_be_stale = True
    waits = False

    def __init__(self, world_size: int, topology: Topology | None = None) -> None:
        super().__init__(world_size)
        self._topology = None if topology is None or topology.flat else topology
        self._weight = 1.0 / world_size  # as DDP does without a hook; a division is slower

    def average(self, bucket: dist.GradBucket, squares: BucketSquares | None = None) -> Future:
        """Weight the bucket and add it up over ranks."""
        buffer = bucket.buffer()
        if squares is not None:
            squares.take_weighted(buffer, self._weight, bucket.parameters)
        elif self._weight != 1.0:
            buffer.mul_(self._weight)
        return async_ops.async_all_reduce(buffer) if self._topology is None else self._topology.all_reduce(buffer)


class UserHook(GradientAverager):
    """Averager by a communication hook of the user, or one of torch's such as ``fp16_compress_hook``.

    Args:
        hook: called with its state and each bucket, as DDP would.
        state: its state.
        world_size: number of ranks.
    """

    def __init__(self, hook: Callable[..., Any], state: Any, world_size: int) -> None:
        super().__init__(world_size)
        self._hook, self._state = hook, state

    @property
    def user_hook(self) -> Callable[..., Any]:
        """The hook itself."""
        return self._hook

    def average(self, bucket: dist.GradBucket, squares: BucketSquares | None = None) -> Future:
        """Let the hook average the bucket."""
        future: Future = self._hook(self._state, bucket)
        return future

    def unsupported_reason(self) -> str | None:
        """Return the reason if the hook keeps its state by DDP's buckets (``PowerSGDState``)."""
        if not isinstance(self._state, PowerSGDState):
            return None
        return (
            "the PowerSGDState that was given as state of the communication hook knows gradients by DDP's buckets, "
            "which change. Use compression='powersgd', or freeze and unfreeze between two trainings."
        )
