"""Advice in words: what the findings mean for a training, and which setting helps."""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_hetero.cli.doctor.checkup import Checkup
from lightning_hetero.cli.doctor.facts import ProcessFacts
from lightning_hetero.cli.doctor.job import START
from lightning_hetero.simulate.planning.cluster import Cluster, Worker
from lightning_hetero.simulate.planning.figures import plan_cluster
from lightning_hetero.simulate.planning.units import format_seconds
from lightning_hetero.simulate.planning.wording import counted, percent

__all__ = ["AdviceSettings", "advice", "gain_over_even", "link_advice", "speed_advice"]


@dataclass(frozen=True)
class AdviceSettings:
    """Bounds from which on something is worth a sentence.

    Args:
        least_ratio: speed of the fastest over that of a worker that counts as slow.
        least_gain: relative gain of uneven batches.
        memory_ratio: memory of the largest GPU over that of one that counts as small.
        samples_per_worker: samples of the batch for which the gain is computed.
    """

    least_ratio: float = 1.1
    least_gain: float = 0.03
    memory_ratio: float = 1.1
    samples_per_worker: int = 1000


SETTINGS = AdviceSettings()


def advice(checkup: Checkup) -> list[str]:
    """Return sentences on what to do, those that matter most first."""
    slow = [*speed_advice(checkup), *_throttling(checkup), *_busy(checkup)]
    found = [*slow, *_memory(checkup), *_cores(checkup), *link_advice(checkup)]
    if checkup.world_size == 1 and not checkup.failures:
        found.append(f"to measure the link between workers, start one process per worker: {START}")
    return found


def gain_over_even(speeds: Sequence[float]) -> float:
    """Return how much faster the best split is than even batches, if only computing counts (C eq. 7).

    Args:
        speeds: of each worker, in any unit.

    Example:
        >>> round(gain_over_even([2.0, 2.0, 1.0]), 2)
        1.67
    """
    fastest = max(speeds)
    workers = tuple(Worker("worker", 0.0, 0.0, fastest / speed * 1e-3, 0.0) for speed in speeds)
    answer = plan_cluster(Cluster(workers), SETTINGS.samples_per_worker * len(workers))
    return answer.speedup_over_even or 1.0


def speed_advice(checkup: Checkup) -> list[str]:
    """Return a sentence on workers that are slower than the fastest one."""
    speeds = {rank: speed.flops for rank, speed in checkup.speeds.items()}
    if len(speeds) < 2:
        return []
    fastest = max(speeds.values())
    slow = sorted((rank for rank in speeds if fastest / speeds[rank] >= SETTINGS.least_ratio), key=speeds.__getitem__)
    gain = gain_over_even(list(speeds.values()))
    if not slow or gain - 1.0 < SETTINGS.least_gain:
        return ["all devices are about equally fast: even batches are right, and hetero_ddp keeps them"]
    named = ", ".join(f"{checkup.unit} {rank} is {fastest / speeds[rank]:.3g} times slower" for rank in slow[:3])
    more = f", and {len(slow) - 3} more are slower, too" if len(slow) > 3 else ""
    return [
        f"{named} than the fastest{more}: with even batches the others wait. "
        f'strategy="hetero_ddp" would give {gain:.3g}x, as far as computing limits the steps'
    ]


def _throttling(checkup: Checkup) -> list[str]:
    return [
        f"{checkup.unit} {rank} lost {percent(speed.slowdown)} of its speed within {checkup.seconds:g} s: a limit of "
        "heat, power or CPU time. Measure longer (--seconds 60); hetero_ddp follows such changes"
        for rank, speed in sorted(checkup.speeds.items())
        if speed.slowdown
    ]


def _busy(checkup: Checkup) -> list[str]:
    busy = next((row for row in checkup.rows if row.device.kind == "cpu" and row.load > 0.5 * row.cores), None)
    if busy is None or not checkup.speeds:
        return []
    return [
        f"other programs used the machine of {_named(checkup, busy)} (load {busy.load:.3g} on {busy.cores:.3g} cores): "
        "speeds and rates may be too low. Measure again when nothing else runs"
    ]


def _memory(checkup: Checkup) -> list[str]:
    gpus = [row for row in checkup.rows if row.device.kind == "cuda"]
    most = max((row.device.memory for row in gpus), default=0)
    found = [
        f"{_named(checkup, small)} has less memory than others ({_gb(small.device.memory)} of {_gb(most)} GB): set "
        "probe_memory=True or max_local_batch_sizes, so that a large share does not run out of it"
        for small in gpus
        if most > SETTINGS.memory_ratio * small.device.memory
    ][:1]
    limited = next((row for row in checkup.rows if row.memory_limit and row.memory_limit < row.host_memory), None)
    if limited is not None and limited.memory_limit:
        found.append(
            f"a cgroup allows {_named(checkup, limited)} {_gb(limited.memory_limit)} of the machine's "
            f"{_gb(limited.host_memory)} GB: loader workers and caches count, and the system ends what takes more"
        )
    return found


def _cores(checkup: Checkup) -> list[str]:
    short = next((row for row in checkup.rows if row.cores < row.threads), None)
    if short is None:
        return []
    threads = max(1, int(short.cores))
    advice = f"Set OMP_NUM_THREADS={threads}" if threads < short.threads else "More cores would help"
    return [
        f"{_named(checkup, short)} may use {short.cores:.3g} cores, and torch runs {counted(short.threads, 'thread')}: "
        f"the quota interrupts them. {advice}"
    ]


def link_advice(checkup: Checkup) -> list[str]:
    """Return sentences on how much gradient the link can average, and on clusters of ranks."""
    link = checkup.link
    if link is None or not link.averaging_rate:
        return []
    size, seconds = link.sums[-1]
    megabytes = link.averaging_rate / 1e6
    example = 100e6 / link.averaging_rate
    found = [
        f"the link averages {megabytes:.3g} MB of gradients a second ({size / 1e6:.3g} MB in {format_seconds(seconds)}"
        f"): communication-bound from {megabytes:.3g} MB per second of backward pass. 100 MB (25 million parameters) "
        f'take {format_seconds(example)}; if your backward pass is shorter, set compression="auto"'
    ]
    several = [cluster for cluster in link.clusters if len(cluster) > 1]
    if len(link.clusters) > 1 and several:
        shown = " | ".join(", ".join(map(str, cluster)) for cluster in link.clusters)
        found.append(f'the link between the ranks {shown} is slower than the links inside: hierarchy="auto"')
    return found


def _named(checkup: Checkup, row: ProcessFacts) -> str:
    return f"{checkup.unit} {row.rank}"


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g}"
