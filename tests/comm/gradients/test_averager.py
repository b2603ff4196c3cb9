"""Averages of buckets: the mean of plain DDP, a user's hook, what a step was and what was sent for it."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from lightning_hetero.comm.gradients.averager import DDPMean, GradientAverager, StepFlags, StepReport, UserHook
from lightning_hetero.comm.gradients.squared_norms import BucketSquares
from tests.helpers import run_ranks


class Bucket:
    """What DDP hands to a hook."""

    def __init__(self, flat):
        self.flat = flat

    def buffer(self):
        return self.flat

    def parameters(self):
        return [torch.nn.Parameter(torch.zeros_like(self.flat))]


class Silent(GradientAverager):
    """Leaves each bucket as it is, and reports what it is told."""

    settled = 0

    def average(self, bucket, squares=None):
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def settle(self):
        self.settled += 1


def gradient(rank):
    return torch.randn(40, generator=torch.Generator().manual_seed(rank))


def _mean(rank, with_norms):
    dist.init_process_group("gloo")
    squares = BucketSquares() if with_norms else None
    flat = gradient(rank)
    mean = DDPMean(3).average(Bucket(flat), squares).wait()
    mean = mean[0] if isinstance(mean, list) else mean
    taken = None if squares is None else [float(value) for value in squares.local]
    return mean.numpy().copy(), flat.numpy().copy(), taken


@pytest.mark.parametrize("with_norms", [False, True])
def test_mean_of_plain_ddp(with_norms):
    """In place; norms are those of this rank's gradient before it was weighted."""
    expected = sum(gradient(rank) for rank in range(3)) / 3
    for rank, (mean, buffer, taken) in enumerate(run_ranks(_mean, 3, with_norms)):
        torch.testing.assert_close(torch.from_numpy(mean), expected)
        assert (buffer == mean).all()
        assert taken == (pytest.approx([float(gradient(rank).square().sum())]) if with_norms else None)


class Way:
    """A topology that keeps what it is to add up."""

    def __init__(self, flat):
        self.flat, self.given = flat, []

    def __getattr__(self, name):
        def add_up(buffer):
            self.given.append(buffer)
            return buffer

        return add_up


def test_a_hierarchy_adds_up_the_weighted_bucket():
    way, flat = Way(flat=False), gradient(0)
    expected = flat / 4
    assert DDPMean(4, way).average(Bucket(flat)) is flat
    assert way.given == [flat]
    torch.testing.assert_close(flat, expected)


def test_one_rank_alone_leaves_its_gradient_to_the_bit():
    flat = gradient(0)
    DDPMean(1, Way(flat=False)).average(Bucket(flat))
    assert torch.equal(flat, gradient(0))


def test_a_hook_of_the_users_gets_its_state_and_the_bucket():
    bucket, seen = Bucket(gradient(0)), []

    def hook(state, given):
        seen.append((state, given))
        return "future"

    averager = UserHook(hook, "state", 2)
    assert averager.average(bucket) == "future"
    assert seen == [("state", bucket)]
    assert averager.user_hook is hook


def test_buckets_may_be_laid_out_anew_unless_a_hook_knows_them():
    assert DDPMean(2).unsupported_reason() is None
    assert UserHook(print, None, 2).unsupported_reason() is None
    reason = UserHook(print, PowerSGDState(None), 2).unsupported_reason()
    assert "PowerSGDState" in reason
    assert "compression='powersgd'" in reason


def test_report_sums_steps_until_it_is_taken():
    averager = Silent(2)
    assert averager.take_report() is None
    averager.report.add(100.0, 1.0)
    averager.report.add(50.0, 0.25, encode=0.5)
    assert averager.take_report() == StepReport(steps=2, sent=150.0, received=150.0, density=1.25, encode=0.5)
    assert averager.take_report() is None
    assert averager.settled == 3, "a step that is not decided yet may add to it"


def test_flags_of_a_step_are_those_of_its_beginning():
    flags = StepFlags()
    assert (flags.exact, flags.single_message, flags.skipped) == (True, False, False)
    flags.begin(exact=False, single_message=True)
    assert (flags.exact, flags.single_message, flags.skipped) == (False, True, False)
    flags.skip()
    assert flags.skipped is True
    flags.begin(exact=True)
    assert (flags.exact, flags.single_message, flags.skipped) == (True, False, False)
    flags.add_other_step()
    assert not flags.exact


def test_a_skip_may_depend_on_a_number_of_the_device():
    flags, number = StepFlags(), torch.tensor(1.0)
    flags.skip(number)
    assert flags.skipped is number


def test_an_averager_is_by_default_exact_decided_and_has_nothing_to_keep():
    averager = Silent(2)
    assert averager.end_step(may_be_stale=True)
    assert (averager.stale_parts, averager.undecided, averager.blocks, averager.user_hook) == (False, False, None, None)
    assert (averager.residuals(), averager.extra_state()) == ({}, {})
    assert (averager.takes_norms, averager.may_be_stale, averager.skips_nonfinite) == (False, False, False)
    assert (DDPMean.takes_norms, DDPMean.may_be_stale, DDPMean.skips_nonfinite) == (True, True, False)


def test_averagers_share_no_report():
    one, other = Silent(2), Silent(2)
    one.report.add(1.0, 1.0)
    one.flags.skip()
    assert other.report == StepReport()
    assert other.flags == StepFlags()
