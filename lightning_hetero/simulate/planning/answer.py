"""Answer of a plan: what each of its figures is."""

import math
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Epoch", "LinkAnswer", "PlanAnswer", "WorkerAnswer"]


@dataclass(frozen=True, slots=True)
class WorkerAnswer:
    """Part of a worker in the plan.

    Args:
        name: of its device.
        local_batch_size: ``b_i``.
        compute_time: ``a_i + P_i`` in seconds.
        idle_share: share of the step in which it does not compute.
        bottleneck: ``"compute"`` or ``"communication"``.
        memory: most samples that fit, ``None`` for no bound.
        memory_share: share of that which the plan uses, ``None`` without a bound.
        alone: samples per second if it trains with the same total batch alone.
        brings: share of the cluster's speed that is lost without it; negative if the others are faster without it, 1 if
            they cannot hold the total batch.
    """

    name: str
    local_batch_size: int
    compute_time: float
    idle_share: float
    bottleneck: str
    memory: int | None
    memory_share: float | None
    alone: float
    brings: float


@dataclass(frozen=True, slots=True)
class LinkAnswer:
    """Part of the link in the plan.

    Args:
        rate: bytes per second now, infinite for no limit, ``None`` if unknown.
        share: speed now over that with an infinite rate.
        factor_needed: factor on the rate at which the speed is 95 % of that with an infinite rate; 0 if no rate is too
            low, ``None`` if the rate is infinite.
        rate_needed: that rate in bytes per second, ``None`` if unknown.
    """

    rate: float | None
    share: float
    factor_needed: float | None
    rate_needed: float | None


@dataclass(frozen=True, slots=True)
class Epoch:
    """An epoch.

    Args:
        samples: of an epoch.
        seconds: that it takes.
        price_per_hour: of all workers, ``None`` if the price of one is unknown.
        cost: in the unit of the prices, ``None`` if the price of a worker is unknown.
        without_price: names of the devices without a price.
    """

    samples: int
    seconds: float
    price_per_hour: float | None
    cost: float | None
    without_price: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """Figures of a plan.

    Args:
        total_batch_size: ``B``.
        step_time: seconds of a step by the time model (C eq. 7), without jitter.
        expected_step_time: mean seconds of a step in which each worker's time has its jitter and error, independent and
            normal.
        step_time_error: standard deviation of that.
        samples_per_second: ``B`` over the expected step time.
        even_step_time: seconds with even sizes, ``None`` if those do not fit into memory.
        speedup_over_even: ``even_step_time / step_time``.
        even_does_not_fit: name of a device whose memory even sizes exceed.
        alone: sum of the samples per second of all workers, each training alone with the same total batch.
        share_of_alone: ``B / step_time`` over that sum.
        leave_out: place of the worker that the cluster misses least.
        without_it: seconds of a step without it, ``None`` if the others cannot take the total.
        gain_without_it: relative gain of speed without it, negative if it is better kept.
        leave_out_together: places of workers that the solver would leave out together, since their single sample takes
            longer than the others need for all.
        link: what the link costs.
        epoch: time and cost of an epoch, ``None`` if its samples are unknown.
        workers: one entry each.
    """

    total_batch_size: int
    step_time: float
    expected_step_time: float
    step_time_error: float
    samples_per_second: float
    even_step_time: float | None
    speedup_over_even: float | None
    even_does_not_fit: str | None
    alone: float
    share_of_alone: float
    leave_out: int | None
    without_it: float | None
    gain_without_it: float | None
    leave_out_together: tuple[int, ...]
    link: LinkAnswer
    epoch: Epoch | None
    workers: tuple[WorkerAnswer, ...]

    @property
    def local_batch_sizes(self) -> tuple[int, ...]:
        """The split."""
        return tuple(worker.local_batch_size for worker in self.workers)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; what is infinite there is ``None``."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
