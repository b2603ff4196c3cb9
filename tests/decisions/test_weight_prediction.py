"""Gradients at the weights that they will meet: by hand, resumed, and what is refused."""

from functools import partial

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn

from lightning_hetero import LookAheadCallback
from lightning_hetero.optim.weight_prediction import expected_move
from tests.helpers import Points, Regressor, collected, fit
from tests.ranks import RankError, run_ranks

SPLIT = {"local_batch_sizes": [7, 3], "replan": 10_000, "staleness": 1}
FIRST = 2  # step from which everything is delayed


class Delay(L.Callback):
    """Delays all gradients from a step on; keeps the weights that each forward pass had."""

    def __init__(self, begin=FIRST):
        self.begin, self.forward, self.after = begin, [], []

    def on_train_start(self, trainer, pl_module):
        late = trainer.strategy.engine.hook_state.staleness
        if late is not None:
            late.control_externally(True)

    def on_before_backward(self, trainer, pl_module, loss):
        self.forward.append(pl_module.flat().copy())

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.after.append(pl_module.flat().copy())
        late = trainer.strategy.engine.hook_state.staleness
        if late is not None and trainer.global_step == self.begin:
            late.make_all_stale()


class Saves(L.Callback):
    """Saves a checkpoint every five steps."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step % 5 == 0:
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


def _run(rank, strategy, kwargs):
    delay = Delay()
    callbacks = [delay, LookAheadCallback(kwargs.pop("gain", None)), *kwargs.pop("callbacks", [])]
    done = fit(rank, {**SPLIT, **strategy}, 2, 5, callbacks=callbacks, dataset=Points(60), **kwargs)
    return {**done, "forward": delay.forward, "after": delay.after}


def twice():
    return 2.0


def clip_norm(grads, limit):
    factor = min(1.0, limit / max(float(torch.stack([g.norm() for g in grads]).norm()), 1e-12))
    return [g * factor for g in grads]


def clip_value(grads, limit):
    return [g.clamp(-limit, limit) for g in grads]


CLIPS = {"norm": (clip_norm, 0.1), "value": (clip_value, 0.02), None: (lambda grads, _: grads, None)}


class Scaled(Regressor):
    """With a parameter without dimensions, as CLIP's ``logit_scale``, and one without elements."""

    def __init__(self, adamw=False):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
        self.empty = nn.Parameter(torch.zeros(0, dtype=torch.float64))
        self.adamw = adamw

    def forward(self, x):
        return self.net(x) * self.scale.exp() + self.empty.sum()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3) if self.adamw else super().configure_optimizers()

    def on_before_optimizer_step(self, optimizer):
        pass


@pytest.mark.parametrize(
    ("make", "gain", "clip"),
    [
        (Scaled, None, None),
        (partial(Scaled, adamw=True), None, None),
        (Regressor, twice, None),
        (Regressor, None, "norm"),
        (Regressor, None, "value"),
    ],
)
def test_forward_runs_at_the_foretold_weights_and_the_optimizer_at_the_true_ones(make, gain, clip):
    """By hand: two workers with 0.7 and 0.3 of a batch, each with its own part of the sum under way, twice at most."""
    (clips, limit), close = CLIPS[clip], {"rtol": 1e-4 if clip == "norm" else 1e-9, "atol": 1e-12}
    given = {"gradient_clip_val": limit, "gradient_clip_algorithm": clip} if clip else {}
    results = run_ranks(_run, 2, {}, {"max_epochs": 2, "gain": gain, "model": make(), **given})
    for mine, other in zip(results[0]["after"], results[1]["after"], strict=True):
        np.testing.assert_array_equal(mine, other)
    model, points = make(), Points(60)
    optimizer = model.configure_optimizers()
    own, owed = [None, None], None
    for step, parts in enumerate(zip(*(r["seen"] for r in results), strict=True)):
        true = [p.detach().clone() for p in model.parameters()]
        sums, grads = [torch.zeros_like(p) for p in true], []
        total = sum(len(indices) for _, _, indices in parts)
        for rank, (_, _, indices) in enumerate(parts):
            group, known = optimizer.param_groups[0], [None] * len(true)
            if own[rank] is not None:
                known = clips([g * min(1.0, 2 * len(indices) / total) for g in own[rank]], limit)
            for i, p in enumerate(model.parameters()):
                move = expected_move(optimizer, group, optimizer.state.get(p, {}), known[i]) if step >= FIRST else None
                p.data.copy_(true[i] if move is None else true[i] - (2.0 if gain else 1.0) * move)
            np.testing.assert_allclose(model.flat(), results[rank]["forward"][step], **close)
            loss = model.loss((points.x[indices], points.y[indices], None))
            grads.append(torch.autograd.grad(loss, list(model.parameters())))
            sums = [s + len(indices) / total * g for s, g in zip(sums, grads[-1], strict=True)]
        late = step >= FIRST
        given = sums if not late else [torch.zeros_like(s) for s in sums] if owed is None else owed
        owed, own = (sums, grads) if late else (None, [None, None])
        for p, value, g in zip(model.parameters(), true, clips(given, limit), strict=True):
            p.data.copy_(value)
            p.grad = g
        optimizer.step()
        np.testing.assert_allclose(model.flat(), results[0]["after"][step], **close)


def test_what_cannot_be_is_refused():
    with pytest.raises(TypeError, match="gain=3"):
        LookAheadCallback(3)
    with pytest.raises(RankError, match="LookAheadCallback"):
        run_ranks(_run, 2, {}, {"callbacks": [LookAheadCallback()]})


@pytest.mark.parametrize(
    "compression", [None, "block_topk(density=0.3, block=8, warmup_steps=1)"], ids=["dense", "blocks"]
)
def test_a_resumed_run_looks_ahead_as_the_whole_one_did(tmp_path, compression):
    strategy, kwargs = {"compression": compression}, {"max_epochs": 2, "callbacks": [Saves(tmp_path)]}
    whole = run_ranks(_run, 2, strategy, kwargs)
    rest = run_ranks(_run, 2, strategy, {**kwargs, "ckpt_path": str(tmp_path / "5.ckpt")})
    for full, part in zip(whole, rest, strict=True):
        np.testing.assert_array_equal(part["weights"], full["weights"])
    assert any((a != b).any() for a, b in zip(whole[0]["forward"][1:], whole[0]["after"], strict=False)), "never ahead"


class Unforeseen(Regressor):
    """Steps by an optimizer whose moves nobody foretells."""

    def configure_optimizers(self):
        return torch.optim.Adamax(self.parameters(), 1e-3)


def _unforeseen(rank):
    lines = collected()
    done = _run(rank, {}, {"model": Unforeseen()})
    ahead = [not np.array_equal(a, b) for a, b in zip(done["forward"][1:], done["after"], strict=False)]
    return any(ahead), len([line for line in lines if "Adamax" in line])


def test_an_optimizer_that_cannot_be_foretold_runs_at_the_weights_as_they_are_and_is_named_once():
    assert run_ranks(_unforeseen, 2) == [(False, 1), (False, 0)]
