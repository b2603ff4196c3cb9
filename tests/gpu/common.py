"""What the checks share: ranks on a device, work of known time, a language model, and the clock of a training."""

import os
import time
from collections import deque
from contextlib import contextmanager
from functools import cache

import lightning as L
import torch
from torch import nn
from torch.nn import functional

from tests.ranks import run_ranks

CPU = torch.device("cpu")
CALIBRATION = 20_000_000


def ranks(function, world_size, *args, timeout=90.0):
    """Results of ``function(rank, *args)`` in forked processes: the one that forks them has not used the GPU."""
    return run_ranks(function, world_size, *args, timeout=timeout, start="fork")


def place(rank, world_size, device):
    """Make this process a machine of one device, so that several can share one GPU; for a trainer of Lightning."""
    os.environ.update(LOCAL_RANK="0", NODE_RANK=str(rank), NCCL_MULTI_RANK_GPU_ENABLE="1")
    kind = "gpu" if device.type == "cuda" else "cpu"
    return {"accelerator": kind, "devices": 1, "num_nodes": world_size}


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


@cache
def cycles_per_second():
    """What ``torch.cuda._sleep`` counts in a second, on a GPU that has come up to speed; the median of some."""
    for _ in range(20):  # the clock of an idle GPU is low
        torch.cuda._sleep(CALIBRATION)
    found = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.cuda._sleep(CALIBRATION)
        end.record()
        torch.cuda.synchronize()
        found.append(CALIBRATION / (begin.elapsed_time(end) * 1e-3))
    return sorted(found)[3]


def busy(device, seconds):
    """Keep a device busy without arithmetic: a GPU behind the host's back, a CPU by sleeping."""
    if seconds <= 0:
        return
    if device.type == "cuda":
        torch.cuda._sleep(int(seconds * cycles_per_second()))
    else:
        time.sleep(seconds)


class Busy(torch.autograd.Function):
    """The identity, which keeps a device busy for the given seconds forwards and twice as long backwards."""

    @staticmethod
    def forward(ctx, x, device, seconds):
        ctx.given = device, 2 * seconds
        busy(device, seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        busy(*ctx.given)
        return gradient, None, None


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        parts = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.between(x)), approximate="tanh"))


class GPT(L.LightningModule):
    """GPT-2 with tied embeddings, 124 M parameters by default."""

    SMALL = {"width": 32, "layers": 2, "heads": 2, "vocabulary": 128, "context": 16}

    def __init__(self, width=768, layers=12, heads=12, vocabulary=50257, context=1024):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    @classmethod
    def on(cls, device):
        """The model for a device, made there: a CPU gets a tiny one."""
        with device:
            return cls(**(cls.SMALL if device.type == "cpu" else {}))

    def training_step(self, batch, batch_idx):
        (tokens,) = batch
        x = self.tokens(tokens[:, :-1]) + self.places(torch.arange(tokens.shape[1] - 1, device=tokens.device))
        logits = self.norm(self.blocks(x)) @ self.tokens.weight.t()
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-5)

    def batches(self, size, length, count):
        """A loader of random tokens."""
        length = min(length, self.places.num_embeddings)
        rows = torch.randint(self.tokens.num_embeddings, (size * count, length + 1))
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), size)


class Clock(L.Callback):
    """Wall clock of the steps between two; the host is at most ``lead`` steps ahead of the device, if given.

    Attributes:
        seconds: mean of those steps.
        host: seconds of each, as the host sees them.
    """

    def __init__(self, device, first, last, lead=None):
        self.device, self.first, self.last, self.lead = device, first, last, lead
        self.steps, self.seconds, self.host = 0, 0.0, []
        self._queue, self._begin, self._before = deque(), 0.0, 0.0

    def on_train_batch_end(self, *_):
        self.steps += 1
        if self.device.type == "cuda" and self.lead is not None:
            self._queue.append(torch.cuda.Event())
            self._queue[-1].record()
            if len(self._queue) > self.lead:
                self._queue.popleft().synchronize()
        if self.steps in (self.first, self.last):
            synchronize(self.device)
        now = time.perf_counter()
        if self.first < self.steps <= self.last:
            self.host.append(now - self._before)
        if self.steps == self.first:
            self._begin = now
        if self.steps == self.last:
            self.seconds = (now - self._begin) / (self.last - self.first)
        self._before = now


def median(values):
    """The upper of the middle ones."""
    return sorted(values)[len(values) // 2]


@contextmanager
def noted(figures, name):
    """Let a part of a check fail by itself, so that the others have something to say."""
    try:
        yield
    except Exception as error:
        print(name, error, flush=True)
        figures.must(False, f"{name}: {type(error).__name__}: {str(error).strip().rpartition(chr(10))[2]}")
