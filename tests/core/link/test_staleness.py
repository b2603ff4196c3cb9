"""Which buckets are delayed: step times by hand, the choice over random links, no going to and fro."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.core.link.bandwidth import BandwidthSettings, LinkEstimate, sum_bytes
from lightning_hetero.core.link.staleness import BucketTimes, StaleHysteresis, StaleSettings, choose_synchronous

seconds = st.floats(0.0, 10.0)
links = st.lists(st.tuples(seconds, seconds), min_size=1, max_size=6).map(
    lambda pairs: BucketTimes(tuple(np.cumsum([a for a, _ in pairs]) + 0.1), tuple(b for _, b in pairs))
)


@pytest.mark.parametrize(
    ("transfer", "fresh", "step"),
    [
        ((1.0, 1.0), 2, 5.0),  # the last bucket is ready at 4 and travels for 1
        ((1.0, 1.0), 1, 4.0),  # the first is ready at 3 and there at 4
        ((2.0, 1.0), 1, 5.0),  # it is there at 5, a second late
        ((2.0, 1.0), 0, 4.0),
        ((6.0, 4.0), 0, 10.0),  # the link is busy all the time
        ((6.0, 4.0), 2, 13.0),  # and idle for the 3 s before the first bucket
    ],
)
def test_step_times_by_hand(transfer, fresh, step):
    assert BucketTimes((3.0, 4.0), transfer).step_time(fresh) == pytest.approx(step)


@given(links)
def test_a_fresh_bucket_more_never_makes_a_step_shorter(times):
    steps = [times.step_time(fresh) for fresh in range(len(times.ready) + 1)]
    assert all(later >= earlier - 1e-9 for earlier, later in zip(steps, steps[1:], strict=False))
    assert steps[0] >= times.compute - 1e-9
    assert steps[0] >= sum(times.transfer) - 1e-9


@given(links)
def test_as_many_are_fresh_as_fit(times):
    """From the state with everything fresh: the most that cost nothing, by trying all; or all, for want of a gain."""
    n = len(times.ready)
    steps = [times.step_time(fresh) for fresh in range(n + 1)]
    most = max(fresh for fresh in range(n + 1) if steps[fresh] <= (1 + StaleSettings().tolerance) * steps[0])
    choice = choose_synchronous(times, n)
    gains = steps[most] <= (1 - 0.03) * steps[n]
    assert choice.synchronous == (most if gains else n)
    assert choice.communication_bound == (sum(times.transfer) > (1 + StaleSettings().tolerance) * times.compute)
    assert choice.communication_bound == ("communication-bound" in choice.describe())


@given(links, st.data())
def test_a_choice_for_a_steady_link_stays(times, data):
    fresh = choose_synchronous(times, data.draw(st.integers(0, len(times.ready)))).synchronous
    assert choose_synchronous(times, fresh).synchronous == fresh


def test_a_link_that_scatters_is_no_reason_to_go_to_and_fro():
    """Six buckets of 10 to 40 ms on links of all rates, which scatter by 10 % from look to look."""
    rng = np.random.default_rng(0)
    for rate in np.geomspace(0.2, 20, 25):
        times = BucketTimes((0.06, 0.07, 0.08, 0.09, 0.1, 0.11), tuple(np.array([1, 2, 3, 4, 4, 2]) * 0.01 / rate))
        fresh, seen = len(times.ready), []
        for _ in range(60):
            fresh = choose_synchronous(times.slowed(rng.uniform(0.9, 1.1)), fresh).synchronous
            seen.append(fresh)
        changes = np.flatnonzero(np.diff(seen))
        assert len(changes) <= 3, (rate, seen)


@pytest.mark.parametrize(
    ("ready", "transfer", "says"),
    [((), (), "one per bucket"), ((1.0,), (1.0, 2.0), "one per bucket"), ((2.0, 1.0), (1.0, 1.0), "decreases")],
)
def test_wrong_times_are_refused(ready, transfer, says):
    with pytest.raises(ValueError, match=says):
        BucketTimes(ready, transfer)
    with pytest.raises(ValueError, match="number of buckets"):
        choose_synchronous(BucketTimes((1.0,), (1.0,)), 2)


# the link


@given(st.floats(1e3, 1e10), st.floats(1e3, 1e10))
def test_estimate_is_between_and_nearer_to_the_slower(old, new):
    after = LinkEstimate(old).observe(new).rate
    assert min(old, new) * (1 - 1e-9) <= after <= max(old, new) * (1 + 1e-9)
    weight = (1 / after - 1 / old) / (1 / new - 1 / old) if abs(old - new) > 1e-3 * old else None
    s = BandwidthSettings()
    assert weight is None or weight == pytest.approx(s.weight_of_slower if new < old else s.weight_of_faster, rel=1e-3)


@pytest.mark.parametrize("nothing", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_rate_changes_nothing(nothing):
    assert LinkEstimate(5.0).observe(nothing) == LinkEstimate(5.0)
    assert LinkEstimate().observe(nothing).rate is None


def test_a_stall_is_believed_at_once_and_forgotten_within_a_few_looks():
    """A link of 12.5 MB/s that hardly moves once: a quarter of its rate is back after six looks."""
    link = LinkEstimate(12.5e6).observe(1e5)
    assert link.rate < 1.3e5
    for _ in range(6):
        link = link.observe(12.5e6)
    assert link.rate > 12.5e6 / 4


def test_bytes_of_a_sum():
    assert [sum_bytes(100.0, n) for n in (1, 2, 4, 8)] == [0.0, 100.0, 150.0, 175.0]


def observed(state, stale, gain, rounds):
    for _ in range(rounds):
        state, stale = state.observe(stale, gain)
    return state, stale


def test_a_round_that_speaks_against_stale_messages_begins_the_count_anew():
    rounds = StaleSettings().rounds
    state, stale = observed(StaleHysteresis(), False, 0.2, rounds - 1)
    state, stale = observed(state, stale, 0.04, 1)
    assert not observed(state, stale, 0.2, rounds - 1)[1]
    assert observed(state, stale, 0.2, rounds)[1]


def test_messages_stay_stale_while_that_gains_anything_worth_a_word():
    """What made them so has to be five times as much, so that a gain in between turns them neither way."""
    for gain, stale, then in ((0.03, False, False), (0.03, True, True), (0.005, True, False), (0.06, False, True)):
        assert observed(StaleHysteresis(), stale, gain, StaleSettings().rounds)[1] is then
