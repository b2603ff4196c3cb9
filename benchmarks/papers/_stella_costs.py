"""Processor time of compression and optimizer steps at the sizes of StellaTrain's models, in one thread."""

import gc
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from _stella_tables import ELEMENTS
from compression import NumbaEncoder, optimizer_candidates, ours, timed

from lightning_hetero.compression import TorchEncoder

PER_SIZE, DENSITIES = 0.01, (0.1, 0.01, 0.001)


def compressors(n, density):
    """Error feedback, selection and packing of a gradient: of blocks and of single elements."""
    g, r = torch.randn(n), torch.zeros(n)
    k = max(1, int(n * density))
    threshold = math.sqrt(2) * float(torch.erfinv(torch.tensor(1.0 - density)))

    def elements_topk():
        r.add_(g)
        r[r.abs().topk(k).indices] = 0.0

    def elements_threshold():  # the threshold is right from the start, so nothing is spent on following it
        r.copy_(g)
        r[(r.abs() >= threshold).nonzero().view(-1)] = 0.0

    found = {
        "add_": lambda: r.add_(g),
        "elements, topk": elements_topk,
        "elements, threshold": elements_threshold,
        "blocks, the paper's threshold": ours(TorchEncoder, g, density, "aimd"),
        "blocks, exact": ours(TorchEncoder, g, density),
    }
    if NumbaEncoder is not None:
        found["blocks, exact, numba"] = ours(NumbaEncoder, g, density)
    return found


def rows(sizes=ELEMENTS, rounds=3):
    """Compression at each size at 1 %; for ViT-B at other densities too, with optimizer steps."""
    found = []
    for model, elements in sizes.items():
        n = int(elements) // 160 * 160
        for density in DENSITIES if model == "ViT-B" else (PER_SIZE,):
            makers = {"compress": compressors, **({"optimizer": optimizer_candidates} if model == "ViT-B" else {})}
            for what, maker in makers.items():
                candidates = maker(n, density)
                seconds = timed(candidates, rounds)
                for name, value in seconds.items():
                    row = {"what": what, "model": model, "elements": n, "density": density, "candidate": name}
                    found.append({**row, "ms": 1e3 * value, "ratio": value / seconds["add_"]})
                del candidates
                gc.collect()
    return found
