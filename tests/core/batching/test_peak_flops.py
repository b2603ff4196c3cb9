"""Open-loop capacities against data sheets: ratios between generations, and those of the paper's clusters."""

import pytest

from lightning_hetero.core.batching.peak_flops import TERA, cpu_peak_flops, gpu_peak_flops

# name as the driver gives it, capability, multiprocessors, boost clock in GHz, TFLOP/s of the data sheet
CARDS = [
    ("Tesla P100-PCIE-16GB", (6, 0), 56, 1.303, 18.7),
    ("Tesla P100-SXM2-16GB", (6, 0), 56, 1.48, 21.2),
    ("Tesla P4", (6, 1), 20, 1.063, 5.5),
    ("Tesla P40", (6, 1), 30, 1.531, 11.8),
    ("Tesla V100-SXM2-32GB", (7, 0), 80, 1.53, 125),
    ("Tesla V100-PCIE-16GB", (7, 0), 80, 1.38, 112),
    ("Tesla V100S-PCIE-32GB", (7, 0), 80, 1.597, 130),
    ("Tesla T4", (7, 5), 40, 1.59, 65),
    ("NVIDIA A100-SXM4-40GB", (8, 0), 108, 1.41, 312),
    ("NVIDIA A100-PCIE-40GB", (8, 0), 108, 1.41, 312),
    ("NVIDIA A30", (8, 0), 56, 1.44, 165),
    ("NVIDIA A10", (8, 6), 72, 1.695, 125),
    ("NVIDIA RTX A6000", (8, 6), 84, 1.8, 154.8),
    ("NVIDIA L4", (8, 9), 58, 2.04, 121),
    ("NVIDIA L40S", (8, 9), 142, 2.52, 362),
    ("NVIDIA GeForce RTX 3090", (8, 6), 82, 1.695, 71),
    ("NVIDIA GeForce RTX 4090", (8, 9), 128, 2.52, 165),
    ("NVIDIA GeForce RTX 5090", (12, 0), 170, 2.407, 209.5),
    ("NVIDIA H100 PCIe", (9, 0), 114, 1.62, 756),
    ("NVIDIA H100 80GB HBM3", (9, 0), 132, 1.83, 989),
    ("NVIDIA H200", (9, 0), 132, 1.83, 989),
    ("NVIDIA B200", (10, 0), 148, 1.85, 2250),
]


@pytest.mark.parametrize(("name", "capability", "units", "ghz", "tera"), CARDS, ids=[card[0] for card in CARDS])
def test_table_and_clocks_give_the_data_sheet(name, capability, units, ghz, tera):
    assert gpu_peak_flops(name, capability, units, ghz * 1e9) == pytest.approx(tera * 1e12, rel=0.005)
    family = "GeForce" if "GeForce" in name else "NVIDIA"
    unknown = gpu_peak_flops(f"{family} X", capability, units, ghz * 1e9)
    assert unknown == pytest.approx(tera * 1e12, rel=0.03), "the fallback, for a card that the table does not know"


@pytest.mark.parametrize(("name", "units", "tera"), [("NVIDIA L20", 92, 119.5), ("NVIDIA L40", 142, 181)])
def test_cards_with_half_the_rate_of_their_generation(name, units, tera):
    """Their clocks would give twice as much."""
    assert gpu_peak_flops(name, (8, 9), units, 2.5e9) == tera * 1e12


def test_ratios_of_the_papers_clusters():
    t4, p4 = gpu_peak_flops("Tesla T4", (7, 5), 40), gpu_peak_flops("Tesla P4", (6, 1), 20)
    assert t4 / p4 == pytest.approx(65 / 5.5)
    p100, xeon = gpu_peak_flops("Tesla P100-PCIE-16GB", (6, 0), 56), cpu_peak_flops(48, "AVX512")
    assert p100 / (p100 + xeon) == pytest.approx(0.813, abs=0.003)
    assert cpu_peak_flops(12, "AVX2") / cpu_peak_flops(3, "AVX2") == 4  # CPUs alone: by cores


def test_another_variant_of_a_name_is_another_card():
    def of(name, units=100):
        return gpu_peak_flops(name, (8, 6), units, 1e9)

    assert of("NVIDIA A10G") == 70e12
    assert of("NVIDIA GeForce RTX 3090 Ti") == 80e12
    by_clock = of("NVIDIA GeForce unheard of")
    assert of("NVIDIA GeForce RTX 3080 Ti") == of("NVIDIA GeForce RTX 3080 Laptop GPU") == by_clock
    assert of("NVIDIA GeForce RTX 4080 SUPER") == by_clock
    assert gpu_peak_flops("NVIDIA A100-SXM4-40GB MIG 1g.5gb", (8, 0), 14, 1.41e9) == pytest.approx(
        312e12 * 14 / 108, rel=0.01
    )


def test_what_is_newer_or_unknown_counts_as_the_newest_before_it():
    assert gpu_peak_flops("new", (13, 0), 10, 1e9) == gpu_peak_flops("new", (12, 0), 10, 1e9)
    assert gpu_peak_flops("old", (3, 5), 10, 1e9) == gpu_peak_flops("old", (5, 0), 10, 1e9)
    assert gpu_peak_flops("new", (9, 0), 10) > 0
    assert cpu_peak_flops(4, "VSX") == cpu_peak_flops(4)


@pytest.mark.parametrize(
    ("name", "units", "ghz", "tera"), [("GTX 1660 Ti", 24, 1.77, 10.9), ("GTX 1650 SUPER", 20, 1.725, 8.8)]
)
def test_turing_without_tensor_cores_has_twice_its_float32(name, units, ghz, tera):
    assert gpu_peak_flops(f"NVIDIA GeForce {name}", (7, 5), units, ghz * 1e9) == pytest.approx(tera * 1e12, rel=0.01)


def test_orin_has_the_tensor_cores_of_the_a100():
    """67 TOPS of sparse int8 in the data sheet of the Orin Nano Super: a quarter of that in dense float16."""
    assert gpu_peak_flops("Orin", (8, 7), 8, 1.02e9) == pytest.approx(67e12 / 4, rel=0.01)


def test_amd_by_name_and_by_architecture():
    assert gpu_peak_flops("AMD Instinct MI300X", (9, 4), 304) == 1307.4e12
    other = gpu_peak_flops("AMD X", (9, 4), 304, 2.1e9, architecture="gfx942:sramecc+:xnack-")
    assert other == pytest.approx(1307.4e12, rel=0.01)


def test_every_figure_is_a_positive_number():
    assert all(tera > 0 for tera in TERA.values())


def test_words_that_change_nothing_of_a_card_are_passed_over():
    """A card of Pascal's has no tensor cores that would sum up at half rate."""
    assert gpu_peak_flops("NVIDIA A100-PCIE-40GB", (8, 0), 1) == 312e12
    assert gpu_peak_flops("NVIDIA GeForce MX150", (6, 1), 3, 1.5e9) == 3 * 1.5e9 * 256
