"""Clusters of ranks: given, by name, and from the times of links."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.core.link.clusters import check_clusters, check_hierarchy, clusters_by_name, clusters_by_time


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("sites", ValueError, "hierarchy='sites' is unknown; allowed are 'nodes', 'env', 'auto'"),
        ([0, 1, 2], TypeError, r"hierarchy=\[0, 1, 2\] is no list of clusters"),
        (4, TypeError, "hierarchy=4 is no list of clusters"),
        ([[0, 1], []], ValueError, "empty cluster"),
        ([], ValueError, "empty cluster"),
        ([[0, 1], [1]], ValueError, "a rank in two clusters"),
        ([[0, -1]], ValueError, "hierarchy=-1 is too small"),
        ([[0, 1.5]], TypeError, "hierarchy=1.5 is a float"),
    ],
)
def test_wrong_settings_are_refused(value, error, message):
    with pytest.raises(error, match=message):
        check_hierarchy(value)


def test_clusters_have_to_name_every_rank():
    for clusters in (((0, 1),), ((0, 1), (2, 3))):
        with pytest.raises(ValueError, match=r"names the ranks .* and the job has \[0, 1, 2\]"):
            check_clusters(clusters, 3)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.randoms(), st.floats(3.5, 1000))
def test_clusters_are_found_from_times_whatever_the_order_of_ranks(sizes, random, ratio):
    names = [name for name, size in enumerate(sizes) for _ in range(size)]
    random.shuffle(names)
    noise = np.random.default_rng(random.randint(0, 2**32)).uniform(1.0, 1.1, (len(names), len(names)))
    same = np.equal.outer(names, names)
    times = np.where(same, 1e-3, ratio * 1e-3) * (noise + noise.T)
    found = clusters_by_time(times)
    two_kinds = len(sizes) > 1 and max(sizes) > 1
    assert found == (clusters_by_name(names) if two_kinds else (tuple(range(len(names))),))


def test_links_that_differ_little_are_no_clusters():
    times = np.array([[0, 1, 2.5], [1, 0, 2.5], [2.5, 2.5, 0]])
    assert clusters_by_time(times) == ((0, 1, 2),)
