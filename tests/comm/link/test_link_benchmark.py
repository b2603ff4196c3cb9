"""Measurements of a link: the best of some, of the slowest rank; the time to encode in proportion to the gradient."""

from dataclasses import FrozenInstanceError, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightning_hetero.comm.link import link_benchmark as module
from lightning_hetero.comm.link.link_benchmark import (
    BENCHMARK,
    all_reduce_seconds,
    encode_seconds,
    exchange_seconds,
    latency,
)

CPU = torch.device("cpu")


class Link:
    """An exchange that takes given seconds, by a clock of its own; barriers take an hour."""

    def __init__(self, monkeypatch, seconds, size=3):
        self.now, self.size, self.seconds, self.sent = 0.0, size, iter(seconds), []
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(module, "dist", SimpleNamespace(barrier=lambda: self.take(3600.0)))

    def take(self, seconds):
        self.now += seconds

    def all_gather(self, rows):
        self.sent.append((tuple(rows.shape), rows.dtype))
        return SimpleNamespace(wait=lambda: self.take(next(self.seconds)))


def test_settings_are_frozen():
    with pytest.raises(FrozenInstanceError):
        BENCHMARK.repeats = 1


@pytest.mark.parametrize("repeats", [1, 3, 4])
def test_the_best_exchange_counts_and_the_wait_for_others_does_not(repeats, monkeypatch):
    monkeypatch.setattr(module, "BENCHMARK", replace(BENCHMARK, repeats=repeats))
    seconds = [0.5, 0.25, 4.0, 0.125][:repeats]
    link = Link(monkeypatch, seconds)
    assert exchange_seconds(1000, link, CPU) == min(seconds)
    assert link.sent == [((3, 1000), torch.uint8)] * repeats


@pytest.mark.parametrize(("size", "elements"), [(4096, 1024), (2, 1)])
def test_the_best_all_reduce_counts_without_the_first_that_connects(size, elements, monkeypatch):
    link, summed = Link(monkeypatch, [1e-3, 0.5, 0.25, 0.75]), []

    def all_reduce(values, group):
        summed.append((values.numel(), values.dtype, group))
        link.take(next(link.seconds))

    monkeypatch.setattr(module.dist, "all_reduce", all_reduce, raising=False)
    assert all_reduce_seconds(size, CPU, "ours") == 0.25
    assert summed == [(elements, torch.float32, "ours")] * (BENCHMARK.repeats + 1)


def test_latency_is_that_of_the_slowest_rank_with_a_small_message(monkeypatch):
    monkeypatch.setattr(module, "BENCHMARK", replace(BENCHMARK, latency_bytes=10, repeats=2))
    link = Link(monkeypatch, [0.5, 0.25])
    others = [[0.125], [0.75]]
    control = SimpleNamespace(gather=lambda mine: np.stack([mine, *map(np.array, others)]))
    assert latency(control, link, CPU) == 0.75
    others.pop()
    link.seconds = iter([0.5, 0.25])
    assert latency(control, link, CPU) == 0.25
    assert link.sent == [((3, 10), torch.uint8)] * 4


class Ticks:
    """A clock whose every reading comes so much later than the one before."""

    def __init__(self, *steps):
        self.now, self.steps = 0.0, iter(steps)

    def perf_counter(self):
        self.now += next(self.steps)
        return self.now


@pytest.mark.parametrize(("numel", "factor"), [(64, 1.0), (128, 1.0), (1024, 8.0)])
def test_encoding_of_a_large_gradient_is_extrapolated_from_the_best(numel, factor, monkeypatch):
    monkeypatch.setattr(module, "BENCHMARK", replace(BENCHMARK, max_elements=128, repeats=3))
    monkeypatch.setattr(module, "time", Ticks(9.0, 0.5, 9.0, 0.25, 9.0, 2.0))
    assert encode_seconds(numel, 0.1, "float32") == 0.25 * factor


@pytest.mark.parametrize(("density", "blocks"), [(0.25, 1), (0.5, 2), (1.0, 8)])
def test_a_rank_of_two_encodes_its_part_of_the_density(density, blocks, monkeypatch):
    """Of a gradient of eight blocks; error feedback, selection, reading and merging are all in it."""
    monkeypatch.setattr(module, "BENCHMARK", replace(BENCHMARK, repeats=2))
    made = []

    def encoder(layout, form):
        made.append((module.cpu_encoder.encoder(layout, form), form))
        return made[-1][0]

    encoder.encoder = module.cpu_encoder
    monkeypatch.setattr(module, "cpu_encoder", encoder)
    assert encode_seconds(128, density, "bfloat16") > 0.0
    ((_, form),) = made
    assert (form.num_blocks, form.k, form.block, form.value_dtype) == (8, blocks, 16, "bfloat16")
