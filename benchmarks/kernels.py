"""Triton kernels of block top-k on a GPU: share of the copy bandwidth, against ``torch.topk`` and the 16-bit cast.

Needs a GPU. First the kernels are checked natively: ``python -m pytest tests/compression/interpreted.py``. Each row is
the median of rounds timed by CUDA events, candidates in turns; the bandwidth is that of ``copy_`` in the same run.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from hardware import write_table

from lightning_hetero.compression import Layout, MessageFormat

HERE = Path(__file__).parent
SIZES = (25_000_000, 88_000_000, 139_000_000, 1_000_000_000)


def timed(candidates, rounds):
    """Median seconds of each candidate on the device, in turns, after three rounds that do not count."""
    seconds = {name: [] for name in candidates}
    for turn in range(rounds + 3):
        for name, function in candidates.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            function()
            end.record()
            torch.cuda.synchronize()
            if turn >= 3:
                seconds[name].append(begin.elapsed_time(end) / 1e3)
    return {name: float(np.median(values)) for name, values in seconds.items()}


def candidates_of(n, density, dtype, values, largest):
    """Ours whole and in parts, and others. A model of ``n`` elements in parameters of at most ``largest``."""
    from lightning_hetero.compression.triton_encoder import TritonEncoder

    device = torch.device("cuda")
    count = -(-n // largest)
    layout = Layout.of([(f"p{i}", n // count) for i in range(count)], 16)
    k = max(1, int(layout.num_blocks * density))
    form = MessageFormat(layout.num_blocks, k, 16, values)
    encoder = TritonEncoder(layout, form, device)
    message = torch.zeros(form.num_bytes, dtype=torch.uint8, device=device)
    gradients = [torch.randn(slot.numel, device=device, dtype=dtype) for slot in layout.slots]
    flat = torch.zeros(layout.numel, device=device)

    def feed():
        for slot, gradient in zip(layout.slots, gradients, strict=True):
            encoder.accumulate(slot, gradient, 0.5)

    def whole():
        feed()
        encoder.encode(message, step=0)
        encoder.finish()

    def cast():
        for gradient in gradients:
            gradient.copy_(gradient.to(torch.bfloat16).div_(2))

    return {
        "copy": lambda: flat.copy_(encoder.residual),
        "ours, whole": whole,
        "ours, error feedback and scores": feed,
        "torch.topk of blocks": lambda: torch.topk(encoder.scores, k, sorted=False),
        "torch.topk of elements": lambda: torch.topk(encoder.residual.abs(), min(16 * k, 2**24), sorted=False),
        "bf16 cast": cast,
    }, layout


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small size, to see that it works")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--largest", type=int, default=25_000_000, help="elements of the largest parameter")
    parser.add_argument("--out", default=str(HERE / "results" / "kernels.json"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a GPU; benchmarks/compression.py has the figures of the CPU path")
    rows = []
    for n in (1_000_000,) if args.quick else SIZES:
        for dtype, values in ((torch.float32, "bfloat16"), (torch.bfloat16, "bfloat16"), (torch.float32, "int8")):
            candidates, layout = candidates_of(n, 0.01, dtype, values, args.largest)
            seconds = timed(candidates, args.rounds)
            bandwidth = 8 * layout.numel / seconds["copy"]
            due = layout.numel * (8.75 + torch.empty(0, dtype=dtype).element_size())
            for name, value in seconds.items():
                row = {"elements": n, "gradient": str(dtype), "values": values, "candidate": name, "us": 1e6 * value}
                share = due / value / bandwidth if name == "ours, whole" else None
                rows.append({**row, "GB/s of copy": bandwidth / 1e9, "share of copy": share})
            del candidates
            torch.cuda.empty_cache()
    write_table(rows, args.out, "block top-k kernels on a GPU")


if __name__ == "__main__":
    main()
