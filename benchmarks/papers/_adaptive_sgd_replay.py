"""Training in a virtual clock: real gradients, merges and batch sizes of all workers in one process, exact times.

Which worker claims which batch follows from the devices' times alone, so it is computed and not raced for. The merge
rules, the batch scaling, the cut into mega-batches and the claims are the package's own.
"""

import heapq
import itertools
import math

import torch
from _adaptive_sgd_task import BATCH, MEGA_BATCH, METHODS, OPTIMIZERS, data, model, profiles

from lightning_hetero.core.batching.optperf import solve_optperf
from lightning_hetero.core.merging.batch_scaling import scale_batch_sizes
from lightning_hetero.core.merging.rules import MERGES, GlobalModel
from lightning_hetero.core.timing.step_time import ClusterTimeModel
from lightning_hetero.data import PermutationStream
from lightning_hetero.datasets.multilabel_loss import multilabel_cross_entropy
from lightning_hetero.elastic import ElasticConfig
from lightning_hetero.elastic.epoch_layout import EpochLayout
from lightning_hetero.elastic.optimizers import outer_momentum

LEARNING_STEPS = 20
"""Steps at even batches until the split is balanced (8 to 27 on emulated devices)."""
HOPELESS = 2.0
"""A training in search of a rate ends if its precision after an epoch is not so many times that of its start."""


class Device:
    """A device's clock: each batch takes the time of its profile, with jitter."""

    def __init__(self, profile, seed):
        self.model, self.factors = profile.model, profile.factors(seed)

    def seconds(self, size):
        forward, backward = next(self.factors)
        return forward * self.model.forward_time(size) + backward * self.model.backward_time(size)


class Worker:
    """A replica and its optimizer."""

    def __init__(self, train, optimizer, lr, seed):
        self.train, self.lr = train, lr
        self.model = model(train, optimizer, seed)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters(), lr)

    def step(self, indices, factor=1.0):
        batch = self.train.__getitems__(indices)
        self.optimizer.param_groups[0]["lr"] = self.lr * factor
        self.optimizer.zero_grad()
        multilabel_cross_entropy(self.model(batch), batch.labels, batch.label_rows).backward()
        self.optimizer.step()


@torch.no_grad()
def precision(module, test, size=500):
    """Top-1 precision on the test set; NaN of a model that is not finite."""
    hits = 0
    for start in range(0, len(test), size):
        batch = test.__getitems__(range(start, min(start + size, len(test))))
        logits = module(batch)
        if not torch.isfinite(logits).all():
            return math.nan
        hits += int((logits.argmax(dim=1)[batch.label_rows] == batch.labels).sum())
    return hits / len(test)


def replay(spec, epochs, stop_at=None, quick=False):
    """One training; its curve, and what its merges did.

    Args:
        spec: ``shape``, ``cluster``, ``workers``, ``method``, ``optimizer``, ``lr`` and ``seed``.
        epochs: most epochs.
        stop_at: precision at which it ends.
        quick: whether the data are tiny.

    Returns:
        ``points`` of samples, seconds without exchanges, exchanges and precision; ``merges`` of batch sizes, updates,
        perturbation and idle share.
    """
    torch.set_num_threads(1)
    train, test = data(spec["shape"], quick)
    devices = make_devices(spec)
    method = METHODS[spec["method"]]
    make = _Averaged if not method.merge else _Merged
    run = make(spec, method, devices, train, mega_batch=MEGA_BATCH // 4 if quick else MEGA_BATCH)
    points = [(0, 0.0, 0, precision(run.module, test))]
    for _ in run.train(epochs):
        points.append((run.samples, run.seconds, run.exchanges, precision(run.module, test)))
        samples, *_, found = points[-1]
        hopeless = math.isnan(found) or (samples >= len(train) and found < HOPELESS * points[0][3])
        if stop_at is not None and (hopeless or found >= stop_at):
            break
    return {**spec, "points": points, "merges": run.merges}


def step_ends(devices, samples, *, balanced):
    """Seconds at which each step of averaged gradients ends, without exchanges: all wait for the last.

    A balanced split is the optimum for the undisturbed devices, after some steps at even batches to learn them.
    """
    now, batch = 0.0, BATCH * len(devices)
    cluster = ClusterTimeModel([device.model for device in devices])
    best = {total: solve_optperf(cluster, total).local_batch_sizes for total in {batch, samples % batch or batch}}
    for step in itertools.count():
        total = min(batch, samples - step % math.ceil(samples / batch) * batch)
        even = [total // len(devices)] * len(devices)
        split = best[total] if balanced and step >= LEARNING_STEPS else even
        now += max(device.seconds(size) for device, size in zip(devices, split, strict=True) if size)
        yield now


def balanced(record, quick=False):
    """A replay of ``ddp`` with the times of ``hetero_ddp``, which computes the same."""
    devices = make_devices(record)
    ends = step_ends(devices, len(data(record["shape"], quick)[0]), balanced=True)
    times, points = [0.0], []
    for samples, _, exchanges, found in record["points"]:
        steps = exchanges if len(devices) > 1 else math.ceil(samples / BATCH)
        times += itertools.islice(ends, steps + 1 - len(times))
        points.append((samples, times[steps], exchanges, found))
    return {**record, "method": "hetero_ddp", "points": points}


def make_devices(spec):
    """Clocks of the workers of a training."""
    known = profiles(spec["cluster"], spec["workers"])
    return [Device(profile, 100 * spec["seed"] + rank) for rank, profile in enumerate(known)]


class _Averaged:
    """Gradients averaged after each batch: one model on the sum of all batches, whatever the split."""

    def __init__(self, spec, method, devices, train, mega_batch):
        self.worker = Worker(train, spec["optimizer"], spec["lr"], spec["seed"])
        self.module, self.devices, self.merges = self.worker.model, devices, []
        self.samples, self.seconds, self.exchanges = 0, 0.0, 0
        self.order = PermutationStream(len(train), shuffle=True, seed=spec["seed"])
        self.mega_batch, self.balanced = mega_batch, method.balanced

    def train(self, epochs):
        step = BATCH * len(self.devices)
        clock, seen = step_ends(self.devices, len(self.order), balanced=self.balanced), 0
        for epoch in range(epochs):
            order = self.order.indices(epoch)
            for start in range(0, len(order), step):
                indices = order[start : start + step]
                self.worker.step(indices)
                self.seconds = next(clock)
                self.samples, self.exchanges = self.samples + len(indices), self.exchanges + (len(self.devices) > 1)
                if self.samples // self.mega_batch > seen:
                    seen = self.samples // self.mega_batch
                    yield


class _Merged:
    """Replicas that train on their own and are merged by a rule of the package."""

    def __init__(self, spec, method, devices, train, mega_batch):
        self.workers = [Worker(train, spec["optimizer"], spec["lr"], spec["seed"]) for _ in devices]
        self.devices, self.method, self.rule = devices, method, MERGES[method.merge]
        self.module = model(train, spec["optimizer"], spec["seed"])  # the global model
        momentum, _ = outer_momentum([self.workers[0].optimizer])
        own = {"renormalize": False, "damped": False} if method.printed else {}
        size = BATCH * len(devices) if method.every else mega_batch
        config = ElasticConfig(method.merge, mega_batch_size=size, settings={**own, "momentum": momentum})
        self.layout = EpochLayout.of(config, len(train), BATCH, len(devices))
        self.order = PermutationStream(len(train), shuffle=True, seed=spec["seed"])
        self.sizes, self.mega_batch = (BATCH,) * len(devices), mega_batch
        self.previous = [p.detach().clone() for p in self.module.parameters()]
        self.samples, self.seconds, self.exchanges, self.merges = 0, 0.0, 0, []

    def train(self, epochs):
        seen = 0
        for epoch in range(epochs):
            order, mega = self.order.indices(epoch), self.layout.mega_batch(0, self.sizes)
            while mega is not None:
                self.run(order, mega)
                mega = self.layout.mega_batch(mega.stop, self.sizes)
                if self.samples // self.mega_batch > seen:
                    seen = self.samples // self.mega_batch
                    yield

    def run(self, order, mega):
        """One mega-batch: claims by time, the steps of each worker on its batches, the merge."""
        spans, busy = self.even(mega) if self.method.even else self.claims(mega)
        for rank, (worker, own) in enumerate(zip(self.workers, spans, strict=True)):
            factor = self.sizes[rank] / BATCH if self.rule.scales else 1.0
            for span in own:
                worker.step(order[span.start : span.stop], factor)
        self.samples += mega.stop - mega.start
        self.seconds += max(busy)
        updates = [len(own) for own in spans]
        perturbed = self.merge(updates)
        if not self.method.every:
            idle = 1 - sum(busy) / len(busy) / max(busy)
            self.merges.append((list(self.sizes), updates, perturbed, round(idle, 4)))
        if self.rule.scales and len(self.devices) > 1:
            self.sizes = scale_batch_sizes(self.sizes, updates, self.layout.settings)

    def claims(self, mega):
        """Batches of each worker, and its time: the first is reserved, and who is done first claims the next."""
        spans, busy, offset = [[mega.first(rank)] for rank in range(len(self.devices))], [0.0] * len(self.devices), 0
        free = [(device.seconds(len(mega.first(rank))), rank) for rank, device in enumerate(self.devices)]
        heapq.heapify(free)
        while free:
            now, rank = heapq.heappop(free)
            span = mega.claimed(offset, self.sizes[rank])
            busy[rank] = now
            if span is not None:
                offset += self.sizes[rank]
                spans[rank].append(span)
                heapq.heappush(free, (now + self.devices[rank].seconds(len(span)), rank))
        return spans, busy

    def even(self, mega):
        """The same number of batches of the same size for each worker, in turn."""
        cuts = itertools.pairwise([*range(mega.start, mega.stop, BATCH), mega.stop])
        spans = [[] for _ in self.devices]
        for turn, (start, stop) in enumerate(cuts):
            spans[turn % len(spans)].append(range(start, stop))
        pairs = zip(self.devices, spans, strict=True)
        return spans, [sum(device.seconds(len(span)) for span in own) for device, own in pairs]

    @torch.no_grad()
    def merge(self, updates):
        """Merge as `elastic.merging.replica.Replica` does; the global model is in the module."""
        if len(self.workers) == 1:
            self._show(self.workers[0])
            return False
        replicas = [list(worker.model.parameters()) for worker in self.workers]
        count = sum(p.numel() for p in replicas[0])
        norms = [math.sqrt(sum(float(p.norm()) ** 2 for p in own)) / count for own in replicas]
        if not any(map(math.isfinite, norms)):
            self._show(self.workers[0])
            return False
        settings = self.layout.settings
        found = self.rule.weights(self.sizes, updates, norms, settings)
        for index, (glob, before) in enumerate(zip(self.module.parameters(), self.previous, strict=True)):
            now, copies = glob.clone(), [own[index] for own in replicas]
            terms = [w * copy for w, copy in zip(found.weights, copies, strict=True) if w]
            merged, previous = sum(terms[1:], terms[0]), GlobalModel(now, before)
            for copy, norm in zip(copies, norms, strict=True):
                local = copy if math.isfinite(norm) else now
                new, own = self.rule.update(
                    local, merged, previous, momentum=settings.momentum, world_size=len(replicas)
                )
                copy.copy_(new if own is None else own)
            glob.copy_(new)
            self.previous[index] = now
        self.exchanges += 1
        return found.perturbed

    def _show(self, worker):
        for glob, own in zip(self.module.parameters(), worker.model.parameters(), strict=True):
            glob.copy_(own)
