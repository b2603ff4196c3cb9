"""Models that are unlike most, under ways of sending gradients that lose something: each trains, or is refused.

Replicas stay the same bit by bit, and every parameter moves. What a mode cannot send is refused at set-up, with the
cure. Under exact modes their weights are those of one process: tests/one_process/test_modules.py.
"""

import re

import lightning as L
import numpy as np
import pytest
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetero import HeteroDDPStrategy, LookAheadCallback
from tests.helpers import Points, trainer_of
from tests.loops import SAMPLES
from tests.one_process.test_modules import Complex, D, Finetuned, Grows, Quiet, Shapes
from tests.ranks import run_ranks

FEW = {"compression": "block_topk(density=0.1, block=4)"}
MODES = {
    "block top-k": FEW,
    "sparse optimizer": {**FEW, "sparse_optimizer": True},
    "look-ahead": {"staleness": 1},
    "powersgd": {"compression": "powersgd(rank=1, start=4)"},
    "stale block top-k": {**FEW, "staleness": 1},
}


class Embedded(Quiet):
    def __init__(self):
        super().__init__(momentum=0.0)
        self.table = nn.Embedding(SAMPLES, 1, sparse=True, dtype=D)

    def loss(self, batch):
        return super().loss(batch) + self.table(batch[2]).square().mean()


MODELS = (Shapes, Complex, Embedded, Finetuned, Grows)
REFUSED = {
    "Embedded": dict.fromkeys(MODES, "table.weight.*sparse=False"),
    "Complex": {**dict.fromkeys(MODES, "phase"), "look-ahead": "phase.*staleness=0"},
}


class Delay(L.Callback):
    """What a low-bandwidth link would make ranks decide on."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        late = trainer.strategy.engine.hook_state.staleness
        if trainer.global_step == 5 and late is not None:
            late.make_all_stale()
            late.control_externally(True)


def _train(rank, make):
    """What came of each mode: parameters at the end and which moved; or what was raised."""
    found = {}
    for mode, settings in MODES.items():
        model = make()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        callbacks = [Delay()] + [LookAheadCallback()] * (mode == "look-ahead")
        strategy = HeteroDDPStrategy(local_batch_sizes=[6, 2], **settings)
        try:
            trainer = trainer_of(strategy, 2, max_epochs=6, callbacks=callbacks)
            trainer.fit(model, DataLoader(Points(SAMPLES), 4, shuffle=True))
        except Exception as error:  # noqa: BLE001 - what it says is looked at
            found[mode] = f"{type(error).__name__}: {error}"
            continue
        still = [name for name, p in model.named_parameters() if name in before and p.equal(before[name]) and p.numel()]
        found[mode] = model.flat(), still
    return found


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_every_mode_trains_it_or_refuses_it(model):
    refused, (first, second) = REFUSED.get(model.__name__, {}), run_ranks(_train, 2, model)
    for mode in MODES:
        if mode in refused:
            for result in (first[mode], second[mode]):
                assert re.match(rf"\w+: .*{refused[mode]}", str(result)), f"{mode}: {result}"
            continue
        (weights, still), (other, _) = first[mode], second[mode]
        assert np.isfinite(weights).all()
        np.testing.assert_array_equal(weights, other, err_msg=f"{mode}: replicas differ")
        assert still == [], mode
