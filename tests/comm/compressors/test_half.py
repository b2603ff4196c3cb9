"""Sums in 16 bits: the mean of what ranks round, the bytes that a ring sends for it, residuals that get lost."""

import pytest
import torch
import torch.distributed as dist

from lightning_hetero.comm.compressors.half import HalfPrecisionAverager, ring_bytes
from lightning_hetero.core.compression.settings import HalfPrecision
from tests.comm.contexts import context_of
from tests.helpers import run_ranks

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class Bucket:
    """What DDP hands to a hook."""

    def __init__(self, flat, last=True):
        self.flat, self.last = flat, last

    def buffer(self):
        return self.flat

    def is_last(self):
        return self.last


def gradient(rank):
    return torch.randn(50, generator=torch.Generator().manual_seed(rank))


def averager(dtype="bfloat16", world_size=2, numel=50):
    parameters = {"a": torch.zeros(numel - 7), "b": torch.zeros(7)}
    return HalfPrecisionAverager.build(HalfPrecision(dtype), context_of(parameters, world_size))


def _average(rank, dtype):
    dist.init_process_group("gloo")
    bucket = Bucket(gradient(rank))
    return averager(dtype).average(bucket).wait().numpy()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bucket_is_the_mean_of_the_rounded_values_of_all_ranks(dtype):
    """Which is rounded as well: both halves and their sum are 16-bit numbers."""
    rounded = [gradient(rank).to(DTYPES[dtype]).double() for rank in range(2)]
    mean = (sum(rounded) / 2).to(DTYPES[dtype]).float()
    for given in map(torch.from_numpy, run_ranks(_average, 2, dtype)):
        assert given.dtype == torch.float32
        assert torch.equal(given, mean)
    assert not torch.equal(mean, (gradient(0) + gradient(1)) / 2), "nothing was rounded"


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_a_ring_sends_all_but_one_part_twice(ranks):
    """Each of ``W`` parts goes round ``W - 1`` times to be summed, and as often to be handed out."""
    assert ring_bytes(ranks) == pytest.approx(sum(2 / ranks for _ in range(ranks - 1)))


@pytest.mark.parametrize("world_size", [2, 5])
def test_report_counts_each_step_once_by_two_bytes_an_element(world_size, monkeypatch):
    monkeypatch.setattr(HalfPrecisionAverager, "__init__", _without_sending(HalfPrecisionAverager.__init__))
    half = averager(world_size=world_size, numel=30)
    for _ in range(3):
        for last in (False, False, True):
            half.average(Bucket(torch.zeros(10), last))
    report = half.take_report()
    assert (report.steps, report.density, report.encode) == (3, 3.0, 0.0)
    assert report.sent == report.received == pytest.approx(3 * 2 * 30 * 2 * (world_size - 1) / world_size)
    assert half.take_report() is None


def _without_sending(init):
    """The averager with a hook that sends nothing."""

    def made(self, *args):
        init(self, *args)
        self._hook = lambda state, bucket: torch.futures.Future()

    return made


def test_it_has_no_residual_and_says_which_get_lost(caplog):
    half = averager()
    half.load_residuals({})
    assert not caplog.messages
    half.load_residuals({"a": torch.ones(43)})
    assert caplog.messages == ["the checkpoint has gradients that were not sent yet, which 16-bit sums cannot send"]
    assert half.residuals() == {}
    assert half.flags.exact
