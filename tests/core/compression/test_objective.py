"""StellaTrain's equations by hand, and the search against trying everything."""

import numpy as np
import pytest

from lightning_hetero.core.batching.optperf import solve_optperf
from lightning_hetero.core.compression.objective import minimise_time_to_accuracy, time_to_accuracy
from lightning_hetero.core.timing.step_time import ClusterTimeModel, NodeTimeModel

CLUSTER = ClusterTimeModel(
    (NodeTimeModel(1e-4, 5e-3, 2e-4, 1e-3), NodeTimeModel(3e-4, 5e-3, 6e-4, 1e-3)), 0.2, 0.0, 1e-3
)
TOTALS, DENSITIES = [32, 64, 128, 256, 512], [0.001, 0.01, 0.1, 1.0]
STEP_TIMES = {total: solve_optperf(CLUSTER, total, min_local=(1, 1)).step_time for total in TOTALS}


def message(density):
    return 4e6 * density


def penalty(density, total):
    return 0.1 * -np.log10(density) + total / 1000


def search(bandwidth, step_times=STEP_TIMES, stale=True, densities=DENSITIES):
    return minimise_time_to_accuracy(
        step_times, densities, transfer=lambda d: message(d) / bandwidth, penalty=penalty, stale=stale
    )


def test_time_to_accuracy_is_seconds_per_sample_times_the_extra_samples():
    assert time_to_accuracy(200, 0.5, 0.2) == pytest.approx(0.003)
    assert time_to_accuracy(np.array([100, 200]), 0.5, np.array([0.0, 1.0])).tolist() == pytest.approx([0.005, 0.005])


@pytest.mark.parametrize("stale", [True, False])
@pytest.mark.parametrize("bandwidth", [1e5, 1e6, 1.25e7, 1.25e8, 1e10])
def test_search_is_as_good_as_trying_every_split_and_density(bandwidth, stale):
    found = search(bandwidth, stale=stale)
    best = np.inf
    for total in TOTALS:
        step = min(CLUSTER.step_time([first, total - first]) for first in range(1, total))
        for density in np.geomspace(0.001, 1.0, 500):
            seconds = message(density) / bandwidth
            if not stale:
                best = min(best, time_to_accuracy(total, step + seconds, penalty(density, total)))
            elif seconds <= step:
                best = min(best, time_to_accuracy(total, step, penalty(density, total)))
    if np.isfinite(best):
        assert found.objective <= best * (1 + 2e-3)
        assert not found.communication_bound
    assert found.objective == pytest.approx(
        time_to_accuracy(found.total_batch_size, found.step_time, penalty(found.density, found.total_batch_size))
    )


def test_density_lies_between_those_that_are_given():
    found = search(1e6, {128: 0.05})
    assert found.density not in DENSITIES
    assert found.transfer == pytest.approx(0.05, rel=0.01)
    assert found.transfer <= 0.05


def test_hidden_messages_fit_into_a_step_whatever_more_of_them_would_be_worth():
    """Eq. 6 is a bound, no price; where every step waits for its messages, their time is one."""
    found = {
        stale: minimise_time_to_accuracy(
            {128: 0.05},
            DENSITIES,
            transfer=lambda d: message(d) / 1e6,
            penalty=lambda density, total: 0.01 / density**2,
            stale=stale,
        )
        for stale in (True, False)
    }
    assert found[True].transfer == pytest.approx(0.05, rel=0.01)
    assert found[True].transfer <= 0.05
    assert found[False].transfer > 0.2


@pytest.mark.parametrize("stale", [True, False])
def test_a_thinner_link_never_gets_a_higher_density_at_the_same_total(stale):
    found = [search(b, {128: STEP_TIMES[128]}, stale).density for b in np.geomspace(1e4, 1e10, 30)]
    assert (np.diff(found) >= -1e-3 * np.array(found[1:])).all()
    assert found[0] == 0.001
    assert found[-1] == 1.0


def test_a_link_that_carries_nothing_in_time_is_said_to_be_the_bound():
    found = search(1e4, {128: 0.05})
    assert found.density == 0.001
    assert found.communication_bound
    assert found.describe().endswith("communication-bound: even the least density takes 400 ms on the link")
    assert "communication-bound" not in search(1e6, {128: 0.05}).describe()


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="step_times is empty"):
        search(1e6, {})
    with pytest.raises(ValueError, match="densities is empty"):
        search(1e6, densities=[])
    with pytest.raises(ValueError, match="above -1"):
        minimise_time_to_accuracy({32: 0.1}, DENSITIES, transfer=message, penalty=lambda d, x: -1.0)
