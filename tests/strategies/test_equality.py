"""Kinds of modules that are split: the gradients of one process of stock Lightning on the same global batches.

Splits, accumulation, losses and clipping: ``test_weights_equal_one_process`` in ``tests/test_front_ends.py``.
"""

import numpy as np
import pytest
import torch
from torch import nn

from tests.helpers import Points, Regressor, fit, run_ranks

EXACT = {"rtol": 1e-12, "atol": 1e-13}
SAMPLES = 73  # a prime number: the last batch is ragged


def one_process(total, **kwargs):
    """The reference: stock Lightning on the same global batches, in the order that DDP's sampler takes."""
    return run_ranks(_reference, 1, total, kwargs)[0]


def _reference(rank, total, kwargs):
    return fit(rank, "ddp", 1, total, **{"dataset": Points(SAMPLES), **kwargs})


def _hetero(rank, sizes, kwargs):
    strategy = {"local_batch_sizes": sizes, **kwargs.pop("strategy", {})}
    return fit(rank, strategy, len(sizes), sum(sizes) // len(sizes), **{"dataset": Points(SAMPLES), **kwargs})


def check(sizes, reference, **kwargs):
    results = run_ranks(_hetero, len(sizes), sizes, kwargs)
    for result in results:
        assert result["steps"] == reference["steps"]
        np.testing.assert_allclose(result["grads"], reference["grads"], **EXACT)
        np.testing.assert_allclose(result["weights"], reference["weights"], **EXACT)
    for epoch in range(2):
        seen = sorted(i for r in results for e, _, indices in r["seen"] if e == epoch for i in indices)
        assert seen == list(range(SAMPLES))


class Manual(Regressor):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.on_before_optimizer_step(optimizer)
        optimizer.step()


class InClosure(Manual):
    """The form in which Lightning shows a closure."""

    def training_step(self, batch, batch_idx):
        Regressor.training_step(self, batch, batch_idx)
        optimizer = self.optimizers()

        def closure():
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            self.on_before_optimizer_step(optimizer)
            return loss

        optimizer.step(closure=closure)


class TwoOptimizers(Manual):
    def training_step(self, batch, batch_idx):
        Regressor.training_step(self, batch, batch_idx)
        first, second = self.optimizers()
        for optimizer in (first, second):
            optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        first.step()
        second.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.net[i].parameters(), lr=0.05) for i in (0, 2)]


class Unused(Regressor):
    """A branch that takes no part in the even batches of an epoch."""

    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(5, 1, dtype=torch.float64)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + self.extra(batch[0]).square().mean() if batch_idx % 2 else loss

    def on_before_optimizer_step(self, optimizer):
        self.grads.append(torch.cat([p.grad.detach().flatten().clone() for p in self.net.parameters()]))


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        total = tensor.clone()
        torch.distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return SumOverRanks.forward(ctx, gradient)


class AcrossRanks(Regressor):
    """Subtracts the global mean of the outputs: an operation that crosses ranks inside the model."""

    def loss(self, batch):
        x, y, _ = batch
        out = self(x)
        total, count = out.sum().reshape(1), torch.tensor([float(len(x))], dtype=out.dtype)
        if self.trainer.strategy.engine.own_size == 0:
            total, count = total * 0, count * 0
        stacked = SumOverRanks.apply(torch.cat([total, count]))
        return nn.functional.mse_loss(out - stacked[0] / stacked[1], y)


class AcrossOne(Regressor):
    def loss(self, batch):
        x, y, _ = batch
        out = self(x)
        return nn.functional.mse_loss(out - out.mean(), y)


@pytest.mark.parametrize(
    ("model", "reference", "strategy"),
    [
        (Manual, Manual, {}),
        (InClosure, InClosure, {}),
        (TwoOptimizers, TwoOptimizers, {}),
        (Unused, Unused, {"find_unused_parameters": True}),
        (Regressor, Regressor, {"static_graph": True}),
        (Regressor, Regressor, {"gradient_as_bucket_view": True}),
        (AcrossRanks, AcrossOne, {}),
    ],
    ids=["manual", "closure", "two-optimizers", "unused", "static-graph", "bucket-view", "cross-rank"],
)
def test_module_kinds(model, reference, strategy):
    expected = run_ranks(_unused_reference, 1)[0] if model is Unused else one_process(10, model=reference())
    check((7, 2, 1), expected, model=model(), strategy=strategy)


def _unused_reference(rank):
    return fit(rank, "ddp_find_unused_parameters_true", 1, 10, model=Unused(), dataset=Points(SAMPLES))


def test_bf16_mixed_is_close():
    kwargs = {
        "precision": "bf16-mixed",
        "model": Regressor(dtype=torch.float32),
        "dataset": Points(SAMPLES, dtype=torch.float32),
    }
    reference = one_process(10, **kwargs)
    results = run_ranks(_hetero, 3, (7, 2, 1), kwargs)
    for result in results:
        np.testing.assert_allclose(result["weights"], reference["weights"], rtol=0.05, atol=5e-3)


def test_direct_backward_is_refused():
    errors = run_ranks(_hetero, 2, (3, 1), {"model": Direct()}, expect_errors=True)
    assert [rank for rank, *_ in errors] == [0, 1]
    assert all("manual_backward" in message for *_, message in errors)


class Direct(Manual):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.loss(batch).backward()
        optimizer.step()
