"""The header of a record says what runs, where, and with which settings."""

import sys

import pytest
import torch

from lightning_hetero import HeteroDDPStrategy, HeteroFSDPStrategy
from lightning_hetero.accelerate import HeteroPlugin
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.policies import POLICIES
from lightning_hetero.data import PermutationStream
from lightning_hetero.engine import HeteroEngine
from lightning_hetero.engine.watch.recorder import Recorder
from lightning_hetero.frontend.report.begin import begin_report
from lightning_hetero.hardware import call_device
from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy as HeteroFabricStrategy


def engine(**settings):
    """An engine of one rank that records as one of several."""
    call_device("")
    made = HeteroEngine(HeteroConfig(**settings), rank=0, world_size=1, device=torch.device("cpu"))
    made.rounds.watch.speaks, made.rounds.watch.recorder = True, Recorder(1)
    return made


def begun(made, planner=None, folder=None):
    begin_report(made, planner, front_end="Fabric", strategy="hetero_ddp", folder=folder)
    return made.rounds.watch.run


def test_a_header_has_all_that_is_known(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "1"])
    made = engine(max_local_batch_sizes=9, weight_fn=len)
    made.shard(PermutationStream(32, shuffle=False, seed=0), batch_size=4)
    header = begun(made, POLICIES["pid"].factory()).header
    assert (header.front_end, header.strategy, header.policy) == ("Fabric", "hetero_ddp", "pid")
    assert header.total_batch_size == 4
    assert header.command == ("train.py", "--lr", "1")
    assert header.versions["torch"] == torch.__version__ or header.versions["torch"].startswith("2.")
    assert {"python", "torch", "numpy"} <= set(header.versions)
    assert header.settings == {"max_local_batch_sizes": "9", "weight_fn": "len"}
    (worker,) = header.workers
    assert worker.identity.endswith("/cpu:0")
    assert worker.device.endswith("cores")
    assert (worker.min_local, worker.max_local) == (1, 9)
    assert worker.capacity > 0


@pytest.mark.parametrize(("settings", "policy"), [({"policy": "even"}, "even"), ({"local_batch_sizes": [4]}, "fixed")])
def test_a_split_that_never_changes_has_a_name(settings, policy):
    made = engine(**settings)
    made.shard(PermutationStream(32, shuffle=False, seed=0), batch_size=4)
    assert begun(made).header.policy == policy


def test_without_data_there_is_no_record():
    assert begun(engine()) is None


def test_the_file_is_in_the_folder_of_the_logger_or_in_the_given_one(tmp_path):
    mine, path = tmp_path / "mine", tmp_path / "path"
    for given, where in ((True, tmp_path / "logs"), (str(mine), mine), (path, path)):
        made = engine(report=given)
        made.shard(PermutationStream(32, shuffle=False, seed=0), batch_size=4)
        begun(made, folder=tmp_path / "logs")
        assert (where / "hetero_run.jsonl").read_text().startswith('{"kind":"run","version":1')


def test_no_folder_is_no_error():
    made = engine()
    made.shard(PermutationStream(32, shuffle=False, seed=0), batch_size=4)
    assert begun(made) is not None
    assert made.rounds.watch.path is None


def test_a_path_is_kept_as_text(tmp_path):
    given = (HeteroConfig, HeteroPlugin, HeteroDDPStrategy, HeteroFSDPStrategy, HeteroFabricStrategy)
    for cls in given:
        made = cls(report=tmp_path)
        assert getattr(made, "config", made).report == str(tmp_path)
    for wrong in (3, "", b"logs", None):
        with pytest.raises(TypeError, match="must be True, False, or the name or path of a folder"):
            HeteroConfig(report=wrong)
