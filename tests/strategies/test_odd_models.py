"""Models that are unlike most, under every way of sending gradients: each trains as its reference, or is refused.

A mode that is exact gives the weights of one process on the same batches. The others lose something on the way: there
the loss falls, and replicas are the same bit by bit. What a mode cannot send is refused at set-up, with the cure.
"""

import logging
import re
import warnings

import numpy as np
import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BaseFinetuning
from torch.utils.data import DataLoader

from lightning_hetero import HeteroDDPStrategy, LookAheadCallback
from tests.helpers import run_ranks, trainer_of
from tests.strategies.odd_models import KINDS, STEPS_AN_EPOCH, Odd, one_process, points

STEPS = 200
CHANGE = 25  # the step at which layers are unfrozen or added
EPOCHS = STEPS // STEPS_AN_EPOCH
FEW = {"compression": "block_topk(density=0.1, block=4)"}

MODES = {
    "plain": {},
    "block top-k": FEW,
    "sparse optimizer": {**FEW, "sparse_optimizer": True},
    "stale": {"staleness": 1},
    "look-ahead": {"staleness": 1},
    "powersgd": {"compression": "powersgd(rank=1, start=4)"},
    "stale block top-k": {**FEW, "staleness": 1},
}
EXACT = ("plain", "hierarchy")
HIERARCHY = {"hierarchy": {"hierarchy": [[0, 1], [2]]}}

ANY = [mode for mode in (*MODES, "hierarchy") if mode != "plain"]
REFUSED = {
    "embedding sparse": dict.fromkeys(
        ANY, r"cannot send sparse gradients, and emb.weight has them .* Set sparse=False"
    ),
    "unused": dict.fromkeys(
        ("stale", "look-ahead", "stale block top-k"), "staleness=1 and find_unused_parameters=True: .* Use all param"
    ),
    "complex": {
        **dict.fromkeys(
            ("block top-k", "sparse optimizer", "powersgd", "stale block top-k"), "of phase, .* allowed are"
        ),
        **dict.fromkeys(("stale", "look-ahead"), "staleness=1 and complex parameters .phase.: .* set staleness=0"),
    },
}


class Unfreeze(BaseFinetuning):
    """As users unfreeze a layer: Lightning's callback, at the beginning of the second epoch."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.body)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == CHANGE // STEPS_AN_EPOCH:
            self.unfreeze_and_add_param_group(pl_module.body, optimizer, lr=0.02)


class Add(Callback):
    """A layer that joins the model in the run, other on each rank until then."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == CHANGE:
            pl_module.grow(trainer.global_rank)
            trainer.optimizers[0].add_param_group({"params": list(pl_module.extra.parameters())})


class Delay(Callback):
    """What a low-bandwidth link would make ranks decide on."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        late = trainer.strategy.engine.hook_state.staleness
        if trainer.global_step == 5:
            late.make_all_stale()
            late.control_externally(True)


class Watch(Callback):
    """Weights every so many steps."""

    def __init__(self):
        self.weights = []

    def on_train_batch_end(self, trainer, pl_module, *args):
        if trainer.global_step % 40 == 0:
            self.weights.append(pl_module.flat())


def callbacks(kind, mode):
    has = KINDS.get(kind, (kind,))
    changes = [make() for name, make in (("unfrozen", Unfreeze), ("added", Add)) if name in has]
    delays = {"stale": [Delay()], "look-ahead": [Delay(), LookAheadCallback()], "stale block top-k": [Delay()]}
    return [*changes, *delays.get(mode, [])]


def _train(kind, mode, settings, world_size):
    model, watch = Odd(kind), Watch()
    sizes = {2: [6, 2], 3: [3, 4, 1]}[world_size]
    strategy = HeteroDDPStrategy(local_batch_sizes=sizes, find_unused_parameters=kind == "unused", **settings)
    trainer = trainer_of(strategy, world_size, max_epochs=EPOCHS, callbacks=[*callbacks(kind, mode), watch])
    trainer.fit(model, DataLoader(points(), 4, shuffle=True))
    return {"weights": watch.weights, "end": model.flat(), "losses": model.losses, "steps": trainer.global_step}


def _modes(rank, kind, modes, world_size):
    """Each mode in turn: what came of it, or what was raised."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning_hetero").setLevel(logging.ERROR)
    found = {}
    for mode, settings in modes.items():
        try:
            found[mode] = _train(kind, mode, settings, world_size)
        except Exception as error:  # noqa: BLE001 - what it says is looked at
            found[mode] = f"{type(error).__name__}: {error}"
    return found


def check(kind, mode, results):
    """Trained as it has to be, or refused on all ranks as it has to be."""
    if mode in REFUSED.get(kind, {}):
        for result in results:
            assert isinstance(result, str), f"{kind}, {mode}: was not refused"
            assert re.match(f"(ValueError|MisconfigurationException): .*{REFUSED[kind][mode]}", result), result
        return
    for result in results:
        assert not isinstance(result, str), f"{kind}, {mode}: {result}"
        assert result["steps"] == STEPS
        for own, others in zip(result["weights"], results[0]["weights"], strict=True):
            np.testing.assert_array_equal(own, others, err_msg=f"{kind}, {mode}: replicas differ")
        np.testing.assert_array_equal(result["end"], results[0]["end"])
    if mode in EXACT:
        weights = one_process(kind, STEPS, CHANGE)[0]
        tolerance = 1e-4 if "mixed dtypes" in KINDS.get(kind, (kind,)) else 1e-10
        np.testing.assert_allclose(results[0]["end"], weights, rtol=tolerance, atol=tolerance)
    first, last = (np.mean([r["losses"][part] for r in results]) for part in (slice(25), slice(-25, None)))
    assert last < 0.7 * first, f"{kind}, {mode}: the loss went from {first} to {last}"


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_it_or_refuse_it(kind):
    results = run_ranks(_modes, 2, kind, MODES, 2)
    for mode in MODES:
        check(kind, mode, [result[mode] for result in results])


@pytest.mark.parametrize("kind", KINDS)
def test_clusters_train_it_or_refuse_it(kind):
    results = run_ranks(_modes, 3, kind, HIERARCHY, 3)
    check(kind, "hierarchy", [result["hierarchy"] for result in results])
