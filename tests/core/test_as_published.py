"""What exists only to compare with the papers: the split of eq. 8, StellaTrain's throughput model and its eq. 6."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.core.as_published import ThroughputModel, bootstrap_sizes, largest_density

moderate = settings(max_examples=200, deadline=None, derandomize=True)


@settings(moderate, max_examples=60)
@given(st.lists(st.floats(1e-4, 10), min_size=1, max_size=8), st.integers(0, 2000))
def test_bootstrap_is_equation_8(times, extra):
    n = len(times)
    total = n + extra
    sizes = bootstrap_sizes(total, [8] * n, times, min_local=0)
    exact = total * (1 / np.array(times)) / (1 / np.array(times)).sum()
    assert sum(sizes) == total
    assert np.abs(np.array(sizes) - exact).max() < 1 + 1e-6


def test_bootstrap_goes_by_time_per_sample_and_keeps_bounds():
    assert bootstrap_sizes(40, [10, 20], [0.1, 0.2]) == (20, 20)
    assert bootstrap_sizes(40, [20, 20], [0.1, 0.3], max_local=25) == (25, 15)
    assert bootstrap_sizes(40, [20, 20], [0.1, 100.0], min_local=4) == (36, 4)


@pytest.mark.parametrize("times", [[0.1], [0.1, -0.1], [0.1, float("nan")], [[0.1, 0.1]]])
def test_bootstrap_names_bad_times(times):
    with pytest.raises(ValueError, match="one compute time"):
        bootstrap_sizes(40, [20, 20], times)


TABLE_2 = {  # (alpha, beta): samples that saturate the GPU, images per second then
    "ResNet152": {"RTX 2080 Ti": (32, 118), "RTX 3090": (48, 183), "RTX 4090": (64, 270)},
    "ViT-B-16": {"RTX 2080 Ti": (20, 99), "RTX 3090": (32, 148), "RTX 4090": (28, 300)},
    "Swin-B": {"RTX 2080 Ti": (16, 80), "RTX 3090": (36, 112), "RTX 4090": (40, 217)},
}


GPUS = [pytest.param(pair, id=f"{m}, {gpu}") for m, row in TABLE_2.items() for gpu, pair in row.items()]


SIZES = [4, 8, 16, 24, 32, 48, 64, 96, 128]


@pytest.mark.parametrize("pair", GPUS)
def test_table_2_is_found_from_its_own_times(pair):
    truth = ThroughputModel(*pair)
    times = [truth.seconds(x) for x in SIZES]
    found = ThroughputModel.fit(SIZES, times)
    assert (found.alpha, found.beta) == pytest.approx(pair, rel=1e-3)
    for x, seconds in zip(SIZES, times, strict=True):
        assert x / truth.throughput(x) == pytest.approx(seconds)


@pytest.mark.parametrize("pair", GPUS)
def test_table_2_is_found_in_noise(pair):
    rng, truth, errors = np.random.default_rng(0), ThroughputModel(*pair), []
    for _ in range(10):
        times = [truth.seconds(x) * rng.normal(1.0, 0.02) for x in SIZES * 3]
        found = ThroughputModel.fit(SIZES * 3, times)
        errors.append([found.alpha / truth.alpha - 1, found.beta / truth.beta - 1])
    assert np.abs(np.median(errors, axis=0)).max() < 0.03


@pytest.mark.parametrize(("sizes", "seconds"), [([], []), ([1], [0.0]), ([0], [1.0]), ([1, 2], [1.0])])
def test_nothing_to_fit_is_refused(sizes, seconds):
    with pytest.raises(ValueError, match="one time above 0"):
        ThroughputModel.fit(sizes, seconds)


def test_bytes_are_compared_with_bytes():
    """A model of 1 MB on 12.5 MB/s with steps of 40 ms: half of it fits; so says 1 - B / m x / f."""
    budget = 12.5e6 * 0.04
    assert largest_density(budget, lambda d: 1e6 * d, [0.1, 0.5, 0.6, 1.0]) == 0.5
    assert pytest.approx(0.5) == 1 - 12.5e6 / 1e6 * 0.04
    assert largest_density(1.0, lambda d: 1e6 * d, [0.1, 0.5]) == 0.1
    with pytest.raises(ValueError, match="densities is empty"):
        largest_density(1.0, lambda d: d, [])
