"""Cost of compression on CPU, one thread, as ratios to ``r.add_(g)`` of the same run, which no error feedback can beat.

Candidates take turns, and each row is the median over rounds of processor time. Beside ours stand the usual schemes:
top-k of single elements, a block sum with fresh temporaries, and the casts of the 16-bit hooks.
"""

import argparse
import os
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from hardware import write_table
from torch import nn

from lightning_hetero.compression import BlockEncoder, Layout, MessageFormat
from lightning_hetero.compression.gradients import BlockGradient
from lightning_hetero.compression.selectors import SELECT, SelectorState
from lightning_hetero.optim import SparseSGD

torch.set_num_threads(1)
HERE = Path(__file__).parent


def timed(candidates, rounds):
    """Median seconds of processor time of each candidate, in turns, after one round that does not count."""
    seconds = {name: [] for name in candidates}
    for turn in range(rounds + 1):
        for name, function in candidates.items():
            begin = time.process_time()
            function()
            if turn:
                seconds[name].append(time.process_time() - begin)
    return {name: float(np.median(values)) for name, values in seconds.items()}


def compress_candidates(n, density, parameters):
    """Ours in each selector and type of values, and others, on a gradient of ``n`` elements."""
    g = torch.randn(n)
    r = torch.zeros(n)
    k = max(1, int(n / 16 * density))
    sizes = [(f"p{i}", n // parameters) for i in range(parameters)]

    def ours(selector, values):
        layout = Layout.of(sizes, 16)
        encoder = BlockEncoder(layout, MessageFormat(layout.num_blocks, k, 16, values), selector)
        message = torch.zeros(encoder.form.num_bytes, dtype=torch.uint8)

        def run():
            for i, slot in enumerate(layout.slots):
                encoder.accumulate(slot, g[i * slot.numel : (i + 1) * slot.numel], 0.5)
            encoder.encode(message, step=0)
            encoder.finish()

        return run

    def elements():
        r.add_(g)
        chosen = r.abs().topk(16 * k).indices
        r[chosen] = 0.0

    def naive():
        r.add_(g)
        blocks = r.view(-1, 16)
        chosen = blocks.abs().sum(1).topk(k).indices
        blocks[chosen] = 0.0

    def cast(dtype):
        return lambda: r.copy_(g.to(dtype).div_(2))

    return {
        "add_": lambda: r.add_(g),
        "ours, exact, bfloat16": ours("exact", "bfloat16"),
        "ours, exact, float32": ours("exact", "float32"),
        "ours, exact, int8": ours("exact", "int8"),
        "ours, histogram, bfloat16": ours("histogram", "bfloat16"),
        "ours, aimd, bfloat16": ours("aimd", "bfloat16"),
        "elements, topk": elements,
        "blocks, fresh temporaries, topk": naive,
        "fp16 cast": cast(torch.float16),
        "bf16 cast": cast(torch.bfloat16),
    }


def optimizer_candidates(n, density):
    """Dense and sparse momentum SGD on a gradient that touches a share of the blocks."""
    touched = torch.randperm(n // 16)[: max(1, int(n / 16 * density))].sort().values
    parameters = [nn.Parameter(torch.randn(n)) for _ in range(3)]
    for p in parameters:
        p.grad = torch.randn(n)
    dense = torch.optim.SGD(parameters[:1], lr=0.1, momentum=0.9)
    fused = torch.optim.SGD(parameters[1:2], lr=0.1, momentum=0.9, fused=True)
    sparse = SparseSGD(parameters[2:], lr=0.1, momentum=0.9)
    sparse.step()
    gradient = BlockGradient.of(parameters[2], touched, torch.randn(len(touched), 16))
    parameters[2].grad = gradient.grad
    sparse.sparse.follow(lambda: {parameters[2]: gradient}, 16)
    r, g = torch.zeros(n), torch.randn(n)
    return {"add_": lambda: r.add_(g), "SGD": dense.step, "SGD fused": fused.step, "SparseSGD": sparse.step}


def select_candidates(n, density):
    """Selectors on the scores of ``n`` elements, against torch's own."""
    scores = torch.randn(n // 16, 16).abs().sum(1)
    k = max(1, int(n / 16 * density))
    ours = {f"select {name}": (lambda f=f: f(scores.numpy(), k, SelectorState())) for name, f in SELECT.items()}
    return {"add_": lambda: scores.add_(0.0), "torch.topk": lambda: torch.topk(scores, k, sorted=False), **ours}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small, to see that it works")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", default=str(HERE / "results" / "compression.json"))
    args = parser.parse_args()
    sizes = [160_000] if args.quick else [10_000_000, 88_000_000]
    rows = []
    for n in sizes:
        for density in (0.01, 0.1):
            for what, candidates in (
                ("compress", compress_candidates(n, density, 10)),
                ("optimizer", optimizer_candidates(n, density)),
                ("select", select_candidates(n, density)),
            ):
                seconds = timed(candidates, args.rounds)
                for name, value in seconds.items():
                    ratio = value / seconds["add_"]
                    row = {"what": what, "elements": n, "density": density, "candidate": name}
                    rows.append({**row, "ms": 1e3 * value, "ratio": ratio if what != "select" else None})
    write_table(rows, args.out, "compression on one CPU thread, ratio to add_")


if __name__ == "__main__":
    main()
