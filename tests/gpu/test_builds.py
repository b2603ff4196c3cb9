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

CASES = [("sm_90", label) for label in FIRST.values()]
CASES += [(target, label) for target in ("sm_80", "sm_100", "gfx942") for label in ELSEWHERE]


@pytest.mark.parametrize(("target", "label"), CASES)
def test_builds_do_not_spill_and_load_128_bits(target, label):
    """Widths are those of the PTX: its assembler makes one load of each vector that is aligned."""
    found = builds.build(label, target)
    assert isinstance(found, builds.Usage), found
    assert not found.spilled
    assert found.registers is None or found.registers <= (128 if target == "gfx942" else 64)
    assert found.wide or target == "gfx942" or ALL[label].name.rpartition(".")[2] not in READS_VALUES


def test_every_kernel_is_among_the_builds():
    from lightning_hetero.compression.triton_gpu import apply_kernels as applying
    from lightning_hetero.compression.triton_gpu import encode_kernels as kernels
    from lightning_hetero.compression.triton_gpu import header_kernels as headers
    from lightning_hetero.compression.triton_gpu import receive_kernels as receiving
    from lightning_hetero.optim.sparse.triton_gpu import kernels as steps

    known = {variant.name.rpartition(".")[2] for variant in ALL.values()}
    written = {name for room in (applying, kernels, headers, receiving, steps) for name in room.__all__}
    assert known == {name for name in written if name.islower()}
