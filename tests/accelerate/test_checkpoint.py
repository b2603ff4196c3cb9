"""States of an ``Accelerator`` whose files have changed since: named on every rank, or passed over if none is named."""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.utils import ProjectConfiguration
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetero.accelerate import HeteroAccelerator, HeteroPlugin
from lightning_hetero.core import CheckpointStateError, DamagedCheckpointError
from tests.helpers import Points, run_ranks, save_late
from tests.loops import flat, network

FILES = ("model.safetensors", "optimizer.bin", "random_states_1.pkl")


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 16
    path.write_bytes(content)


def _edited(state):
    del state["checksums"]
    state["planner"] = [1]
    return state


def _damaged(rank, folder, monkeypatch):
    if rank == 1:
        save_late(monkeypatch, Path(folder, "checkpoints", "checkpoint_1", "hetero_state.sha256"))
    said = []
    logging.getLogger("lightning_hetero").addHandler(handler := logging.Handler(logging.WARNING))
    handler.emit = lambda record: said.append(record.getMessage())
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
    plugin = HeteroPlugin(compression="block_topk")
    accelerator = HeteroAccelerator(cpu=True, hetero_plugin=plugin, project_config=project)
    model, optimizer, loader = accelerator.prepare(
        model := network(), torch.optim.Adam(model.parameters(), 0.01), DataLoader(Points(30), 5, shuffle=True)
    )
    weights, paths = [], [Path(folder, "checkpoints", f"checkpoint_{i}") for i in range(3)]
    for x, y, _ in loader:
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        accelerator.save_state()
        weights.append(flat(model))

    def change(do):
        accelerator.wait_for_everyone()
        if rank == 0:
            do()
        accelerator.wait_for_everyone()

    found = {}
    accelerator.load_state()
    found["whole"] = flat(model), len(said)
    change(lambda: flip(paths[2] / "model.safetensors", -1))
    accelerator.load_state()
    found["newest"] = flat(model), said[-1:] if rank == 0 else []
    for file in FILES:
        change(lambda file=file: flip(paths[1] / file, 200))
        with pytest.raises(DamagedCheckpointError) as error:
            accelerator.load_state(str(paths[1]))
        found[file] = str(error.value)
        change(lambda file=file: flip(paths[1] / file, 200))
    accelerator.load_state(str(paths[1]))

    def edit():
        path = paths[0] / "hetero_state.pt"
        torch.save(_edited(torch.load(path, weights_only=True)), path)
        (paths[0] / "hetero_state.sha256").unlink()

    change(edit)
    with pytest.raises(CheckpointStateError, match="what the policy has learned"):
        accelerator.load_state(str(paths[0]))
    accelerator.end_training()
    return weights, found


def test_a_state_that_changed_is_named_on_every_rank_or_passed_over(tmp_path, monkeypatch):
    for rank, (weights, found) in enumerate(run_ranks(_damaged, 2, str(tmp_path), monkeypatch)):
        np.testing.assert_array_equal(found["whole"][0], weights[2])
        assert found["whole"][1] == 0
        np.testing.assert_array_equal(found["newest"][0], weights[1])
        assert [text.endswith("checkpoint_1") for text in found["newest"][1]] == [True] * (rank == 0)
        for file in FILES:
            assert f"checkpoint_1 is not a whole checkpoint ({file} is not as it was written)" in found[file]
            assert "The newest whole one beside it: checkpoint_0" in found[file]
