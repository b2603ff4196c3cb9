"""Settings of compressors: strings, bounds, budgets."""

import re
from contextlib import nullcontext

import pytest

from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.compression.settings import (
    COMPRESSORS,
    Automatic,
    BlockTopK,
    blocks_per_rank,
    parse_compression,
)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_every_name_is_its_settings(name):
    settings, meant = COMPRESSORS[name]
    assert parse_compression(name) == settings(**meant)
    assert parse_compression(f"{name}()") == settings(**meant)


def test_settings_in_a_string():
    text = "block_topk(density=0.03, value_dtype='int8', selector='histogram')"
    assert parse_compression(text) == BlockTopK(0.03, value_dtype="int8", selector="histogram")
    assert parse_compression("auto(densities=[0.1, 0.01])") == Automatic((0.01, 0.1))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("topk", "Did you mean 'block_topk'? Allowed are 'block_topk'"),
        ("zip", "allowed are 'block_topk'"),
        ("", "give one of"),
        ("block_topk(0.03)", "give one of"),
        ("block_topk(density=f(1))", "give one of"),
        ("block_topk(share=1)", "no setting 'share'"),
        ("fp16(dtype='bfloat16')", "no setting 'dtype'"),
        ("block_topk(density=0)", "density=0 is out of range"),
        ("block_topk(density=1.5)", "density=1.5"),
        ("(" * 10_000 + "block_topk" + ")" * 10_000, "give one of"),
        ("-" * 100_000 + "block_topk", "give one of"),
        ("block_topk(density=" + "[" * 500 + "]" * 500 + ")", "give one of"),
        ("block_topk(block=10)", "block=10 is unknown; allowed are 1, 2"),
        ("block_topk(value_dtype='fp8')", "allowed are 'float32'"),
        ("block_topk(selector='best')", "allowed are None, 'exact'"),
        ("block_topk(scores='equal')", "allowed are 'magnitude', 'balanced'"),
        ("block_topk(warmup_steps=-1)", "warmup_steps=-1"),
        ("block_topk(dense_every=1)", "dense_every=1"),
        ("powersgd(rank=0)", "rank=0"),
        ("powersgd(start=1)", "start=1"),
        ("auto(densities=())", "at least one density"),
        ("auto(densities=(2.0,))", "density=2.0"),
    ],
)
def test_what_is_wrong_is_said(given, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        parse_compression(given)


@pytest.mark.parametrize("given", [1, 0.01, True, ["block_topk"], BlockTopK])
def test_other_types_are_refused(given):
    with pytest.raises(TypeError, match="give None, BlockTopK"):
        parse_compression(given)


@pytest.mark.parametrize("name", COMPRESSORS)
@pytest.mark.parametrize(
    ("feature", "asked"),
    [
        ("hierarchy", {"hierarchy": [[0, 1], [2, 3]]}),
        ("stale", {"staleness": 1}),
        ("sparse_optimizer", {"sparse_optimizer": True}),
    ],
)
def test_what_settings_support_is_what_the_configuration_accepts(name, feature, asked):
    supported = feature in COMPRESSORS[name][0].supports
    with nullcontext() if supported else pytest.raises(ValueError, match="compression="):
        HeteroConfig(compression=name, **asked)


@pytest.mark.parametrize("n", [1, 7, 1000, 5_500_000])
@pytest.mark.parametrize("world_size", [1, 2, 3, 64])
def test_budget_is_k_over_n_rounded_up(n, world_size):
    for density in (0.001, 0.01, 0.5):
        k = blocks_per_rank(n, density, world_size)
        assert 1 <= k <= n
        assert k <= n * density / world_size + 1.001
        assert k * world_size >= n * density - 1e-3 or k == n
    assert blocks_per_rank(n, 1.0, world_size) == n
