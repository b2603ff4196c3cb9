"""The search of densities: as good as trying thousands of them, in each of many rows."""

import numpy as np
import pytest

from lightning_hetero.core.compression.density_search import SearchSettings, best_densities

GRID = np.geomspace(0.001, 1.0, 49)


@pytest.mark.parametrize("seed", range(5))
def test_each_row_has_the_density_that_brute_force_finds(seed):
    """Sums of a growing and a falling power, as time and penalty are."""
    rng = np.random.default_rng(seed)
    up, down, weight = (rng.uniform(low, high, (40, 1)) for low, high in ((0.2, 1.5), (0.1, 1.0), (0.01, 30.0)))

    def objective(density):
        return weight * density**up + density**-down

    fine = np.geomspace(0.001, 1.0, 20_001)[None, :]
    best = fine[0, objective(fine).argmin(axis=1)]
    np.testing.assert_allclose(best_densities(objective, GRID), best, rtol=2e-3)


def test_more_rounds_are_finer_and_none_is_the_grid_itself():
    def objective(density):
        return np.abs(np.log(density / 0.0123))

    found = [float(best_densities(objective, GRID, SearchSettings(rounds=n))[0]) for n in range(4)]
    errors = [abs(density / 0.0123 - 1.0) for density in found]
    assert found[0] in GRID
    assert errors[1] < 0.01
    assert errors[2] < 1e-3
    assert sorted(errors, reverse=True) == errors


def test_the_best_lies_between_the_least_and_the_greatest_given():
    for sign, end in ((1.0, 0.001), (-1.0, 0.3)):
        assert best_densities(lambda density, sign=sign: sign * density, [0.3, 0.001, 0.1]) == pytest.approx(end)
    assert best_densities(lambda density: density, [0.1]).tolist() == [0.1]


@pytest.mark.parametrize("given", [{"points": 2}, {"rounds": -1}, {"points": 3.5}])
def test_settings_out_of_range_are_refused(given):
    with pytest.raises((TypeError, ValueError), match=next(iter(given))):
        SearchSettings(**given)


def test_a_density_that_no_later_round_beats_stays_the_best():
    """A point below its surroundings, which the finer densities around it miss."""

    def objective(density):
        return np.where(density == 0.1, -1.0, np.abs(np.log(density / 0.12)))

    assert best_densities(objective, [0.01, 0.1, 0.5]).tolist() == [0.1]
