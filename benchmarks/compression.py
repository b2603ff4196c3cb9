"""Cost of compression on CPU, one thread, as ratios to ``r.add_(g)`` of the same run, which no error feedback can beat.

Candidates take turns; each figure is the median over rounds of processor time. Beside ours stand the usual schemes:
top-k of single elements, block sums with fresh temporaries, 16-bit casts, PowerSGD's products. What it measures:

==============  =====================================================================================================
``compress``    error feedback, scores, selection, packing
``select``      selection alone, on the scores; gathering and clearing the selected rows
``optimizer``   one step, dense and sparse
``merge``       what the receiver does with one message, against clearing a dense gradient
``controller``  share of the exact top-k's mass that a selector takes, over 300 steps of a drifting problem
``exchange``    messages of 1 to 16 MB between two processes by gloo, wall time, ratio to asynchronous broadcasts
``budget``      the figures above that have a limit: the limit, what was measured, and whether it holds
==============  =====================================================================================================
"""

import argparse
import gc
import math
import os
import resource
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("NUMBA_NUM_THREADS", "1")

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hardware import write_table
from torch import nn

from lightning_hetero.comm.collectives.async_ops import async_all_gather
from lightning_hetero.compression import Layout, MessageFormat, Pack, TorchEncoder
from lightning_hetero.compression.block_gradient import BlockGradient, GradientParts
from lightning_hetero.compression.host import encoder
from lightning_hetero.compression.layout import put_rows, take_rows
from lightning_hetero.compression.selectors import SELECT, SelectorState
from lightning_hetero.optim import SparseAdamW, SparseSGD

try:
    from numba import njit

    from lightning_hetero.compression.numba_jit.encoder import NumbaEncoder

    @njit(nogil=True)
    def count_upper_bits(keys, counts):
        """Histogram of float32 scores above 0, whose bits are in their order."""
        counts[:] = 0
        for key in keys:
            counts[key >> 16] += 1
except ImportError:  # without the extra
    NumbaEncoder = None

torch.set_num_threads(1)
HERE = Path(__file__).parent
PARAMETERS = 10


def timed(candidates, rounds, clock=time.process_time):
    """Median seconds of each candidate, in turns, after one round that does not count."""
    seconds = {name: [] for name in candidates}
    for turn in range(rounds + 1):
        for name, function in candidates.items():
            begin = clock()
            function()
            if turn:
                seconds[name].append(clock() - begin)
    return {name: float(np.median(values)) for name, values in seconds.items()}


# compression


def ours(encoder_class, g, density, selector="exact", values="bfloat16"):
    """One step of an encoder, without the exchange."""
    size = len(g) // PARAMETERS // 16 * 16
    layout = Layout.of([(f"p{i}", size) for i in range(PARAMETERS)], 16)
    k = max(1, int(layout.num_blocks * density))
    made = encoder_class(layout, MessageFormat(layout.num_blocks, k, 16, values, layout.fingerprint()), selector)
    message = torch.zeros(made.form.num_bytes, dtype=torch.uint8)

    def run():
        for i, slot in enumerate(layout.slots):
            made.accumulate(slot, g[i * size : (i + 1) * size], 0.5)
        made.encode(message, step=0)
        made.finish()

    return run


def powersgd(g, rank=4):
    """Torch's PowerSGD without its sums: error feedback, two products, an orthogonal basis, the product back."""
    side = math.isqrt(len(g))
    matrix = g[: side * side].view(side, side)
    error, q = torch.zeros_like(matrix), torch.randn(side, rank)

    def run():
        error.add_(matrix)
        p = torch.linalg.qr(error @ q).Q
        torch.mm(error.t(), p, out=q)
        error.sub_(p @ q.t())

    return run


def compress_candidates(n, density):
    """Ours in each selector and type of values, and others, on a gradient of ``n`` elements."""
    g, r = torch.randn(n), torch.zeros(n)
    blocks, k = r.view(-1, 16), max(1, n // 16 * round(1000 * density) // 1000)

    def elements():
        r.add_(g)
        r[r.abs().topk(16 * k).indices] = 0.0

    def threshold():
        r.add_(g)
        chosen = (r.abs() >= 2.576 + 0.5).nonzero().view(-1)
        r[chosen] = 0.0

    def scores(take):
        def run():
            r.add_(g)
            blocks[take().topk(k).indices] = 0.0

        return run

    found = {
        "add_": lambda: r.add_(g),
        "copy_": lambda: r.copy_(g),
        "ours, exact, bfloat16": ours(TorchEncoder, g, density),
        "ours, exact, float32": ours(TorchEncoder, g, density, values="float32"),
        "ours, exact, int8": ours(TorchEncoder, g, density, values="int8"),
        "ours, histogram, bfloat16": ours(TorchEncoder, g, density, "histogram"),
        "ours, sample, bfloat16": ours(TorchEncoder, g, density, "sample"),
        "ours, aimd, bfloat16": ours(TorchEncoder, g, density, "aimd"),
        "elements, topk": elements,
        "elements, threshold and nonzero": threshold,
        "blocks, fresh temporaries, topk": scores(lambda: blocks.abs().sum(1)),
        "blocks, vector_norm, topk": scores(lambda: torch.linalg.vector_norm(blocks, 1, dim=1)),
        "fp16 cast": lambda: r.copy_(g.to(torch.float16).div_(2)),
        "bf16 cast": lambda: r.copy_(g.to(torch.bfloat16).div_(2)),
        "PowerSGD, rank 4": powersgd(g),
    }
    if NumbaEncoder is not None:
        found["ours, numba, exact, bfloat16"] = ours(NumbaEncoder, g, density)
    return found


def whole_step(encoder_class, n, density):
    """Error feedback, selection, writing and reading a message, merging it both ways, and a sparse SGD step."""
    size = n // PARAMETERS // 16 * 16
    parameters = {f"p{i}": nn.Parameter(torch.randn(size)) for i in range(PARAMETERS)}
    layout = Layout.of([(name, size) for name in parameters], 16)
    k = max(1, int(layout.num_blocks * density))
    made = encoder_class(layout, MessageFormat(layout.num_blocks, k, 16, "bfloat16", layout.fingerprint()), "exact")
    message, gradient = torch.zeros(made.form.num_bytes, dtype=torch.uint8), torch.randn(size)
    encoder.NUMBA_MIN_ELEMENTS = math.inf if encoder_class is TorchEncoder else 0
    optimizer, blocks = SparseSGD(parameters.values(), lr=1e-4, momentum=0.9), {}
    for p in parameters.values():
        p.grad = gradient
    optimizer.step()
    optimizer.sparse.follow(lambda: blocks, 16)
    parts = GradientParts({parameters[slot.name]: slot for slot in layout.slots}, layout.block)

    def run():
        for slot in layout.slots:
            made.accumulate(slot, gradient, 0.5)
        made.encode(message, step=0)
        packs = made.read(message[None], step=0)
        made.merge(packs)
        blocks.clear()
        blocks.update(parts.of(made.merge_sparse(packs)))
        for p, its in blocks.items():
            p.grad = its.grad
        optimizer.step()
        made.finish()

    return run


def fresh_memory(encoder_class, n, density, steps=3):
    """MB of memory that a whole step of ours takes anew from the system, once it has run."""
    run = whole_step(encoder_class, n, density)
    for _ in range(3):
        run()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(steps):
        run()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize() / steps / 1e6


# after the exchange


def optimizer_candidates(n, density):
    """Dense and sparse steps on a gradient that touches a share of the blocks."""
    touched = torch.randperm(n // 16)[: max(1, int(n // 16 * density))].sort().values
    r, g = torch.zeros(n), torch.randn(n)
    shared = torch.randn(n)  # all work on one parameter's memory, each with a state of its own
    found = {"add_": lambda: r.add_(g)}
    numba = [("SparseSGD, numba", SparseSGD, {"momentum": 0.9}), ("SparseAdamW, numba", SparseAdamW, {})]
    for name, kind, settings in (
        ("SGD", torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
        ("SGD fused", torch.optim.SGD, {"momentum": 0.9, "fused": True}),
        ("AdamW fused", torch.optim.AdamW, {"fused": True}),
        ("SparseSGD", SparseSGD, {"momentum": 0.9}),
        ("SparseAdamW", SparseAdamW, {}),
        *(numba if NumbaEncoder is not None else ()),
    ):
        encoder.NUMBA_MIN_ELEMENTS = 0 if "numba" in name else math.inf
        p = nn.Parameter(shared)
        optimizer = kind([p], lr=1e-4, **settings)
        p.grad = g
        if kind in (SparseSGD, SparseAdamW):
            optimizer.step()
            gradient = BlockGradient.of(p, touched, torch.randn(len(touched), 16))
            p.grad = gradient.grad
            optimizer.sparse.follow(lambda p=p, gradient=gradient: {p: gradient}, 16)
        found[name] = optimizer.step
    m, where = torch.zeros(n), (touched[:, None] * 16 + torch.arange(16)).view(-1)
    values = torch.randn(len(where))

    def elements():
        part = m[where].mul_(0.9).add_(values)
        m[where] = part
        shared.index_add_(0, where, part, alpha=-1e-4)

    return {**found, "elements, torch": elements}


def merge_candidates(n, density):
    """One message into the sum, and clearing its blocks; a dense gradient has to be cleared whole."""
    layout = Layout.of([("p", n)], 16)
    k = max(1, int(layout.num_blocks * density))
    form = MessageFormat(layout.num_blocks, k, 16, "float32")
    pack = Pack(torch.randperm(layout.num_blocks)[:k].sort().values, torch.randn(k, 16))
    r, g = torch.zeros(n), torch.randn(n)
    where = (pack.indices[:, None] * 16 + torch.arange(16)).view(-1)

    def ours_merge(merger):
        def run():
            merger.merge([pack])
            merger.finish()

        return run

    found = {
        "add_": lambda: r.add_(g),
        "dense zero_": r.zero_,
        "index_add_ of blocks": lambda: r[: n // 16 * 16].view(-1, 16).index_add_(0, pack.indices, pack.values),
        "index_add_ of elements": lambda: r.index_add_(0, where, pack.values.view(-1)),
        "ours, merge and clear": ours_merge(TorchEncoder(layout, form)),
    }
    if NumbaEncoder is not None:
        found["ours, numba, merge and clear"] = ours_merge(NumbaEncoder(layout, form))
    return found


# selection


def select_candidates(n, density):
    """Selectors on the scores of ``n`` elements, against torch's and numpy's; and what follows, ``k`` rows moved."""
    scores = torch.randn(n // 16, 16).abs().sum(1)
    k = max(1, int(n / 16 * density))
    r, g = torch.zeros(n), torch.randn(n)
    blocks, rows, part = r[: n // 16 * 16].view(-1, 16), torch.randperm(n // 16)[:k].sort().values, torch.zeros(k, 16)
    found = {f"select {name}": (lambda f=f: f(scores.numpy(), k, SelectorState())) for name, f in SELECT.items()}
    if NumbaEncoder is not None:
        keys, counts = scores.numpy().view(np.uint32), np.zeros(2**16, np.int64)
        found["numba, histogram of the upper 16 bits"] = lambda: count_upper_bits(keys, counts)
    return {
        "add_": lambda: r.add_(g),
        "torch.topk": lambda: torch.topk(scores, k, sorted=False),
        "torch.kthvalue": lambda: torch.kthvalue(scores, len(scores) - k),
        "np.partition": lambda: np.partition(scores.numpy(), len(scores) - k),
        **found,
        "gather rows, index_select": lambda: torch.index_select(blocks, 0, rows, out=part),
        "gather rows, ours": lambda: take_rows(blocks, rows),
        "zero rows, index_fill_": lambda: blocks.index_fill_(0, rows, 0.0),
        "zero rows, ours": lambda: put_rows(blocks, rows, part),
    }


def proportional(scores, k, state):
    """Moves its threshold by the fourth root of how far the number of blocks above it was off."""
    state.threshold = state.threshold or float(np.partition(scores, len(scores) - k)[len(scores) - k])
    chosen = np.flatnonzero(scores >= state.threshold)
    state.threshold *= (max(1, len(chosen)) / k) ** 0.25
    return chosen[:k]


def controller_rows(steps, n=200_000, density=0.01):
    """Error feedback on noise with a constant mean of 0.3 deviations, layers of different scales, a sudden change.

    Half way, gradients become 10 times as small. ``n`` blocks are three times what a sample holds.
    """
    k, rng = int(n * density), np.random.default_rng(1)
    scale = rng.lognormal(sigma=0.7, size=25).astype(np.float32).repeat(n // 25)[:, None]
    mean = 0.3 * rng.standard_normal((n, 16), dtype=np.float32)
    kinds = {**SELECT, "proportional": proportional}
    states, residuals = (
        {name: SelectorState() for name in kinds},
        {name: np.zeros((n, 16), np.float32) for name in kinds},
    )
    mass, counts, halves = ({name: [] for name in kinds} for _ in range(3))
    for step in range(steps):
        gradient = (
            scale * (0.1 if step >= steps // 2 else 1.0) * (rng.standard_normal((n, 16), dtype=np.float32) + mean)
        )
        for name, select in kinds.items():
            residual = residuals[name]
            residual += gradient
            scores = np.abs(residual).sum(1)
            chosen = select(scores, k, states[name])
            mass[name].append(scores[chosen].sum() / np.partition(scores, n - k)[n - k :].sum())
            counts[name].append(len(chosen) / k)
            halves[name].append(np.mean(chosen < n // 2) if len(chosen) else np.nan)
            residual[chosen] = 0
    before, after = (slice(steps * a // 300, steps * b // 300) for a, b in ((50, 150), (170, 250)))
    return [
        {"what": "controller", "elements": 16 * n, "density": density, "candidate": name}
        | {"mass": float(np.mean(mass[name])), "least mass": min(mass[name])}
        | {"mass, 50-150": float(np.mean(mass[name][before])), "mass, 170-250": float(np.mean(mass[name][after]))}
        | {"count/k": float(np.median(counts[name])), "first half": float(np.nanmean(halves[name]))}
        for name in kinds
    ]


# exchange


def exchange_rank(rank, port, sizes, rounds, results):
    """Two ranks gather rows in three ways."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    for size in sizes:
        rows = torch.zeros(2, size, dtype=torch.uint8)

        def broadcasts(rows=rows):
            for work in [dist.broadcast(row, peer, async_op=True) for peer, row in enumerate(rows)]:
                work.wait()

        candidates = {
            "asynchronous broadcasts": broadcasts,
            "ours": lambda rows=rows: async_all_gather(rows, rank, range(len(rows))).wait(),
            "torch's all-gather": lambda rows=rows: dist.all_gather(list(rows), rows[rank].clone()),
        }
        seconds = timed(candidates, rounds, time.perf_counter)
        if rank == 0:
            results.append((size, seconds))
    dist.destroy_process_group()


def exchange_rows(sizes, rounds):
    with mp.Manager() as manager:
        results = manager.list()
        mp.spawn(exchange_rank, (29_873, sizes, rounds, results), nprocs=2)
        found = list(results)
    return [
        {"what": "exchange", "bytes": size, "candidate": name, "ms": 1e3 * value}
        | {"ratio": value / seconds["asynchronous broadcasts"]}
        for size, seconds in found
        for name, value in seconds.items()
    ]


# budgets


def budget_rows(rows, size, fresh):
    """What was promised of a model of ``size`` elements at 1 %, and what came out."""

    def ratio(what, candidate):
        found = [r["ratio"] for r in rows if (r["what"], r["candidate"]) == (what, candidate)]
        at = [r["ratio"] for r in rows if (r["what"], r["candidate"]) == (what, candidate)
              and (r.get("elements"), r.get("density")) == (size, 0.01)]  # fmt: skip
        return (max(found) if what == "exchange" else at[0]) if found else None

    def bytes_of(values):
        form = MessageFormat(size // 16, max(1, size // 1600), 16, values)
        return form.num_bytes / form.k

    least = min(r["least mass"] for r in rows if r["what"] == "controller" and r["candidate"] in ("exact", "histogram"))
    limits = [
        ("compress without numba, over add_", 3.0, ratio("compress", "ours, exact, bfloat16")),
        ("compress with numba, over add_", 1.4, ratio("compress", "ours, numba, exact, bfloat16")),
        ("sparse SGD without numba, over add_", 0.3, ratio("optimizer", "SparseSGD")),
        ("sparse SGD with numba, over add_", 0.08, ratio("optimizer", "SparseSGD, numba")),
        ("MB of fresh memory a step", 16.0, fresh),
        ("gloo exchange of 1 to 16 MB, over asynchronous broadcasts", 1.3, ratio("exchange", "ours")),
        ("bytes of a block in bfloat16", 36.0, bytes_of("bfloat16")),
        ("bytes of a block in int8", 20.1, bytes_of("int8")),  # 20 and a share of the header
    ]
    found = [(name, limit, value, None if value is None else value <= limit) for name, limit, value in limits]
    found.append(("least mass of exact and histogram, over exact top-k", 0.95, least, least >= 0.95))
    return [
        {"what": "budget", "elements": size, "density": 0.01, "candidate": name, "limit": limit, "measured": value}
        | {"holds": holds}
        for name, limit, value, holds in found
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small, to see that it works")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", type=int, nargs="+", default=[25_000_000, 88_000_000], metavar="ELEMENTS")
    parser.add_argument("--out", default=str(HERE / "results" / "compression.json"))
    args = parser.parse_args()
    sizes = [320_000] if args.quick else args.sizes
    makers = {
        "compress": compress_candidates,
        "select": select_candidates,
        "optimizer": optimizer_candidates,
        "merge": merge_candidates,
    }
    rows = []
    for n in sizes:
        for density in (0.01, 0.1):
            for what, maker in makers.items():
                candidates = maker(n, density)
                seconds = timed(candidates, args.rounds)
                for name, value in seconds.items():
                    row = {"what": what, "elements": n, "density": density, "candidate": name, "ms": 1e3 * value}
                    rows.append({**row, "ratio": value / seconds["add_"]})
                del candidates
                gc.collect()
    rows += controller_rows(30 if args.quick else 300)
    rows += exchange_rows([1_000_000] if args.quick else [1_000_000, 4_000_000, 16_000_000], 4 * args.rounds)
    encoders = [TorchEncoder] if NumbaEncoder is None else [TorchEncoder, NumbaEncoder]
    rows += budget_rows(rows, sizes[-1], max(fresh_memory(kind, sizes[-1], 0.01) for kind in encoders))
    write_table(rows, args.out, "compression on one CPU thread, ratio to add_")


if __name__ == "__main__":
    main()
