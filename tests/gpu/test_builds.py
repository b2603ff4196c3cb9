"""A part of what ``python tests/gpu/builds.py`` compiles: every kernel for one GPU, the largest for the others."""

import pytest

pytest.importorskip("triton")

from tests.gpu import builds  # noqa: E402

ALL = builds.variants()
FIRST = {variant.name: label for label, variant in ALL.items() if "UNIT=1" not in label}
READS_VALUES = ("accumulate", "pack", "check", "merge", "take_back", "sparse_sgd", "sparse_adamw", "refine", "place")
ELSEWHERE = [
    FIRST[name] for name in FIRST if name.rpartition(".")[2] in ("accumulate", "pack", "merge", "sparse_adamw")
]


def fits(label, target):
    """No spills, at most 64 registers, and loads of 128 bits where values are read."""
    found = builds.build(label, target)
    assert isinstance(found, builds.Usage), found
    assert not found.spilled
    assert found.registers is None or found.registers <= 64
    assert found.wide or ALL[label].name.rpartition(".")[2] not in READS_VALUES


@pytest.mark.parametrize("name", FIRST)
def test_builds_for_one_gpu_do_not_spill_and_load_128_bits(name):
    """Widths are those of the PTX: its assembler makes one load of each vector that is aligned."""
    fits(FIRST[name], "sm_90")


@pytest.mark.parametrize("target", ["sm_80", "sm_100"])
@pytest.mark.parametrize("label", ELSEWHERE)
def test_builds_for_other_gpus(label, target):
    fits(label, target)


@pytest.mark.parametrize("label", ELSEWHERE)
def test_builds_for_amd(label):
    found = builds.build(label, "gfx942")
    assert isinstance(found, builds.Usage), found
    assert not found.spilled
    assert found.registers <= 128


@pytest.mark.parametrize("label", ELSEWHERE)
def test_builds_that_know_nothing_of_addresses(label):
    found = builds.build(label, "sm_90", aligned=False)
    assert isinstance(found, builds.Usage), found
    assert not found.spilled


def test_what_cannot_be_compiled_says_so(monkeypatch):
    monkeypatch.setitem(builds.TARGETS, "old", builds.GPUTarget("cuda", 30, 32))
    found = builds.build(FIRST[next(iter(FIRST))], "old")
    assert isinstance(found, str)
    assert found


def test_every_kernel_is_among_the_builds():
    from lightning_hetero.compression.triton_gpu import apply_kernels as applying
    from lightning_hetero.compression.triton_gpu import encode_kernels as kernels
    from lightning_hetero.compression.triton_gpu import header_kernels as headers
    from lightning_hetero.compression.triton_gpu import receive_kernels as receiving
    from lightning_hetero.optim.sparse.triton_gpu import kernels as steps

    known = {variant.name.rpartition(".")[2] for variant in ALL.values()}
    written = {name for room in (applying, kernels, headers, receiving, steps) for name in room.__all__}
    assert known == {name for name in written if name.islower()}
