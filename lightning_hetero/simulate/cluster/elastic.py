"""Simulator of elastic averaging: batches are claimed by a virtual clock, scaling and merge weights are real."""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.merging.batch_scaling import scale_batch_sizes
from lightning_hetero.core.validation import check_int, check_number
from lightning_hetero.data.mega_batch import MegaBatch
from lightning_hetero.elastic.config import ElasticConfig
from lightning_hetero.elastic.epoch_layout import EpochLayout
from lightning_hetero.elastic.merging.merge_record import MergeRecord
from lightning_hetero.simulate.cluster.link_profile import LinkProfile
from lightning_hetero.simulate.devices.device_profile import DeviceProfile

__all__ = ["ElasticResult", "ElasticSimulator"]


@dataclass(frozen=True)
class ElasticResult:
    """Mega-batches of a simulation, from its beginning.

    Args:
        merges: record of each mega-batch and its merge, as an engine keeps them.
        begins: second of the virtual clock at which each mega-batch began.
        ends: second at which each was merged.

    Example:
        >>> devices = [DeviceProfile(0.001, 0, 0.002, 0), DeviceProfile(0.003, 0, 0.006, 0)]
        >>> result = ElasticSimulator(devices, 32, samples=6400).run(2)
        >>> [merge.updates for merge in result.merges], result.merges[1].batch_sizes
        ([(75, 25), (75, 50)], (32, 16))
        >>> result.idle_share(0)
        (0.0, 0.0)
    """

    merges: tuple[MergeRecord, ...]
    begins: tuple[float, ...]
    ends: tuple[float, ...]

    @property
    def samples(self) -> int:
        """Samples of all mega-batches."""
        return sum(sum(merge.samples) for merge in self.merges)

    def idle_share(self, mega_batch: int) -> tuple[float, ...]:
        """Return the share of a mega-batch for which each worker waited for its end, the merge included."""
        took = self.ends[mega_batch] - self.begins[mega_batch]
        return tuple(1.0 - busy / took for busy in self.merges[mega_batch].busy)


@checked_keywords
class ElasticSimulator:
    """Elastic averaging on devices of exactly known speed, without a process.

    Workers claim batches as soon as they are free. Cut into mega-batches, claims, scaling of batch sizes and merge
    weights are those of :class:`~lightning_hetero.elastic.ElasticEngine`. There is no model: norms are given.

    Args:
        devices: profile of each worker.
        batch_size: ``b_max``, with which every worker begins, ``>= 1``.
        samples: samples of an epoch.
        config: settings of elastic averaging.
        link: link that a merge crosses; its ``gradient_bytes`` are the model's.
        claim_seconds: seconds of a claim, ``>= 0``.
        norm: ``||w_i||_2 / |w|`` of each replica at a merge, ``>= 0``.
        seed: of all random numbers: device ``i`` has ``seed + i``.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument is out of range, or the samples cannot give every worker a batch.

    Example:
        >>> fast, slow = DeviceProfile(0.001, 0, 0.002, 0), DeviceProfile(0.002, 0, 0.004, 0)
        >>> simulator = ElasticSimulator([fast, slow], 32, 6400, link=LinkProfile(gradient_bytes=1e8, rate=1e9))
        >>> result = simulator.run(6)
        >>> [merge.batch_sizes for merge in result.merges[::5]], round(simulator.clock, 2)
        ([(32, 32), (32, 16)], 39.29)
    """

    def __init__(
        self,
        devices: Sequence[DeviceProfile],
        batch_size: int,
        samples: int,
        *,
        config: ElasticConfig | None = None,
        link: LinkProfile | None = None,
        claim_seconds: float = 0.0,
        norm: float = 0.01,
        seed: int = 0,
    ) -> None:
        if not devices or not all(isinstance(device, DeviceProfile) for device in devices):
            raise TypeError(
                f"devices={devices!r} must be a list of one DeviceProfile per worker, such as [fast, slow]."
            )
        check_int("batch_size", batch_size, minimum=1)
        check_int("samples", samples, minimum=1)
        self._devices, self._config = tuple(devices), ElasticConfig() if config is None else config
        self._link = LinkProfile() if link is None else link
        self._claim = check_number("claim_seconds", claim_seconds, low=0.0)
        self._norm = check_number("norm", norm, low=0.0)
        self._layout = EpochLayout.of(self._config, samples, batch_size, len(devices))
        check_int("seed", seed, minimum=0)
        self._factors: list[Iterator[tuple[float, float]]] = [d.factors(seed + i) for i, d in enumerate(devices)]
        self.batch_sizes, self.clock = self._layout.bounded(()), 0.0
        self._position = (0, 0)
        self._merges: list[MergeRecord] = []
        self._spans: list[tuple[float, float]] = []

    def run(self, merges: int) -> ElasticResult:
        """Run some more mega-batches, each with its merge; return the result of all so far."""
        for _ in range(check_int("merges", merges, minimum=0)):
            self._mega_batch()
        begins, ends = zip(*self._spans, strict=True) if self._spans else ((), ())
        return ElasticResult(tuple(self._merges), begins, ends)

    def _mega_batch(self) -> None:
        epoch, position = self._position
        mega = self._layout.mega_batch(position, self.batch_sizes)
        assert mega is not None
        updates, samples, busy = self._claims(mega)
        settings, rule, sizes = self._layout.settings, self._config.rule, self.batch_sizes
        found = rule.weights(sizes, updates, [self._norm] * len(sizes), settings)
        record = MergeRecord(epoch, mega.stop, sizes, updates, samples, found.weights, found.perturbed, busy)
        begin = self.clock
        self.clock += max(busy)
        self.clock += float(self._link.seconds(len(sizes), self.clock).sum())
        self._merges.append(record)
        self._spans.append((begin, self.clock))
        if rule.scales and len(sizes) > 1:
            self.batch_sizes = scale_batch_sizes(sizes, updates, settings)
        over = mega.stop >= self._layout.samples
        self._position = (epoch + 1, 0) if over else (epoch, mega.stop)

    def _claims(self, mega: MegaBatch) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]:
        """Return updates, samples and seconds of each worker in a mega-batch."""
        workers, claimed = len(self._devices), 0
        updates, samples, busy = [0] * workers, [0] * workers, [0.0] * workers
        free = []  # when each worker is done with its batch
        spans = [mega.first(rank) for rank in range(workers)]
        for rank in range(workers):
            free.append((self._seconds(rank, len(spans[rank])), rank))
        heapq.heapify(free)
        while free:
            now, rank = heapq.heappop(free)
            updates[rank] += 1
            samples[rank] += len(spans[rank])
            busy[rank] = now
            span = mega.claimed(claimed, self.batch_sizes[rank])
            claimed += self.batch_sizes[rank]
            if span is not None:
                spans[rank] = span
                heapq.heappush(free, (now + self._claim + self._seconds(rank, len(span)), rank))
        return tuple(updates), tuple(samples), tuple(busy)

    def _seconds(self, rank: int, samples: int) -> float:
        """Return the seconds of a worker's next batch."""
        device, (outside, inside) = self._devices[rank], next(self._factors[rank])
        return (device.q * samples + device.s) * outside + (device.k * samples + device.m) * inside
