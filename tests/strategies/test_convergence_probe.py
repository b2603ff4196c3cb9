"""A probe training by order of the environment: its batches, gradients, end and answer; what is left out."""

import socket
import subprocess
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_hetero import AdaptiveBatchCallback, HeteroDDPStrategy, LookAheadCallback, TTACallback
from lightning_hetero.probe_job import VARIABLE, ProbeOrder, ProbeReport
from tests.helpers import Points, RankError, Regressor, run_ranks, trainer_of

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


def _probe(rank, folder, strategy, kwargs):
    model, loader = Module(**kwargs.pop("model", {})), DataLoader(Points(SAMPLES), 5, shuffle=True)
    callbacks = [
        *kwargs.pop("policy", [AdaptiveBatchCallback(max_total_batch_size=32)]),
        ModelCheckpoint(folder / "checkpoints", monitor="validation_loss"),
        LearningRateMonitor(),
    ]
    settings = {"max_epochs": 1, "callbacks": callbacks, "logger": CSVLogger(folder / "logs"), **kwargs}
    ckpt_path = settings.pop("ckpt_path", None)
    trainer = trainer_of(HeteroDDPStrategy(**strategy), 2, enable_checkpointing=True, **settings)
    warnings.filterwarnings("ignore", "ReduceLROnPlateau conditioned on metric validation_loss which is not available")
    with pytest.raises(SystemExit) as ended:  # or the script would go on after its probe
        trainer.fit(model, loader, loader, ckpt_path=ckpt_path)
    assert ended.value.code == 0
    compression = trainer.strategy.engine.compression
    density = None if compression is None else compression.settings.density
    return {"seen": model.seen, "validated": model.validated, "density": density}


@pytest.fixture
def probe(tmp_path):
    """Runs a probe training on two ranks: the answer, and what the ranks saw."""

    def _run(strategy=None, kwargs=None, **order):
        text = ProbeOrder(str(tmp_path / "answer.json"), **order).announce()
        results = run_ranks(_probe, 2, tmp_path, strategy or {}, kwargs or {}, env={VARIABLE: text})
        left = {path.name for path in tmp_path.iterdir()} - {"answer.json.order"}  # which who ordered it takes away
        assert left == {"answer.json"}, "a probe leaves nothing but its answer"
        return ProbeReport.read(tmp_path / "answer.json"), results

    return _run


def by_hand(results, *, delay=0):
    """Losses of one process that takes the same total batches, each gradient ``delay`` steps late."""
    model, points, losses, owed = Regressor(), Points(SAMPLES), [], []
    optimizer = model.configure_optimizers()
    for (*_, first), (*_, second) in zip(*[r["seen"] for r in results], strict=True):
        batch = [torch.stack([points[i][k] for i in [*first, *second]]) for k in (0, 1)]
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(batch[0]), batch[1])
        loss.backward()
        losses.append(loss.item())
        owed.append([p.grad.clone() for p in model.parameters()])
        late = owed.pop(0) if len(owed) > delay else [torch.zeros_like(p) for p in model.parameters()]
        for p, gradient in zip(model.parameters(), late, strict=True):
            p.grad = gradient
        optimizer.step()
    return losses


@pytest.mark.parametrize("delay", [0, 1])
def test_the_order_decides_on_batches_and_delay_and_on_nothing_else(probe, delay):
    """Total 12 in place of the script's 10, one epoch of 64 samples and a half; the last quarter's loss counts."""
    answer, results = probe(total=12, samples=96, staleness=delay)
    sizes = [[len(indices) for *_, indices in r["seen"]] for r in results]
    assert sizes == [[6, 6, 6, 6, 6, 2, 6, 6, 6], [6, 6, 6, 6, 6, 2, 6, 6, 6]]
    assert [r["validated"] for r in results] == [0, 0]
    losses = by_hand(results, delay=delay)
    np.testing.assert_allclose(answer.loss, np.mean(losses[-3:]), rtol=1e-12)
    assert (answer.samples, answer.staleness, answer.total) == (100, delay, 12)


def test_rate_is_one_minus_density(probe):
    answer, results = probe({"local_batch_sizes": [7, 3], "compression": "block_topk(block=8)"}, samples=50, rate=0.75)
    assert [r["density"] for r in results] == [0.25, 0.25]
    assert answer.total == 10, "the script's own"
    assert [len(indices) for *_, indices in results[0]["seen"]] == [5] * 5
    assert abs(answer.loss - np.mean(by_hand(results)[-2:])) > 1e-6
    again, _ = probe({"local_batch_sizes": [7, 3], "compression": "block_topk(block=8)"}, samples=50, rate=0.75)
    assert again == answer


def test_without_a_rate_nothing_of_compression_is_left(probe):
    answer, results = probe({"compression": "block_topk(warmup_steps=0)", "sparse_optimizer": True}, samples=50)
    assert [r["density"] for r in results] == [None, None]
    np.testing.assert_allclose(answer.loss, np.mean(by_hand(results)[-2:]), rtol=1e-12)


def test_compressed_gradients_are_late_too(probe):
    strategy = {"compression": "block_topk(block=8)"}
    late, _ = probe(strategy, total=10, samples=60, rate=0.75, staleness=1)
    at_once, results = probe(strategy, total=10, samples=60, rate=0.75)
    assert (late.staleness, at_once.staleness) == (1, 0)
    assert [r["density"] for r in results] == [0.25, 0.25]
    assert late.loss != at_once.loss


def test_late_gradients_look_ahead_where_the_controller_of_the_script_does(probe):
    order = {"total": 10, "samples": 60, "rate": 0.75, "staleness": 1}
    ways = {"controller": [TTACallback()], "by hand": [LookAheadCallback()], "without": []}
    losses = {
        way: probe({"compression": "block_topk"}, {"policy": given}, **order)[0].loss for way, given in ways.items()
    }
    assert losses["controller"] == losses["by hand"] != losses["without"]


def test_losses_are_those_of_samples_with_accumulation_and_sums(probe):
    answer, results = probe(kwargs={"accumulate_grad_batches": 2}, total=10, samples=20)
    np.testing.assert_allclose(answer.loss, by_hand(results, delay=9)[-1], rtol=1e-12)
    answer, results = probe({"loss_reduction": "sum"}, {"model": {"reduction": "sum"}}, total=10, samples=10)
    np.testing.assert_allclose(answer.loss, by_hand(results)[0], rtol=1e-12)


def test_a_delay_that_the_script_does_not_allow_is_left_out(probe):
    answer, _ = probe({"find_unused_parameters": True}, samples=20, staleness=1)
    assert answer.staleness == 0


def test_without_samples_the_script_is_described(probe):
    answer, results = probe({"min_local_batch_size": 2})
    assert answer == ProbeReport(None, 0, 0, world_size=2, total=10, dataset=SAMPLES, min_local=2)
    assert [r["seen"] for r in results] == [[], []]


def test_a_probe_begins_with_a_new_model(tmp_path):
    path, order = tmp_path / "last.ckpt", ProbeOrder(str(tmp_path / "answer.json"), samples=10)
    trainer = trainer_of("auto", 1, max_steps=1)
    trainer.fit(Regressor(), DataLoader(Points(SAMPLES), 5))
    trainer.save_checkpoint(path)
    with pytest.raises(RankError, match="a probe training begins with a new model") as raised:
        run_ranks(_probe, 2, tmp_path, {}, {"ckpt_path": path}, env={VARIABLE: order.announce()})
    assert len(raised.value.errors) == 2


def _fit_alone(rank, strategy):
    trainer_of(strategy, 1).fit(Regressor(), DataLoader(Points(SAMPLES), 5, shuffle=True))


@pytest.mark.parametrize("left", ["nothing", "another order", "who is gone"])
def test_a_variable_that_is_left_over_trains_no_probe_and_overwrites_nothing(tmp_path, left):
    answer = tmp_path / "answer.json"
    answer.write_text("precious")
    order = ProbeOrder(str(answer), samples=20)
    text = order.to_json()
    if left == "another order":
        order.announce()
    if left == "who is gone":
        process = subprocess.Popen(["true"])
        process.wait()
        text = replace(order, host=socket.gethostname(), pid=process.pid).to_json()
        (tmp_path / "answer.json.order").write_text(text)
    with pytest.raises(RankError, match="is left over from .*unset LIGHTNING_HETERO_PROBE") as raised:
        run_ranks(_fit_two, 2, env={VARIABLE: text})
    assert len(raised.value.errors) == 2
    assert answer.read_text() == "precious"


def _fit_two(rank):
    trainer_of("hetero_ddp", 2).fit(Regressor(), DataLoader(Points(SAMPLES), 5, shuffle=True))


@pytest.mark.parametrize(
    ("strategy", "text", "says"),
    [
        ("hetero_ddp", "[" * 100_000, "is no order for a probe training"),
        ("hetero_ddp", "{", "is no order for a probe training"),
        ("hetero_ddp", '{"report": "a", "speed": 3}', "is no order for a probe training"),
        ("hetero_ddp", '{"report": "a", "rate": 2}', "rate=2 is out of range"),
        ("hetero_ddp", None, "a probe training with one worker sends no gradients"),
        ("hetero_ddp_fork", None, "Profile with strategy='hetero_ddp'"),
    ],
)
def test_what_cannot_be_probed_is_refused(tmp_path, strategy, text, says):
    text = ProbeOrder(str(tmp_path / "a")).announce() if text is None else text
    with pytest.raises(RankError, match=says):
        run_ranks(_fit_alone, 1, strategy, env={VARIABLE: text})
