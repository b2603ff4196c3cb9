"""Compressed gradients in real processes: what they change, what is the same on all ranks, what survives a resume."""

import numpy as np
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn

from lightning_hetero import BlockTopK, HeteroDDPStrategy
from lightning_hetero.comm.compressors import auto
from lightning_hetero.core.compression.auto import LinkMeasurement
from tests.helpers import Points, Regressor, fit
from tests.modes.runs import Saves, alike, by_name
from tests.ranks import run_ranks

N, FEATURES = 60, 40
SPARSE = {"density": 0.2, "warmup_steps": 2}
COMPRESSORS = {
    "exact": BlockTopK(**SPARSE),
    "histogram, int8": BlockTopK(**SPARSE, selector="histogram", value_dtype="int8"),
    "elements, balanced": BlockTopK(**SPARSE, block=1, scores="balanced"),
    "aimd": BlockTopK(**SPARSE, selector="aimd"),
    "low rank": "powersgd(rank=2, start=3)",
    "auto": "auto",
}
WHOLE = BlockTopK(density=1.0, value_dtype="float32")
TINY = {"bucket_cap_mb": 1e-4}


class Wide(Regressor):
    def __init__(self, lr=0.01, momentum=0.0):
        super().__init__(features=FEATURES, lr=lr, momentum=momentum, dtype=torch.float32)


def points():
    return Points(N, features=FEATURES, dtype=torch.float32)


class Over:
    """Lets ``"auto"`` find a link of so many bytes per second."""

    def __init__(self, rate, latency=1e-6):
        self.found = LinkMeasurement(latency, rate, 1e-6, 2, 10**8)

    def __enter__(self):
        self.before, auto.measure = auto.measure, lambda *args: self.found

    def __exit__(self, *error):
        auto.measure = self.before


def train(rank, compression=None, sizes=(3, 1), *, strategy=None, **kwargs):
    """With what is left in the residuals, of all parameters in order."""
    given = {"local_batch_sizes": list(sizes), "compression": compression, **(strategy or {})}
    strategy, kwargs = HeteroDDPStrategy(**given), {"model": Wide(), "dataset": points(), "max_epochs": 2, **kwargs}
    done = fit(rank, strategy, len(sizes), sum(sizes) // len(sizes), **kwargs)
    return {**done, "left": left(strategy, kwargs["model"])}


def left(strategy, model):
    held = strategy.engine.compression and strategy.engine.compression.averager
    residuals = held.residuals() if held is not None and hasattr(held, "residuals") else {}
    kept = [residuals[n].numpy().ravel() for n, _ in model.named_parameters() if n in residuals]
    return np.concatenate(kept) if kept else 0.0


# what is applied


def _applied(rank):
    """A hundred steps with each compressor, over a link so thin that ``"auto"`` compresses, and without any."""
    found = {"none": train(rank, None)}
    for name, settings in COMPRESSORS.items():
        with Over(1e7):
            found[name] = train(rank, settings, max_epochs=7, strategy=TINY)
    with Over(1e20):
        found["auto, dense"] = train(rank, "auto")
    return found


def test_what_is_applied_is_the_compressed_gradient_the_same_on_all_ranks():
    """The first steps are dense, later ones are not; block top-k touches its share of blocks and no more."""
    results = by_name(run_ranks(_applied, 2))
    dense = results.pop("none")[0]["grads"]
    assert not (alike(results.pop("auto, dense"), "grads")["grads"][auto.AUTO.first_try_step :] == 0).mean() > 0.5
    for name, ranks in results.items():
        ours, settings = alike(ranks, "grads"), COMPRESSORS[name]
        assert ours["steps"] >= 100
        first, later = ours["grads"][: len(dense)], ours["grads"][auto.AUTO.first_try_step :]
        if isinstance(settings, BlockTopK):
            np.testing.assert_allclose(first[:2], dense[:2], rtol=1e-5, atol=1e-7, err_msg=name)
            assert 0.02 < (first[2:] != 0).mean() < 0.4, name
        elif name == "auto":
            assert (later == 0).mean() > 0.5, "it has chosen plain sums"
        else:
            matrices = ours["grads"][3:, : 7 * FEATURES].reshape(-1, 7, FEATURES)
            assert (np.linalg.matrix_rank(matrices, tol=1e-5) == 2).all()


DENSE = {
    "views": {"strategy": {"gradient_as_bucket_view": True}},
    "static graph": {"strategy": {"static_graph": True}, "sizes": (4, 0)},
    "three ranks": {"sizes": (2, 1, 1), "accumulate_grad_batches": 3},
    "clusters": {"sizes": (2, 1, 1), "strategy": {"hierarchy": [[0, 2], [1]]}},
}


def _dense(rank, ranks):
    cases = {name: case for name, case in DENSE.items() if len(case.get("sizes", (3, 1))) == ranks}
    found = {name: [train(rank, how, **case) for how in (None, WHOLE)] for name, case in cases.items()}
    if ranks == 3:  # sums of two are the same in any order; those of three ranks with most blocks in common are not
        found["order"] = [train(rank, BlockTopK(density=0.9, value_dtype="float32"), (2, 1, 1), strategy=TINY)] * 2
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_density_1_is_the_dense_gradient(ranks):
    for name, results in by_name(run_ranks(_dense, ranks, ranks)).items():
        plain, ours = (alike(pair, "grads") for pair in zip(*results, strict=True))
        np.testing.assert_allclose(ours["grads"], plain["grads"], rtol=1e-4, atol=2e-7, err_msg=name)


# nothing is lost


class Branched(Wide):
    """Takes no step; every other batch leaves a branch out, whose gradient is the largest."""

    def __init__(self):
        super().__init__(lr=0.0)
        self.extra = nn.Linear(FEATURES, 8)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if batch_idx % 2 else loss + 10 * self.extra(batch[0]).square().mean()

    def on_before_optimizer_step(self, optimizer):
        parts = (torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in self.parameters())
        self.grads.append(torch.cat(list(parts)).clone())


UNUSED = {"find_unused_parameters": True}
LOSSLESS = {
    "few": BlockTopK(density=0.0006, value_dtype="float32", warmup_steps=0),  # less than the branch
    "int8, dense steps": BlockTopK(density=0.3, value_dtype="int8", selector="histogram", dense_every=4),
    "elements": BlockTopK(density=0.1, block=1, value_dtype="float32", scores="balanced"),
    "aimd": BlockTopK(density=0.02, value_dtype="float32", warmup_steps=0, selector="aimd"),
}


def _nothing_lost(rank):
    found = {"none": train(rank, None, model=Branched(), strategy=UNUSED)}
    for name, settings in LOSSLESS.items():
        for cap in (1e-4, 25):
            how = {"model": Branched(), "strategy": {**UNUSED, "bucket_cap_mb": cap}}
            found[name, cap] = train(rank, settings, **how)
    return found


def test_applied_and_left_make_up_all_gradients():
    """At weights that stay; also of a branch that some batches leave out."""
    results = by_name(run_ranks(_nothing_lost, 2))
    expected = results.pop("none")[0]["grads"].sum(axis=0)
    for name, ranks in results.items():
        total = alike(ranks, "grads")["grads"].sum(axis=0) + sum(result["left"] for result in ranks)
        np.testing.assert_allclose(total, expected, rtol=1e-3, atol=2e-3, err_msg=str(name))
        assert np.abs(ranks[0]["left"]).max() > 0.01


# gradients that are not finite


class Poisoned(Wide):
    """One rank's loss is not finite in some steps."""

    def __init__(self, *steps):
        super().__init__()
        self.bad = steps

    def loss(self, batch):
        bad = self.trainer.global_rank == 1 and self.trainer.global_step in self.bad
        return super().loss(batch) * (float("inf") if bad else 1.0)


class Scaled(Poisoned):
    """With a loss scaler; remembers scales."""

    def __init__(self):
        super().__init__(6)
        self.scales = []

    def on_train_batch_end(self, *args):
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())


KEPT = {"blocks": BlockTopK(**SPARSE), "low rank": "powersgd(rank=1, start=3)"}


def _not_finite(rank):
    found = {name: train(rank, how, model=Poisoned(1, 6, 9), strategy=TINY) for name, how in KEPT.items()}
    for name, how in {"plain": None, "whole": WHOLE, **KEPT}.items():
        model, scaler = Scaled(), torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        done = train(rank, how, model=model, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
        found[f"scaled, {name}"] = {**done, "grads": np.array(model.scales)}
    return found


def test_a_gradient_that_is_not_finite_is_left_out_on_all_ranks():
    """In a dense step as in compressed ones; a loss scaler skips the step as without compression."""
    results = by_name(run_ranks(_not_finite, 2))
    for name, ranks in results.items():
        ours = alike(ranks, "grads")
        steps = np.arange(len(ours["grads"]))
        if name in KEPT:
            np.testing.assert_array_equal(np.abs(ours["grads"]).max(axis=1) == 0, np.isin(steps, (1, 6, 9)), name)
        else:
            np.testing.assert_array_equal(ours["grads"], results["scaled, plain"][0]["grads"], name)
            assert len(set(ours["grads"])) > 3, "the scale changes all the time"
    plain, whole = (results[f"scaled, {name}"][0]["weights"] for name in ("plain", "whole"))
    np.testing.assert_allclose(whole, plain, rtol=2e-2, atol=2e-3)


# checkpoints


OWED = BlockTopK(**SPARSE, value_dtype="float32")
ELSEWHERE = {
    "dense": ((6,), {"compression": None}),
    "one": ((6,), {"compression": OWED}),
    "more": ((2, 2, 1, 1), {"compression": OWED}),
    "low rank": ((2, 2, 2), {"compression": "powersgd"}),
    "clusters": ((2, 2, 2), {"compression": OWED, "hierarchy": [[0, 1], [2]]}),
    "auto, dense": ((3, 3), {"compression": "auto"}),
}


def _at_fixed_weights(rank, sizes, settings, path, **kwargs):
    with Over(1e12, latency=1.0):
        how = {"model": Wide(lr=0.0), "callbacks": [Saves(path, 10)], "max_epochs": -1}
        return train(rank, sizes=sizes, strategy=settings, **how, **kwargs)


def _ten_steps(rank, path):
    return _at_fixed_weights(rank, (2, 2, 2), {"compression": OWED}, path, max_steps=10)


def _twelve_more(rank, sizes, settings, path):
    return _at_fixed_weights(rank, sizes, settings, path, max_steps=22, ckpt_path=f"{path}/10")


def test_nothing_that_is_owed_is_lost_on_another_number_of_ranks_or_by_another_compressor(tmp_path):
    """Applied and left is all that was owed and came up since; on one rank, or by dense sums, it is paid at once."""
    path = str(tmp_path)
    owed = sum(result["left"] for result in run_ranks(_ten_steps, 3, path))
    assert np.abs(owed).max() > 0.1
    found = {name: run_ranks(_twelve_more, len(case[0]), *case, path) for name, case in ELSEWHERE.items()}
    plain = found.pop("dense")[0]["grads"]
    for name, results in found.items():
        applied, kept = alike(results, "grads")["grads"], sum(result["left"] for result in results)
        total = plain.sum(axis=0) + owed
        np.testing.assert_allclose(applied.sum(axis=0) + kept, total, rtol=1e-3, atol=1e-3, err_msg=name)
    applied = found["one"][0]["grads"]
    np.testing.assert_allclose(applied[0], plain[0] + owed, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(applied[1:], plain[1:], rtol=1e-5, atol=1e-6)


# what is wrong


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"compression": "topk"}, "block_topk"),
        ({"compression": 0.01}, "compression=0.01"),
        ({"compression": "fp16", "ddp_comm_hook": print}, "ddp_comm_hook"),
    ],
)
def test_wrong_arguments_are_refused_at_construction(given, match):
    with pytest.raises((TypeError, ValueError), match=match):
        HeteroDDPStrategy(**given)
