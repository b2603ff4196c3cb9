"""Triton kernels of block top-k on a GPU: share of the copy bandwidth, against ``torch.topk`` and torch's hooks.

Of the hooks that is their arithmetic, without sums over ranks: two casts and a division for fp16; for PowerSGD the
products and the orthogonal basis (by QR) of one matrix for each parameter. Torch's own also start collectives and,
PowerSGD's, wait for the device.

First the kernels are checked natively: ``python -m pytest tests/kernels/interpreted.py``. Each row is the median of
rounds timed by CUDA events, candidates in turns; the bandwidth is that of ``copy_`` in the same run. ``--quick`` also
runs without a GPU, in the interpreter, where times say nothing.

The share is that of the bytes which have to move: 8 for the residual, read and written, the gradient once, 0.75 for the
scores, over the time, over the bandwidth of ``copy_``; for what comes after the exchange, 4 and the gradient once.
"""

import argparse
import math
import os
import sys
import time
from pathlib import Path

if "--quick" in sys.argv:  # before any kernel is imported
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from hardware import write_table
from torch import nn

from lightning_hetero.compression import Layout, MessageFormat
from lightning_hetero.compression.block_gradient import BlockMarks
from lightning_hetero.optim import SparseAdamW, SparseSGD

HERE = Path(__file__).parent
SIZES = (25_000_000, 88_000_000, 139_000_000, 1_000_000_000)
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
BUDGET = 0.8


def seconds_of(function):
    """Seconds of one call on the device."""
    if not ON_GPU:
        begin = time.perf_counter()
        function()
        return time.perf_counter() - begin
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def timed(candidates, rounds):
    """Median seconds of each candidate, in turns, after rounds that do not count."""
    warm = min(3, rounds)
    seconds = {name: [] for name in candidates}
    for turn in range(rounds + warm):
        for name, function in candidates.items():
            value = seconds_of(function)
            if turn >= warm:
                seconds[name].append(value)
    return {name: float(np.median(values)) for name, values in seconds.items()}


class Model:
    """``n`` elements in parameters of at most ``largest``, and one encoder for them."""

    def __init__(self, n, density, dtype, values, largest):
        from lightning_hetero.compression.triton_gpu.encoder import TritonEncoder

        count = -(-n // largest)
        self.layout = Layout.of([(f"p{i}", n // count) for i in range(count)], 16)
        self.k = max(1, int(self.layout.num_blocks * density))
        self.form = MessageFormat(self.layout.num_blocks, self.k, 16, values, self.layout.fingerprint())
        self.encoder = TritonEncoder(self.layout, self.form, DEVICE, 1)
        self.rows = torch.zeros(1, self.form.num_bytes, dtype=torch.uint8, device=DEVICE)
        self.source = [torch.randn(slot.numel, device=DEVICE, dtype=dtype) for slot in self.layout.slots]
        self.gradients = [gradient.clone() for gradient in self.source]
        self.step = 0

    def feed(self):
        for slot, gradient in zip(self.layout.slots, self.gradients, strict=True):
            self.encoder.accumulate(slot, gradient, 0.5)

    def encode(self):
        self.step += 1
        self.feed()
        self.encoder.encode(self.rows[0], step=self.step)

    def receive(self):
        """What comes after the exchange, on what was encoded last."""
        self.encoder.receive(self.rows, rank=0, step=self.step)
        for slot, gradient in zip(self.layout.slots, self.gradients, strict=True):
            self.encoder.deliver(slot, gradient, 0.5, scale=1.0, fill=0.0)
        self.encoder.finish()

    def renew(self):
        for gradient, source in zip(self.gradients, self.source, strict=True):
            gradient.copy_(source)


def compress_candidates(model):
    """Ours whole and in parts, and others."""
    encoder, flat = model.encoder, torch.zeros(model.layout.numel, device=DEVICE)
    wide = [torch.zeros_like(g, dtype=torch.float32) for g in model.gradients[:1]]
    side = math.isqrt(len(model.gradients[0]))
    matrix = wide[0][: side * side].view(side, side)
    q = torch.randn(side, 4, device=DEVICE)
    matrices = len(model.gradients)

    def cast():
        for gradient in model.gradients:
            gradient.copy_(gradient.to(torch.float16).div_(2))

    def powersgd():
        for gradient in model.gradients[:matrices]:
            matrix.add_(gradient[: side * side].view(side, side))
            p = torch.linalg.qr(matrix @ q).Q
            torch.mm(matrix.t(), p, out=q)
            matrix.sub_(p @ q.t())

    return {
        "copy": lambda: flat.copy_(encoder.residual),
        "ours, K1 to K3 with the header": model.encode,
        "ours, K1: error feedback and scores": model.feed,
        "ours, after the exchange": model.receive,
        "renew": model.renew,
        "torch.topk of blocks": lambda: torch.topk(encoder.scores, model.k, sorted=False),
        "torch.topk of elements": lambda: torch.topk(encoder.residual.abs(), min(16 * model.k, 2**24), sorted=False),
        "fp16 cast": cast,
        "PowerSGD, rank 4": powersgd,
    }


def optimizer_candidates(n, density):
    """Dense and sparse steps on one parameter, and K4 in them."""
    blocks = n // 16
    marks = torch.rand(blocks, device=DEVICE) < density
    flat, shared = torch.zeros(16 * blocks, device=DEVICE), torch.zeros(16 * blocks, device=DEVICE)
    gradient = torch.randn(16 * blocks, device=DEVICE)
    found = {"copy": lambda: flat.copy_(shared)}
    for name, kind, settings in (
        ("SGD fused", torch.optim.SGD, {"momentum": 0.9, "fused": True}),
        ("AdamW fused", torch.optim.AdamW, {"fused": True}),
        ("SparseSGD", SparseSGD, {"momentum": 0.9}),
        ("SparseAdamW", SparseAdamW, {}),
    ):
        p = nn.Parameter(shared)
        p.grad = gradient
        optimizer = kind([p], lr=1e-4, **settings)
        optimizer.step()
        if kind in (SparseSGD, SparseAdamW):
            optimizer.sparse.follow(lambda p=p: {p: BlockMarks(marks, p.grad)}, 16)
        found[name] = optimizer.step
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small size, to see that it works")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--largest", type=int, default=25_000_000, help="elements of the largest parameter")
    parser.add_argument("--out", default=str(HERE / "results" / "kernels.json"))
    args = parser.parse_args()
    if not (ON_GPU or args.quick):
        sys.exit("this benchmark needs a GPU, or --quick; benchmarks/compression.py has the figures of the CPU path")
    sizes = SIZES if not args.quick else (1_000_000 if ON_GPU else 20_000,)
    rounds, rows = (args.rounds if not args.quick else 1), []
    kinds = (
        (torch.float32, "bfloat16"),
        (torch.bfloat16, "bfloat16"),
        (torch.float16, "int8"),
        (torch.float32, "int8"),
    )
    for n in sizes:
        for dtype, values in kinds[: None if ON_GPU else 2]:
            model = Model(n, args.density, dtype, values, args.largest)
            seconds = timed(compress_candidates(model), rounds)
            outcome = model.encoder.outcome()
            if outcome is None or outcome.dropped:
                sys.exit("the messages of this benchmark were not merged: check the kernels natively first")
            bandwidth, size = 8 * model.layout.numel / seconds["copy"], torch.empty(0, dtype=dtype).element_size()
            due = {"ours, K1 to K3 with the header": 8.75 + size, "ours, K1: error feedback and scores": 8.25 + size}
            due["ours, after the exchange"] = 4.0 + size
            for name, value in seconds.items():
                if name == "renew":
                    continue
                row = {"what": "compress", "elements": n, "gradient": str(dtype), "values": values, "candidate": name}
                row |= {"us": 1e6 * value, "GB/s of copy": bandwidth / 1e9}
                share = model.layout.numel * due[name] / value / bandwidth if name in due else None
                holds = share >= BUDGET if name.startswith("ours, K1 to K3") and n >= 88_000_000 else None
                rows.append({**row, "share of copy": share, "limit": None if holds is None else BUDGET, "holds": holds})
            del model
            if ON_GPU:
                torch.cuda.empty_cache()
        seconds = timed(optimizer_candidates(n, args.density), rounds)
        for name, value in seconds.items():
            row = {"what": "optimizer", "elements": n, "gradient": "torch.float32", "values": "", "candidate": name}
            rows.append({**row, "us": 1e6 * value})
    title = "block top-k kernels on a GPU" if ON_GPU else "block top-k kernels, interpreted: no times"
    write_table(rows, args.out, title)


if __name__ == "__main__":
    main()
