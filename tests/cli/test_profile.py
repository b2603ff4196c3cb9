"""``lightning-hetero profile``: fit of times, order to the script, its answer, and what can go wrong."""

import json
import sys

import numpy as np
import pytest

from lightning_hetero.cli.profile import fitted
from lightning_hetero.probe_job import DeviceReport
from lightning_hetero.simulate.planning import Given, plan_cluster, read_cluster
from lightning_hetero.strategies._lightning.probes.device import sizes_around
from tests.cli.ran import ran
from tests.warm.interpreter import warm_python

# In place of a training: answers with times that are known.
FAKE = """
import json, os, sys
order = json.loads(os.environ["LIGHTNING_HETERO_PROBE"])
json.dump({**order, "arguments": sys.argv[1:]}, open(os.path.join(os.path.dirname(__file__), "order"), "w"))
rows = [[b, 0.001 * b + 0.01, 0.002 * b + 0.02, 0.2 * (0.002 * b + 0.02)] for b in order["sizes"] or (8, 16)] * 3
answer = {"name": "gpu", "rows": rows, "memory": 48, "parameters": 1000, "gradient_bytes": 4000, "total": 16,
          "dataset": 800}
json.dump(answer, open(order["report"], "w"))
"""

TRAINING = """
import sys
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset
from lightning_hetero.simulate import DeviceProfile, EmulatedDeviceCallback

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(20, 2)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

if __name__ == "__main__":
    memory, devices, strategy = int(sys.argv[1]) or None, int(sys.argv[2]), sys.argv[3]
    device = EmulatedDeviceCallback(DeviceProfile(q=0.0005, s=0.005, k=0.001, m=0.01, memory=memory))
    trainer = L.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=1, callbacks=[device], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    data = TensorDataset(torch.randn(256, 20), torch.randint(0, 2, (256,)))
    trainer.fit(Model(), DataLoader(data, 16, shuffle=True))
"""


@pytest.fixture
def profile(tmp_path, monkeypatch, capsys):
    """Profiles a script: exit code, what was written, errors."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def _profile(source, *options, arguments=()):
        script = tmp_path / "script.py"
        script.write_text(source)
        if source is TRAINING:
            monkeypatch.setattr(sys, "executable", warm_python())
        return ran(capsys, "profile", "--output", str(tmp_path / "device.json"), *options, str(script), *arguments)

    return _profile


def test_a_profile_is_a_device_of_a_plan(profile, tmp_path):
    code, text, _ = profile(FAKE, "--steps", "5", "--price", "2", "--name", "mine", arguments=["--lr", "3"])
    assert code == 0
    order = json.loads((tmp_path / "order").read_text())
    assert (order["steps"], order["sizes"], order["arguments"]) == (5, [], ["--lr", "3"])
    assert "mine: 6 steps at batch sizes 8, 16" in text
    cluster = read_cluster(f"4x{tmp_path / 'device.json'}", Given(total_batch_size=64, rate=1e6))
    worker = cluster.workers[0]
    assert (worker.name, worker.q, worker.s, worker.k, worker.m) == ("mine", 0.001, 0.01, 0.002, 0.02)
    assert (worker.memory, worker.price, cluster.samples, cluster.link.gradient_bytes) == (48, 2.0, 800, 4000)
    assert cluster.link.gamma == pytest.approx(0.2)
    assert plan_cluster(cluster).local_batch_sizes == (16, 16, 16, 16)


def test_sizes_are_those_that_are_given(profile, tmp_path):
    assert profile(FAKE, "--sizes", "4,8,12")[0] == 0
    assert json.loads((tmp_path / "order").read_text())["sizes"] == [4, 8, 12]


def test_jitter_and_error_are_those_of_the_rows():
    rng, rows = np.random.default_rng(0), []
    for size in sizes_around(32, 1000) * 20:
        forward, backward = (1 + 0.03 * rng.standard_normal(2)) * [0.001 * size + 0.01, 0.002 * size + 0.02]
        rows.append([size, forward, backward, 0.1 * backward])
    cluster = fitted(DeviceReport("gpu", rows, None, 1, 4, 32, 1000))
    worker = cluster.workers[0]
    assert worker.jitter == pytest.approx(0.03, rel=0.15)
    assert 0 < worker.error < 0.01
    for size in (8, 64):
        assert worker.seconds(size) == pytest.approx(0.003 * size + 0.03, rel=0.02)


@pytest.mark.parametrize(
    ("total", "most", "sizes"),
    [(32, 1000, (8, 16, 32, 48, 64, 48, 32, 16, 8)), (2, 100, (1, 2, 3, 4, 3, 2, 1)), (8, 8, (2, 4, 8, 4, 2))],
)
def test_sizes_around_the_script_s_own(total, most, sizes):
    assert sizes_around(total, most) == sizes


def test_a_size_that_does_not_fit_is_the_memory_bound(profile, tmp_path):
    code, _, errors = profile(TRAINING, "--steps", "4", "--sizes", "4,8,16,64", arguments=["20", "1", "hetero_ddp"])
    assert code == 0, errors
    assert read_cluster(str(tmp_path / "device.json")).workers[0].memory == 16


@pytest.mark.parametrize(
    ("options", "arguments", "exit_code", "words"),
    [
        ((), ["0", "2", "hetero_ddp"], 2, "measures one device, and the Trainer has 2 workers"),
        ((), ["0", "1", "auto"], 1, "ended without an answer; does its Trainer fit with strategy='hetero_ddp'?"),
        (
            ("--sizes", "500,600"),
            ["0", "1", "hetero_ddp"],
            2,
            "the batch sizes 500, 600 cannot be timed: give at least two different --sizes from 1 to 128",
        ),
    ],
)
def test_a_training_that_cannot_be_timed(profile, tmp_path, options, arguments, exit_code, words):
    code, _, errors = profile(TRAINING, *options, arguments=arguments)
    assert code == exit_code
    assert "Traceback" not in errors
    assert words in " ".join(errors.split())
    assert not (tmp_path / "device.json").exists()


def test_a_script_that_fails_is_shown(profile):
    code, _, errors = profile("raise SystemExit('no data')")
    assert code == 1
    assert "ended with exit code 1" in errors
    assert "no data" in errors


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (("--name", "a\nb"), "control character"),
        (("--launcher", ""), "no command"),
        (("--launcher", "'"), "no command"),
        (("--output", ""), "no name of a file"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(profile, option, words):
    code, _, errors = profile("raise SystemExit('it ran')", *option)
    assert code == 2
    assert words in errors


def test_the_launcher_starts_the_script(profile, tmp_path):
    assert profile(FAKE, "--launcher", f"env LAUNCHED=1 {sys.executable}")[0] == 0


def test_the_launcher_starts_the_script_with_its_environment(profile, tmp_path):
    script = FAKE.replace('"arguments": sys.argv[1:]', '"launched": os.environ.get("LAUNCHED")')
    assert profile(script, "--launcher", f"env LAUNCHED=1 {sys.executable}")[0] == 0
    assert json.loads((tmp_path / "order").read_text())["launched"] == "1"
