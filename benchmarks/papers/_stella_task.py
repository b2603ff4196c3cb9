"""What selection, staleness, batch and density cost in samples: the digits, in one process, with nothing timed.

The gradient of each step goes through error feedback and a selector, and is applied at once or a step late, by SGD with
momentum. Blocks that are not selected keep their parameters and momentum as they are, as in the paper's optimizer.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from dataclasses import dataclass, replace

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from lightning_hetero.compression.selectors import SELECT, SelectorState
from lightning_hetero.core.compression.bayesian_search import ConvergenceSurrogate, profile_convergence

TARGET, SMOOTH = 0.15, 1120
"""Mean loss over the newest so many samples, which counts as reached."""
KEPT_OUT = 297
RATES = (0.05, 0.1, 0.2, 0.4)


@dataclass(frozen=True)
class Training:
    """Settings of one training.

    Args:
        selector: ``"dense"``, ``"random"``, ``"exact"``, or ``"aimd"``, the paper's threshold.
        density: share of the elements that a step applies.
        block: elements that are selected together.
        delay: steps by which a gradient is late, 0 or 1.
        batch: samples of a step.
        rate: learning rate.
        fresh: share of the parameters, on the output side, whose gradients are not late.
        seed: of weights and order of samples.
    """

    selector: str = "dense"
    density: float = 1.0
    block: int = 16
    delay: int = 0
    batch: int = 112
    rate: float = 0.05
    fresh: float = 0.0
    seed: int = 0


class FlatNet:
    """The network of ``benchmarks/wan.py``, with all parameters and gradients in one tensor each."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
        parameters = list(self.net.parameters())
        sizes = [-(-p.numel() // 16) * 16 for p in parameters]
        self.values, self.gradient = torch.zeros(sum(sizes)), torch.zeros(sum(sizes))
        at = 0
        for p, size in zip(parameters, sizes, strict=True):
            self.values[at : at + p.numel()] = p.detach().view(-1)
            p.data = self.values[at : at + p.numel()].view_as(p)
            p.grad = self.gradient[at : at + p.numel()].view_as(p)
            at += size

    def backward(self, x, y):
        self.gradient.zero_()
        loss = nn.functional.cross_entropy(self.net(x), y)
        loss.backward()
        return float(loss.detach())


class Chosen:
    """Blocks of one step that are sent, by error feedback and a selector."""

    def __init__(self, how, size):
        self.how, self.residual = how, torch.zeros(size // how.block, how.block)
        self.k = max(1, int(how.density * len(self.residual)))
        self.state, self.rng = SelectorState(), np.random.default_rng(how.seed)

    def take(self, gradient):
        self.residual += gradient.view(self.residual.shape)
        if self.how.selector == "random":
            rows = self.rng.choice(len(self.residual), self.k, replace=False)
        else:
            rows = SELECT[self.how.selector](self.residual.abs().sum(1).numpy(), self.k, self.state)
        rows = torch.from_numpy(np.asarray(rows))
        values = self.residual[rows]
        self.residual[rows] = 0.0
        return rows, values


def batches(how):
    """Batches of the digits without end, in an order of the seed."""
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x / 16.0, dtype=torch.float32), torch.tensor(y)
    order = np.arange(len(x))
    rng = np.random.default_rng(how.seed)
    rng.shuffle(order[:-KEPT_OUT])
    order, queue = order[:-KEPT_OUT], np.array([], dtype=int)
    while True:
        while len(queue) < how.batch:
            queue = np.concatenate([queue, rng.permutation(order)])
        chosen, queue = queue[: how.batch], queue[how.batch :]
        yield x[chosen], y[chosen]


def losses(how, samples, *, to_target=False):
    """Loss of each batch, of so many samples; ``to_target`` ends at the target, or when the training diverges."""
    model = FlatNet(how.seed)
    chosen = None if how.selector == "dense" else Chosen(how, len(model.values))
    width = 16 if chosen is None else how.block
    weights, momentum = model.values.view(-1, width), torch.zeros(len(model.values)).view(-1, width)
    first_fresh, waiting, found = int((1.0 - how.fresh) * len(weights)), None, []

    def apply(rows, values):
        momentum[rows] = momentum[rows].mul_(0.9).add_(values)
        weights[rows] -= how.rate * momentum[rows]

    stream = batches(how)
    while True:
        x, y = next(stream)
        found.append(model.backward(x, y))
        everything = torch.arange(len(weights))
        rows, values = (
            (everything, model.gradient.view(-1, width).clone()) if chosen is None else chosen.take(model.gradient)
        )
        if how.delay:
            now = rows >= first_fresh
            if waiting is not None:
                apply(*waiting)
            apply(rows[now], values[now])
            waiting = (rows[~now], values[~now])
        else:
            apply(rows, values)
        ended = len(found) * how.batch >= samples or not np.isfinite(found[-1])
        if ended or (to_target and np.isfinite(samples_to(found, how.batch))):
            return found


def samples_to(found, batch, target=TARGET):
    """Samples until the mean loss of the newest ones is below the target; infinite if it never is."""
    window = max(1, SMOOTH // batch)
    if len(found) < window:
        return float("inf")
    sums = np.cumsum([0.0, *found])
    reached = np.flatnonzero((sums[window:] - sums[:-window]) / window < target)
    return float((reached[0] + window) * batch) if len(reached) else float("inf")


def best(how, samples, seeds, rates=RATES):
    """Least samples to the target over learning rates, mean over seeds, with the rate and the last loss."""
    found = []
    for rate in rates:
        runs = [losses(replace(how, rate=rate, seed=seed), samples, to_target=True) for seed in range(seeds)]
        needed = float(np.mean([samples_to(run, how.batch) for run in runs]))
        last = float(np.mean([np.mean(run[-max(1, SMOOTH // how.batch) :]) for run in runs]))
        found.append((needed, rate, last))
    return min(found, key=lambda one: (one[0], one[2]))


SELECTIONS = {
    "dense": Training(),
    "blocks of 16, exact": Training("exact", 0.01),
    "single elements, exact": Training("exact", 0.01, block=1),
    "blocks of 16, the paper's threshold": Training("aimd", 0.01),
    "single elements, the paper's threshold": Training("aimd", 0.01, block=1),
    "random elements": Training("random", 0.01, block=1),
    "random blocks of 16": Training("random", 0.01),
}
DELAYS = {
    "dense": Training(),
    "dense, late": Training(delay=1),
    "dense, late but for 15 %": Training(delay=1, fresh=0.15),
    "1 %": Training("exact", 0.01),
    "1 %, late": Training("exact", 0.01, delay=1),
    "1 %, late but for 15 %": Training("exact", 0.01, delay=1, fresh=0.15),
}
BANDWIDTHS = {
    f"batch {batch}, density {100 * 0.01 * batch / 112:.3g} %, late": Training(
        "exact", 0.01 * batch / 112, delay=1, batch=batch
    )
    for batch in (28, 56, 112, 224)
}


def rows_of(samples=28_000, seeds=1):
    """Samples to the target of each training at the best learning rate of each, over that of dense sums."""
    rows = []
    for what, table in (("selection", SELECTIONS), ("delay", DELAYS), ("bandwidth", BANDWIDTHS)):
        for kind, how in table.items():
            needed, rate, last = best(how, samples, seeds)
            rows.append({"what": what, "kind": kind, "rate": rate, "samples": needed, "loss": last, "seeds": seeds})
    dense = rows[0]["samples"]
    return [{**row, "over_dense": row["samples"] / dense} for row in rows]


def probe(rate, total, staleness, samples=6000):
    """One probe training of S Alg. 1: mean loss of its last quarter."""
    how = Training("exact" if rate else "dense", max(1.0 - rate, 0.001), delay=staleness, batch=int(total))
    found = losses(how, samples)
    return float(np.mean(found[-max(1, len(found) // 4) :]))


def surrogate_rows(probes=30, tests=25, low=16, high=512):
    """The profile of S Alg. 1, and its prediction where it was not measured against the mean of all probes."""
    profile = profile_convergence(probe, min_total=low, max_total=high, probes=probes, rng=np.random.default_rng(0))
    surrogate, rng = ConvergenceSurrogate(profile), np.random.default_rng(1)
    truths, predictions = [], []
    for _ in range(tests):
        rate, total = float(rng.uniform(0.0, 0.999)), int(np.exp(rng.uniform(np.log(low), np.log(high))))
        truths.append(probe(rate, total, 1) / profile.baseline - 1.0)
        predictions.append(surrogate.extra_loss(rate, total))
    errors = np.abs(np.array(truths) - predictions)
    plain = np.abs(np.array(truths) - np.mean([extra for *_, extra in profile.points]))
    row = {
        "what": "surrogate",
        "kind": f"{probes} probes, {tests} tests",
        "error": float(np.median(errors)),
        "error_of_the_mean": float(np.median(plain)),
        "correlation": float(np.corrcoef(truths, predictions)[0, 1]),
        "least": min(truths),
        "most": max(truths),
    }
    return [row, {"what": "profile", "kind": "points", "points": [profile.baseline, low, high, profile.points]}]
