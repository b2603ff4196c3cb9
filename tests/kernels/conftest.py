"""Small tiles under Triton's interpreter, so that it has several of them to run without taking minutes."""

import pytest


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    from tests.kernels.backends import DEVICE, TRITON  # not before `interpreted.py` has said that it wants Triton

    if not (TRITON and DEVICE.type == "cpu"):
        return
    from lightning_hetero.compression.triton_gpu import launch
    from lightning_hetero.optim.sparse.triton_gpu import backend

    monkeypatch.setattr(launch, "TILING", launch.Tiling(blocks=16, repeats=2, scores=32))
    monkeypatch.setattr(backend, "SHAPE", backend.LaunchShape(tile=16))
