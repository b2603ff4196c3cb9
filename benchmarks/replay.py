"""Loss under block top-k over that of dense sums after the same samples, with many seeds: what nobody has to time.

Two workers of one process train the network of ``benchmarks/wan.py`` on the same samples in the same order, with the
package's own compressor, error feedback and sparse optimizer, and exchange messages by handing them over. The loss
depends on the densities of the steps alone, so that no link is needed: ``density 0.1`` and ``density 0.01`` stay at
theirs, ``controller`` follows what the controller decided on in the trainings of ``results/wan_trace.steps.json``.

The loss of all digits that are trained on goes up and down from one step to the next, by some percent with dense sums
as well. Every tenth step is looked at; a row says what the ratio is at a step, and what it is over the tenth of all
steps that ends there (geometric means over the seeds, with 95 % intervals), and the greatest of its seeds.

    python benchmarks/replay.py            # ten seeds: half an hour on two cores
    python benchmarks/replay.py --quick    # few steps, to see that it works
"""

import argparse
import json
import math
import multiprocessing
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("NUMBA_NUM_THREADS", "1")

import numpy as np
import torch
from hardware import write_table
from scipy.stats import t as student
from sklearn.datasets import load_digits
from torch import nn
from wan import KEPT_OUT, MARKS, PASSES, SPLIT, Digits, by_step

from lightning_hetero.compression.block_gradient import GradientParts
from lightning_hetero.compression.host.encoder import cpu_encoder
from lightning_hetero.compression.layout import Layout
from lightning_hetero.compression.wire_format import MessageFormat
from lightning_hetero.core.compression.settings import BlockTopK, blocks_per_rank
from lightning_hetero.data.index_stream import PermutationStream

HERE = Path(__file__).parent
DENSE, CONTROLLER = "dense", "controller"
KINDS = (DENSE, CONTROLLER, "density 0.1", "density 0.01")
EVERY = 10
"""Steps between two looks at the loss."""


def densities_of(kind, seed, steps):
    """Density of each step, ``None`` for dense sums."""
    if kind == DENSE:
        return None
    if kind != CONTROLLER:
        return [float(kind.split()[1])] * steps
    seen = json.loads((HERE / "results" / "wan_trace.steps.json").read_text())
    seen = [trace["density_from_step"] for trace in seen if trace["kind"] == CONTROLLER and len(trace["ends"]) == 800]
    return by_step(seen[seed % len(seen)], steps)


class Workers:
    """Compressors of all workers, and the gradient that they agree on."""

    def __init__(self, net, density):
        settings, named = BlockTopK(), dict(net.named_parameters())
        self.layout = Layout.of(((name, p.numel()) for name, p in named.items()), settings.block)
        self.slots = {p: self.layout.by_name[name] for name, p in named.items()}
        self.parts, self.settings, self.density = GradientParts(self.slots, settings.block), settings, density
        self.encoders = [cpu_encoder(self.layout, self._form()) for _ in SPLIT]
        self.gradients = None

    def _form(self):
        k = blocks_per_rank(self.layout.num_blocks, self.density, len(SPLIT))
        s = self.settings
        return MessageFormat(self.layout.num_blocks, k, s.block, s.value_dtype, self.layout.fingerprint())

    def exchange(self, gradients, density, step):
        """Select from the weighted gradients of the workers, and give parameters the merged sum."""
        if density != self.density:
            self.density = density
            for encoder in self.encoders:
                encoder.reform(self._form())
        rows = torch.zeros((len(SPLIT), self.encoders[0].form.num_bytes), dtype=torch.uint8)
        for rank, (encoder, (weight, parts)) in enumerate(zip(self.encoders, gradients, strict=True)):
            for p, part in zip(self.slots, parts, strict=True):
                if not encoder.accumulate_bucket([self.slots[p]], part.reshape(-1), weight):
                    raise SystemExit(f"the gradient of step {step} is not finite")
            encoder.encode(rows[rank], step=step, rank=rank)
        self.gradients = self.parts.of(self.encoders[0].merge_sparse(self.encoders[0].read(rows, step=step)))
        for p, gradient in self.gradients.items():
            p.grad = gradient.grad
        for encoder in self.encoders:
            encoder.finish()


def batches(samples, steps):
    """Indices of each step's samples, as the strategy draws them: all of an epoch, and the rest as its last batch."""
    stream, total, drawn, epoch = PermutationStream(PASSES * samples, shuffle=True, seed=0), sum(SPLIT), [], 0
    while len(drawn) < steps:
        order = torch.tensor(stream.indices(epoch)) % samples
        drawn += order.split(total)
        epoch += 1
    return drawn[:steps]


def trained(kind, seed, steps):
    """Losses of a training, of all digits that it trains on and of those that are kept out, every tenth step."""
    torch.set_num_threads(1)
    x, y = load_digits(return_X_y=True)
    order = np.arange(len(x))
    np.random.default_rng(seed).shuffle(order[:-KEPT_OUT])
    x, y = torch.tensor(x[order] / 16.0, dtype=torch.float32), torch.tensor(y[order])
    densities = densities_of(kind, seed, steps)
    model = Digits(sparse=densities is not None, digits=None, seed=seed)
    net, optimizer = model.net, model.configure_optimizers()
    workers = None if densities is None else Workers(net, densities[0])
    if workers is not None:
        optimizer.sparse.follow(lambda: workers.gradients, workers.settings.block)
    found = []
    for step, batch in enumerate(batches(len(x) - KEPT_OUT, steps)):
        first = round(len(batch) * SPLIT[0] / sum(SPLIT))
        pieces, gradients = (batch[:first], batch[first:]), []
        for piece in pieces:
            loss = nn.functional.cross_entropy(net(x[piece]), y[piece])
            gradients.append((len(piece) / len(batch), torch.autograd.grad(loss, list(net.parameters()))))
        if workers is None or step < workers.settings.warmup_steps:
            for p, *parts in zip(net.parameters(), *(parts for _, parts in gradients), strict=True):
                p.grad = sum(weight * part for (weight, _), part in zip(gradients, parts, strict=True))
        else:
            workers.exchange(gradients, densities[step], step)
        optimizer.step()
        if (step + 1) % EVERY == 0:
            with torch.no_grad():
                losses = nn.functional.cross_entropy(net(x), y, reduction="none")
            found.append([float(part.mean()) for part in (losses[:-KEPT_OUT], losses[-KEPT_OUT:])])
    return found


def mean_and_interval(logs):
    """Geometric mean of ratios, and the ends of its 95 % interval, from their logarithms."""
    wide = student.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan
    return [math.exp(value) for value in (logs.mean(), logs.mean() - wide, logs.mean() + wide)]


def rows_of(kind, losses, dense, marks):
    """A row for each mark, from losses of shape ``(seeds, looks, 2)``."""
    logs = np.log(np.array(losses) / np.array(dense))
    for mark in marks:
        end = mark // EVERY
        row = {"kind": kind, "steps": mark, "seeds": len(logs)}
        spans = {"over_dense": (end - 1, 0), "tenth": (end - max(mark // 10 // EVERY, 1), 0)}
        spans["kept_out"] = (spans["tenth"][0], 1)
        for name, (begin, which) in spans.items():
            ratios = logs[:, begin:end, which].mean(axis=1)
            row |= dict(zip((name, f"{name}_low", f"{name}_high"), mean_and_interval(ratios), strict=True))
            row[f"{name}_most"] = math.exp(ratios.max())
        row["spikes"] = float((logs[:, :end, 0] > math.log(1.3)).mean())
        yield row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=MARKS[-1])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--kinds", nargs="+", choices=KINDS[1:], default=KINDS[1:])
    parser.add_argument("--processes", type=int, default=2, help="trainings at a time")
    parser.add_argument("--quick", action="store_true", help="few steps, to see that it works")
    parser.add_argument("--json", type=Path, default=HERE / "results" / "replay.json", help="where the results go")
    args = parser.parse_args()
    steps, seeds = (20, 1) if args.quick else (args.steps, args.seeds)
    marks = [mark for mark in MARKS if mark <= steps] or [steps]
    losses, rows = {}, []
    with multiprocessing.get_context("spawn").Pool(min(args.processes, seeds)) as pool:
        for kind in (DENSE, *args.kinds):
            losses[kind] = pool.starmap(trained, [(kind, seed, steps) for seed in range(seeds)], chunksize=1)
            if kind != DENSE:
                rows += rows_of(kind, losses[kind], losses[DENSE], marks)
                write_table(rows, args.json, "digits, two workers: loss over that of dense sums after the same samples")


if __name__ == "__main__":
    main()
