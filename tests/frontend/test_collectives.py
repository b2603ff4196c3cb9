"""Collectives outside the backward pass: waiting in them does not count as computing."""

from contextlib import contextmanager
from types import SimpleNamespace

import torch

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.frontend.collectives import gather_unequal


def test_a_gather_of_unequal_rows_does_not_count_as_computing():
    inside, seen = [], []

    @contextmanager
    def excluded():
        inside.append(True)
        yield
        inside.clear()

    engine = SimpleNamespace(excluded=excluded, control=ControlPlane(0, 1))
    gather_unequal(engine, torch.ones(2), lambda tensor: (seen.append(bool(inside)), tensor)[1])
    assert seen == [True]
