"""Figures and forms of the papers and of data sheets, and small functions that stand alone."""

import math

import numpy as np
import pytest
from scipy.stats import norm

from lightning_hetero.core.as_published import ThroughputModel, largest_density
from lightning_hetero.core.batching.peak_flops import cpu_peak_flops, gpu_peak_flops
from lightning_hetero.core.normal import normal_cdf, normal_pdf
from lightning_hetero.core.rounded import rounded

TABLE_2 = {  # S Table 2: samples that saturate the GPU, images per second then, on an RTX 2080 Ti, 3090 and 4090
    "ResNet152": ((32, 118), (48, 183), (64, 270)),
    "ViT-B-16": ((20, 99), (32, 148), (28, 300)),
    "Swin-B": ((16, 80), (36, 112), (40, 217)),
}
SIZES = [4, 8, 16, 24, 32, 48, 64, 96, 128]


@pytest.mark.parametrize("model", TABLE_2)
def test_stellatrains_throughput_is_found_from_its_own_times_also_in_noise(model):
    """S eq. 2: ``min(beta / alpha x, beta)``."""
    for alpha, beta in TABLE_2[model]:
        truth, rng = ThroughputModel(alpha, beta), np.random.default_rng(0)
        times = np.array([x / min(beta / alpha * x, beta) for x in SIZES])
        assert [truth.seconds(x) for x in SIZES] == pytest.approx(times)
        assert [x / truth.throughput(x) for x in SIZES] == pytest.approx(times)
        found = ThroughputModel.fit(SIZES, times)
        assert (found.alpha, found.beta) == pytest.approx((alpha, beta), rel=1e-3)
        noisy = ThroughputModel.fit(SIZES * 20, np.tile(times, 20) * rng.normal(1.0, 0.02, 180))
        assert (noisy.alpha, noisy.beta) == pytest.approx((alpha, beta), rel=0.03)


def test_bytes_are_compared_with_bytes():
    """S eq. 6: a model of 1 MB on 12.5 MB/s with steps of 40 ms: half of it fits."""
    budget = 12.5e6 * 0.04
    assert largest_density(budget, lambda d: 1e6 * d, [0.6, 0.1, 0.5, 1.0]) == 0.5
    assert largest_density(1.0, lambda d: 1e6 * d, [0.5, 0.1]) == 0.1
    for pair in (([], []), ([1], [0.0]), ([0], [1.0]), ([1, 2], [1.0])):
        with pytest.raises(ValueError, match="time"):
            ThroughputModel.fit(*pair)


CARDS = [  # name as the driver gives it, capability, multiprocessors, boost clock in GHz, TFLOP/s of the data sheet
    ("Tesla P100-PCIE-16GB", (6, 0), 56, 1.303, 18.7),
    ("Tesla T4", (7, 5), 40, 1.59, 65),
    ("NVIDIA A100-PCIE-40GB", (8, 0), 108, 1.41, 312),
    ("NVIDIA GeForce RTX 3090", (8, 6), 82, 1.695, 71),
    ("NVIDIA GeForce RTX 5090", (12, 0), 170, 2.407, 209.5),
    ("NVIDIA H100 80GB HBM3", (9, 0), 132, 1.83, 989),
    ("NVIDIA B200", (10, 0), 148, 1.85, 2250),
]


@pytest.mark.parametrize(("name", "capability", "units", "ghz", "tera"), CARDS, ids=[card[0] for card in CARDS])
def test_the_table_and_the_clocks_give_the_data_sheet(name, capability, units, ghz, tera):
    assert gpu_peak_flops(name, capability, units, ghz * 1e9) == pytest.approx(tera * 1e12, rel=0.005)
    unknown = gpu_peak_flops(("GeForce" if "GeForce" in name else "NVIDIA") + " X", capability, units, ghz * 1e9)
    assert unknown == pytest.approx(tera * 1e12, rel=0.03), "of a card that the table does not know"


@pytest.mark.parametrize(
    ("name", "capability", "units", "ghz", "tera"),
    [
        ("NVIDIA L20", (8, 9), 92, 2.5, 119.5),  # half the rate of its generation
        ("NVIDIA GeForce RTX 3080 Laptop GPU", (8, 6), 100, 1.0, 51.2),  # another card than the 3080: by its clock
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", (8, 0), 14, 1.41, 312 * 14 / 108),
        ("NVIDIA GeForce GTX 1660 Ti", (7, 5), 24, 1.77, 10.9),  # without tensor cores
        ("new", (13, 0), 100, 1.0, 102.4),  # as the newest that is known
        ("AMD Instinct MI300X", (9, 4), 304, None, 1307.4),
    ],
)
def test_variants_are_other_cards_and_unknown_ones_go_by_their_clock(name, capability, units, ghz, tera):
    clock = None if ghz is None else ghz * 1e9
    assert gpu_peak_flops(name, capability, units, clock) == pytest.approx(tera * 1e12, rel=0.01)


def test_ratios_of_the_papers_clusters():
    """D sec. III-B: a P100 beside 48 cores of a Xeon gets 0.81 of the batch; CPUs alone go by their cores."""
    p100, xeon = gpu_peak_flops("Tesla P100-PCIE-16GB", (6, 0), 56), cpu_peak_flops(48, "AVX512")
    assert p100 / (p100 + xeon) == pytest.approx(0.813, abs=0.003)
    assert cpu_peak_flops(12, "AVX2") == 4 * cpu_peak_flops(3, "AVX2") == pytest.approx(12 * 32 * 1.8e9)
    assert cpu_peak_flops(4, "VSX") == cpu_peak_flops(4) > 0
    amd = gpu_peak_flops("AMD X", (9, 4), 304, 2.1e9, architecture="gfx942:sramecc+:xnack-")
    assert amd == pytest.approx(1307.4e12, rel=0.01)


def test_the_normal_distribution_is_scipys_from_end_to_end():
    z = np.concatenate([np.linspace(-37.0, 37.0, 4001), [-1e300, 1e300, -np.inf, np.inf, np.nan]]).reshape(-1, 2)
    np.testing.assert_allclose(normal_cdf(z), norm.cdf(z), rtol=2e-8, atol=3e-16)
    np.testing.assert_allclose(normal_pdf(z[:2000]), norm.pdf(z[:2000]), rtol=1e-12)


def test_numbers_of_log_lines_have_three_digits_and_no_power_of_ten():
    values = (-999.4, 999.6, 123456.0, 0.001234, math.nan, math.inf, 0.0)
    assert [rounded(value) for value in values] == ["-999", "1000", "123456", "0.00123", "nan", "inf", "0"]
