"""Settings of compressors: strings, bounds, budgets; and when compression pays."""

import re

import pytest

from lightning_hetero.core.compressors import COMPRESSORS, Automatic, BlockTopK, blocks_per_rank, parse_compression
from lightning_hetero.core.link_model import Computing, LinkMeasurement, choose_density, pack_bytes


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
        ("topk", "allowed are 'block_topk'"),
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


@pytest.mark.parametrize("n", [1, 7, 1000, 5_500_000])
@pytest.mark.parametrize("world_size", [1, 2, 3, 64])
def test_budget_is_k_over_n_rounded_up(n, world_size):
    for density in (0.001, 0.01, 0.5):
        k = blocks_per_rank(n, density, world_size)
        assert 1 <= k <= n
        assert k <= n * density / world_size + 1.001
        assert k * world_size >= n * density - 1e-3 or k == n
    assert blocks_per_rank(n, 1.0, world_size) == n


def link(rate, encode=0.02, latency=1e-3, n=4, numel=25_000_000):
    return LinkMeasurement(latency, rate, encode, n, numel)


def test_thin_links_are_compressed_and_thick_ones_are_not():
    densities = (0.001, 0.003, 0.01, 0.03, 0.1)
    chosen = [choose_density(link(rate), densities).density for rate in (12.5e6, 125e6, 1.25e9, 125e9)]
    assert chosen[-1] is None
    given = [density for density in chosen if density is not None]
    assert given == sorted(given)
    assert len(given) >= 2
    assert choose_density(link(12.5e6, encode=100.0), densities).density is None


def test_what_decides_is_the_step_and_not_the_exchange():
    """A sum that hides behind the backward pass is no reason to compress; a step that is 5 % shorter is one."""
    densities, measured = (0.001, 0.01), LinkMeasurement(1e-4, 1e9, 0.02, 2, 25_000_000)
    dense = measured.dense_seconds
    assert choose_density(measured, densities).density is not None

    def chosen(*computing):
        return choose_density(measured, densities, computing=Computing(*computing)).density

    assert chosen(4 * dense, dense, 0.05) is None
    assert chosen(4 * dense, 3.5 * dense, 0.05) is not None
    least = measured.compressed_seconds(0.001)
    gain = dense - least
    assert chosen(19.5 * gain - least, 19.5 * gain - least, 1.0) is not None
    assert chosen(20.5 * gain - least, 20.5 * gain - least, 1.0) is None


def test_description_says_what_and_why():
    text = choose_density(link(12.5e6), (0.001, 0.01)).describe()
    assert "block top-k at density 0.001, because dense takes" in text
    assert "0.01:" in text
    assert "dense sums, because" in choose_density(link(1e12), (0.01,)).describe()


def test_bytes_predicted_are_those_of_the_message():
    from lightning_hetero.compression import MessageFormat

    form = MessageFormat(1_000_000, blocks_per_rank(1_000_000, 0.01, 2), 16, "int8")
    assert pack_bytes(16_000_000, 0.01, 2, "int8") == pytest.approx(form.num_bytes, rel=0.01)
