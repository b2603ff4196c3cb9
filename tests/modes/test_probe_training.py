"""A probe training by order of the environment: its batches, gradients, end and answer; what is left out."""

import warnings
from functools import partial

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_hetero import AdaptiveBatchCallback, HeteroDDPStrategy, TTACallback
from lightning_hetero.probe_job import VARIABLE, ProbeOrder, ProbeReport
from tests.helpers import Points, Regressor, trainer_of
from tests.ranks import run_ranks

SAMPLES = 64


class Module(Regressor):
    """Has all that a script may have besides a training step."""

    validated = 0

    def validation_step(self, batch, batch_idx):
        self.validated += 1

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "validation_loss"}}

    def configure_callbacks(self):
        return [EarlyStopping("validation_loss")]


BLOCKS, ADAPTIVE = "block_topk(block=8)", partial(AdaptiveBatchCallback, max_total_batch_size=32)
SPARSE = {"local_batch_sizes": [7, 3], "compression": BLOCKS}
LATE = {"total": 10, "samples": 60, "rate": 0.75, "staleness": 1}
PROBES = {  # the order, the strategy's settings, and what else the script has
    "in order": ({"total": 12, "samples": 96}, {}, {}),
    "late": ({"total": 12, "samples": 96, "staleness": 1}, {}, {}),
    "rate": ({"samples": 50, "rate": 0.75}, SPARSE, {}),
    "no rate": ({"samples": 50}, {"compression": "block_topk(warmup_steps=0)", "sparse_optimizer": True}, {}),
    "late blocks": (LATE, {"compression": BLOCKS}, {}),
    "blocks": ({**LATE, "staleness": 0}, {"compression": BLOCKS}, {}),
    "controller": (LATE, {"compression": BLOCKS}, {"policy": TTACallback}),
    "windows": ({"total": 10, "samples": 20}, {}, {"accumulate_grad_batches": 2}),
    "described": ({}, {"min_local_batch_size": 2}, {}),
}


def _probe(rank, folder, texts):
    """Each probe in turn, after which its script goes no further."""
    warnings.filterwarnings("ignore", "ReduceLROnPlateau conditioned on metric validation_loss which is not available")
    found = {}
    for name, text in texts.items():
        _, settings, more = PROBES[name]
        more, place = {"policy": ADAPTIVE, **more}, folder / name
        policy = more.pop("policy")()
        checkpoints = ModelCheckpoint(place / "checkpoints", monitor="validation_loss")
        model, loader = Module(), DataLoader(Points(SAMPLES), 5, shuffle=True)
        how = {"callbacks": [policy, checkpoints, LearningRateMonitor()], "logger": CSVLogger(place / "logs")}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(VARIABLE, text)
            trainer = trainer_of(
                HeteroDDPStrategy(**settings), 2, max_epochs=1, enable_checkpointing=True, **how, **more
            )
            with pytest.raises(SystemExit) as ended:  # or the script would go on after its probe
                trainer.fit(model, loader, loader)
        assert ended.value.code == 0
        compression = trainer.strategy.engine.compression
        density = None if compression is None else compression.settings.density
        found[name] = {"seen": model.seen, "validated": model.validated, "density": density}
    return found


@pytest.fixture(scope="module")
def probes(tmp_path_factory):
    """The answer of each probe, and what the ranks saw."""
    folder = tmp_path_factory.mktemp("probes")
    texts = {}
    for name, (order, *_) in PROBES.items():
        (folder / name).mkdir()
        texts[name] = ProbeOrder(str(folder / name / "answer.json"), **order).announce()
    ranks = run_ranks(_probe, 2, folder, texts)
    for name in PROBES:  # leaves nothing but its answer; who ordered it takes the order away
        assert {path.name for path in (folder / name).iterdir()} == {"answer.json", "answer.json.order"}
    return {n: (ProbeReport.read(folder / n / "answer.json"), [found[n] for found in ranks]) for n in PROBES}


def by_hand(results, *, delay=0):
    """Losses of one process that takes the same total batches, each gradient ``delay`` steps late."""
    model, points, losses, owed = Regressor(), Points(SAMPLES), [], []
    optimizer = model.configure_optimizers()
    for (*_, first), (*_, second) in zip(*[r["seen"] for r in results], strict=True):
        optimizer.zero_grad()
        loss = model.loss((points.x[first + second], points.y[first + second], None))
        loss.backward()
        losses.append(loss.item())
        owed.append([p.grad.clone() for p in model.parameters()])
        late = owed.pop(0) if len(owed) > delay else [torch.zeros_like(p) for p in model.parameters()]
        for p, gradient in zip(model.parameters(), late, strict=True):
            p.grad = gradient
        optimizer.step()
    return losses


def test_the_order_decides_on_batches_and_delay_and_on_nothing_else(probes):
    """Total 12 in place of the script's 10, one epoch of 64 samples and a half; the last quarter's loss counts."""
    for name, delay in (("in order", 0), ("late", 1)):
        answer, results = probes[name]
        sizes = [[len(indices) for *_, indices in r["seen"]] for r in results]
        assert sizes == [[6, 6, 6, 6, 6, 2, 6, 6, 6]] * 2
        assert [r["validated"] for r in results] == [0, 0]
        np.testing.assert_allclose(answer.loss, np.mean(by_hand(results, delay=delay)[-3:]), rtol=1e-12)
        assert (answer.samples, answer.staleness, answer.total) == (100, delay, 12)
    np.testing.assert_allclose(probes["windows"][0].loss, by_hand(probes["windows"][1], delay=9)[-1], rtol=1e-12)
    described, results = probes["described"]
    assert described == ProbeReport(None, 0, 0, world_size=2, total=10, dataset=SAMPLES, min_local=2)
    assert [r["seen"] for r in results] == [[], []]


def test_rate_is_one_minus_density_and_late_gradients_look_ahead_as_the_script_does(probes):
    answer, results = probes["rate"]
    assert answer.total == 10, "the script's own"
    assert [len(indices) for *_, indices in results[0]["seen"]] == [5] * 5
    assert abs(answer.loss - np.mean(by_hand(results)[-2:])) > 1e-6
    for name, density in {"rate": 0.25, "late blocks": 0.25, "blocks": 0.25, "no rate": None}.items():
        assert [r["density"] for r in probes[name][1]] == [density] * 2
    np.testing.assert_allclose(probes["no rate"][0].loss, np.mean(by_hand(probes["no rate"][1])[-2:]), rtol=1e-12)
    late = {name: answer.staleness for name, (answer, _) in probes.items()}
    assert (late["late blocks"], late["blocks"]) == (1, 0)
    losses = {name: answer.loss for name, (answer, _) in probes.items()}
    assert losses["blocks"] != losses["late blocks"] != losses["controller"]


def _fit(rank, strategy, ranks, ckpt_path=None):
    trainer_of(strategy, ranks).fit(Regressor(), DataLoader(Points(SAMPLES), 5, shuffle=True), ckpt_path=ckpt_path)


def refused(text, strategy="hetero_ddp", ranks=2, **kwargs):
    errors = run_ranks(_fit, ranks, strategy, ranks, *kwargs.values(), env={VARIABLE: text}, expect_errors=True)
    assert len(errors) == ranks
    return [message for *_, message in errors]


def test_a_probe_begins_with_a_new_model(tmp_path):
    path, order = tmp_path / "last.ckpt", ProbeOrder(str(tmp_path / "answer.json"), samples=10)
    trainer = trainer_of("auto", 1, max_steps=1)
    trainer.fit(Regressor(), DataLoader(Points(SAMPLES), 5))
    trainer.save_checkpoint(path)
    assert all("a new model" in message for message in refused(order.announce(), ckpt_path=path))


def test_a_variable_that_is_left_over_trains_no_probe_and_overwrites_nothing(tmp_path):
    """More of it: tests/engine/test_probe_job.py."""
    answer = tmp_path / "answer.json"
    answer.write_text("precious")
    text = ProbeOrder(str(answer), samples=20).to_json()
    assert all(f"unset {VARIABLE}" in message for message in refused(text))
    assert answer.read_text() == "precious"


@pytest.mark.parametrize(
    ("strategy", "text", "match"),
    [
        ("hetero_ddp", "[" * 100_000, "no order"),
        ("hetero_ddp", '{"report": "a", "rate": 2}', "rate=2"),
        ("hetero_ddp", None, "one worker"),
        ("hetero_ddp_fork", None, "strategy='hetero_ddp'"),
    ],
)
def test_what_cannot_be_probed_is_refused(tmp_path, strategy, text, match):
    text = ProbeOrder(str(tmp_path / "a")).announce() if text is None else text
    assert match in refused(text, strategy, 1)[0]
