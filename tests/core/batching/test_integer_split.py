"""Splits in whole samples: even, in proportion within bounds, and of the ragged last batch."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.core.batching.integer_split import even_sizes, proportional_sizes, tail_sizes

moderate = settings(max_examples=200, deadline=None, derandomize=True)


@moderate
@given(st.integers(0, 5000), st.integers(1, 20))
def test_even_sizes(total, workers):
    sizes = even_sizes(total, workers)
    assert sum(sizes) == total
    assert len(sizes) == workers
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


@moderate
@given(
    st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1e6)), min_size=1, max_size=8).filter(any), st.integers(0, 10_000)
)
def test_proportional_sizes_are_the_shares_to_one_sample(shares, total):
    sizes = np.array(proportional_sizes(total, shares))
    assert sizes.sum() == total
    assert np.abs(sizes - total * np.array(shares) / sum(shares)).max() <= 1 + 1e-6


@moderate
@given(st.data(), st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8))
def test_proportional_sizes_keep_bounds(data, shares):
    low = [data.draw(st.integers(0, 20)) for _ in shares]
    high = [b + data.draw(st.integers(0, 50)) for b in low]
    total = data.draw(st.integers(sum(low), sum(high)))
    sizes = proportional_sizes(total, shares, min_local=low, max_local=high)
    assert sum(sizes) == total
    assert all(a <= b <= c for a, b, c in zip(low, sizes, high, strict=True))
    free = [b / w for a, b, c, w in zip(low, sizes, high, shares, strict=True) if a < b < c]
    if len(free) > 1:  # workers at no bound share in proportion, to the sample
        level = np.median(free)
        inside = [(b, w) for a, b, c, w in zip(low, sizes, high, shares, strict=True) if a < b < c]
        assert all(abs(b - level * w) <= 2 + 2 * w / min(w for _, w in inside) for b, w in inside)


def test_only_ratios_of_shares_count():
    for scale in (1e-305, 1.0, 1e305):
        assert proportional_sizes(10, [3 * scale, 0.0, scale, scale]) == (6, 0, 2, 2)


@pytest.mark.parametrize("shares", [[0.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_proportional_sizes_name_bad_shares(shares):
    with pytest.raises(ValueError, match="shares must be finite"):
        proportional_sizes(4, shares)


@pytest.mark.parametrize("bounds", [{"min_local": 3}, {"max_local": [1, 2]}])
def test_proportional_sizes_name_bad_bounds(bounds):
    with pytest.raises(ValueError, match="total=4 is outside"):
        proportional_sizes(4, [1, 1], **bounds)


@moderate
@given(st.lists(st.integers(0, 64), min_size=1, max_size=8).filter(any), st.data())
def test_tail_is_split_in_proportion_with_no_crumbs(sizes, data):
    min_local = data.draw(st.integers(1, 4))
    sizes = [size + min_local - 1 if size else 0 for size in sizes]  # a plan's sizes can be run
    remaining = data.draw(st.integers(1, sum(sizes)))
    shares = tail_sizes(remaining, sizes, min_local)
    assert sum(shares) == remaining
    assert all(share == 0 or share >= min(min_local, remaining) for share in shares)
    exact = proportional_sizes(remaining, sizes)
    if min_local == 1:
        assert shares == exact
        assert all(share <= size for share, size in zip(shares, sizes, strict=True))
    assert all(share < size + min_local for share, size in zip(shares, sizes, strict=True))


@moderate
@given(st.lists(st.integers(0, 16), min_size=1, max_size=8).filter(any), st.integers(2, 8), st.data())
def test_tail_in_multiples_has_one_remainder(units, multiple, data):
    sizes = [multiple * unit for unit in units]
    remaining = data.draw(st.integers(1, sum(sizes)))
    shares = tail_sizes(remaining, sizes, multiple=multiple)
    assert sum(shares) == remaining
    assert sorted(share % multiple for share in shares)[:-1] == [0] * (len(sizes) - 1)
    assert all(share <= size for share, size in zip(shares, sizes, strict=True))
