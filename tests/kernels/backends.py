"""Encoders of every backend behind one interface, and the plain definition of what they compute.

The tests that use them run twice: with torch's operations and Numba's loops, and, in the process that
`test_triton.py` starts for `interpreted.py`, with Triton's kernels. There `KERNELS=triton` is set before this is
imported.
"""

import os
from importlib.util import find_spec

import numpy as np
import torch

from lightning_hetero.compression import Layout, MessageFormat, TorchEncoder
from lightning_hetero.compression.layout import split

TRITON = os.environ.get("KERNELS") == "triton"
DEVICE = torch.device("cuda" if TRITON and os.environ.get("TRITON_INTERPRET") != "1" else "cpu")
HOSTS = [("torch", "exact"), ("torch", "histogram")]
if find_spec("numba"):
    HOSTS += [("numba", "exact"), ("numba", "histogram")]
BACKENDS = [("triton", "histogram")] if TRITON else HOSTS
VALUES = ("float32", "bfloat16", "int8")


def encoder(backend, sizes, density, *, block=16, values="float32", world_size=1, **more):
    """An encoder for parameters of these sizes, and a row for the message of each rank."""
    kind, selector = backend
    layout = Layout.of([(f"p{i}", n) for i, n in enumerate(sizes)], block)
    form = MessageFormat(
        layout.num_blocks, max(1, int(layout.num_blocks * density)), block, values, layout.fingerprint()
    )
    if kind == "triton":
        from lightning_hetero.compression.triton_gpu.encoder import TritonEncoder

        made = TritonEncoder(layout, form, DEVICE, world_size)
    elif kind == "numba":
        from lightning_hetero.compression.numba_jit.encoder import NumbaEncoder

        made = NumbaEncoder(layout, form, selector, **more)
    else:
        made = TorchEncoder(layout, form, selector, **more)
    return made, torch.zeros(world_size, form.num_bytes, dtype=torch.uint8, device=DEVICE)


def draw(sizes, dtype, seed, *, whole=False, scale=1.0):
    """Gradients; whole numbers have the same sums in any order."""
    generator = torch.Generator().manual_seed(seed)
    if whole:
        return [torch.randint(-40, 40, (n,), generator=generator).to(dtype) for n in sizes]
    return [(scale * torch.randn(n, generator=generator)).to(dtype) for n in sizes]


def flat_of(layout, gradients):
    flat = torch.zeros(layout.numel, dtype=torch.promote_types(gradients[0].dtype, torch.float32))
    for slot, gradient in zip(layout.slots, gradients, strict=True):
        flat[slot.start : slot.start + slot.numel] = gradient
    return flat


class Step:
    """One step of a rank: gradients in two buckets, the last parameters first, as DDP hands them over.

    Attributes:
        finite: what the encoder says of the gradients.
        gradients: what stands in their places, in the order of the parameters; a device writes the sum there.
    """

    def __init__(self, enc, gradients, weight, *, hold=False):
        slots, half = enc.layout.slots, len(gradients) // 2
        self.enc, self.weight, self.buckets, self.finite = enc, weight, [], True
        for part in (slice(half, None), slice(0, half)):
            # one element further on than memory begins, as behind a parameter of odd size
            flat = torch.cat([gradients[0].new_zeros(1), *gradients[part]])[1:].to(DEVICE)
            self.buckets.append((slots[part], flat))
            self.finite &= enc.accumulate_bucket(slots[part], flat, weight, hold=hold)

    @property
    def gradients(self):
        return [part.cpu() for slots, flat in reversed(self.buckets) for _, part in split(flat, slots)]

    def send(self, message, *, step, rank=0):
        write = self.enc.encode if self.finite else self.enc.give_up
        write(message, step=step, rank=rank)

    def receive(self, rows, *, step, rank=0, fill=0.0):
        """Whether the step is left out, the sum, and the number of blocks in all messages."""
        enc = self.enc
        if enc.deferred:
            enc.receive(rows, rank=rank, step=step)
            merged, touched = enc.merged.cpu().clone(), int(enc.touched.sum())
            for slots, flat in self.buckets:
                enc.deliver_bucket(slots, flat, self.weight, scale=2.0, fill=fill)
            enc.finish()
            assert touched == int((merged.view(-1, enc.layout.block) != 0).any(1).sum())
            assert not enc.merged.any()
            outcome = enc.outcome()
            assert outcome.step == step
            assert enc.outcome() is None, "told once"
            return outcome.dropped, merged, outcome.blocks
        packs = enc.read(rows, step=step)
        enc.undo() if packs is None else enc.merge(packs)
        merged = enc.merged.clone()
        enc.finish()
        assert not enc.merged.any()
        return packs is None, merged, 0 if packs is None else sum(len(pack.indices) for pack in packs)


# the definition


def decoded(blocks, values):
    """What receivers read of blocks: rounded, and never infinite."""
    if values == "float32":
        return blocks.float()
    if values == "bfloat16":
        return blocks.clamp(*(sign * torch.finfo(torch.bfloat16).max for sign in (-1, 1))).bfloat16().float()
    scale = (blocks.abs().amax(1, keepdim=True) / 127).bfloat16().float()
    whole = (blocks / torch.where(scale > 0, scale, 1.0)).round().clamp(-127, 127)
    return torch.where(scale > 0, whole * scale, 0.0).float()


def largest(scores, k, selector):
    """Blocks of the largest scores above 0; by histogram, an even share of those whose upper 16 bits are the k-th's."""
    if selector == "exact":
        order = np.argsort(-scores, kind="stable")[:k]
        return np.sort(order[scores[order] > 0])
    keys = scores.astype(np.float32).view(np.uint32) >> 16
    edge = np.sort(keys)[::-1][k - 1] if k else 0
    sure, fill = np.flatnonzero(keys > edge), np.flatnonzero((keys == edge) & (scores > 0))
    quota, count = k - len(sure), max(len(fill), 1)
    some = [i for j, i in enumerate(fill) if (j + 1) * quota // count > j * quota // count or count <= quota]
    return np.sort(np.concatenate([sure, np.array(some, dtype=np.int64)]))


class Definition:
    """Block top-k with error feedback: ``r += w g``, send the k largest blocks, ``r -= sent``."""

    def __init__(self, form, selector, numel, dtype=torch.float32):
        self.form, self.selector, self.residual = form, selector, torch.zeros(numel, dtype=dtype)

    def step(self, flat, weight):
        self.residual.add_(flat, alpha=weight)
        blocks = self.residual.view(-1, self.form.block)
        chosen = largest(blocks.abs().sum(1).numpy(), min(self.form.k, len(blocks)), self.selector)
        sent = decoded(blocks[chosen], self.form.value_dtype)
        blocks[chosen] -= sent.to(blocks.dtype)
        return chosen, sent


def total(form, packs, numel):
    """The sum of what ranks sent, in their order."""
    merged = torch.zeros(numel).view(-1, form.block)
    for chosen, sent in packs:
        merged[chosen] += sent
    return merged.view(-1)
