"""What is known of devices and links: published figures, times and jitter of a profile, the rate of a link."""

import json
import math
import re
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero import simulate
from lightning_hetero.simulate import (
    DeviceProfile,
    LinkProfile,
    cluster_profiles,
    device_profile,
    published_devices,
    workloads,
)

TABLE = json.loads((Path(simulate.__file__).parent / "devices" / "published.json").read_text())
NAMES = [name for name, device in published_devices().items() if not device.per_core] + ["12 cores"]


def test_each_published_figure_says_where_it_comes_from():
    kinds = ("devices", "workloads", "clusters", "links")
    for entry in [*(one for kind in kinds for one in TABLE[kind].values()), *TABLE["profiles"]]:
        assert re.search(r"Table|Fig\.|section|footnote", entry["source"]), entry


def test_every_device_has_a_profile_for_every_workload():
    for name in NAMES:
        for workload in workloads():
            profile = device_profile(name, workload, jitter=0.03)
            assert (profile.name, profile.jitter) == (name, 0.03)
            assert 0 < profile.seconds(1) < profile.seconds(2)
            assert profile.k == pytest.approx(2 * profile.q, rel=1e-4)
    names = [one.name for one in cluster_profiles("B", "resnet50-imagenet")]
    assert (len(names), names.count("RTX6000")) == (16, 8)


@pytest.mark.parametrize(
    ("name", "memory"),
    [("RTX 4090", 256), ("RTX 4090@50%", 128), ("RTX 4090@0.1%", 1), ("12 cores", None)],
)
def test_a_share_of_a_device_has_a_share_of_its_memory(name, memory):
    assert device_profile(name, "resnet50-imagenet").memory == memory


@pytest.mark.parametrize(
    ("call", "arguments", "words"),
    [
        (device_profile, ("A10", "bert-squad"), "'A10'.*A100"),
        (device_profile, ("A100", "bert-squat"), "'bert-squat'.*bert-squad"),
        (cluster_profiles, ("D-H3", "bert-squad"), "'D-H3'.*D-H2"),
        (device_profile, ("A100@200%", "bert-squad"), "share of 'A100'"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(call, arguments, words):
    with pytest.raises(ValueError, match=words):
        call(*arguments)


# profiles


def profile(**given):
    return DeviceProfile(**{"q": 0.001, "s": 0.01, "k": 0.002, "m": 0.02, **given})


def factors(count, seed=0, **given):
    return np.array(list(islice(profile(**given).factors(seed), count)))


@pytest.mark.parametrize("deviation", [0.03, 0.5])
def test_jitter_has_mean_1_and_the_deviation_given(deviation):
    found = factors(40_000, jitter=deviation)
    assert found.mean(axis=0) == pytest.approx(1.0, abs=4 * deviation / 200)
    assert found.std(axis=0) == pytest.approx(deviation, rel=0.06)
    assert abs(np.corrcoef(found.T)[0, 1]) < 0.03


def test_the_seed_alone_decides():
    given = {"jitter": 0.1, "round_jitter": 0.1}
    assert (factors(50, 3, **given) == factors(50, 3, **given)).all()
    assert (factors(50, 3, **given) != factors(50, 4, **given)).all()


@given(st.dictionaries(st.integers(0, 60), st.floats(0.1, 10), max_size=6), st.integers(0, 80))
def test_a_slowdown_holds_until_the_next(trace, passage):
    begun = [at for at in trace if at <= passage]
    assert profile(slowdown=trace).slowdown_at(passage) == (trace[max(begun)] if begun else 1.0)


# links


def test_a_ring_sends_twice_all_but_one_share():
    link = LinkProfile(gradient_bytes=8e6, rate=1e6, latency=0.25, buckets=4)
    for workers in (2, 3, 10, 10_000):
        np.testing.assert_allclose(link.seconds(workers), 0.25 + 2 * (workers - 1) / workers * 2e6 / 1e6)
    assert link.seconds(1).tolist() == [0.0] * 4
    assert LinkProfile(buckets=3, gamma=0.5).ready_shares.tolist() == [0.5, 0.75, 1.0]


GAPS = st.lists(st.tuples(st.floats(0.1, 5.0), st.floats(0.1, 10.0)), max_size=5)


@given(GAPS, st.floats(0.0, 20.0), st.floats(0.0, 20.0), st.floats(0.1, 10.0))
def test_a_transfer_takes_until_its_bytes_are_sent(gaps, start, num_bytes, rate):
    """Against a sum over the pieces of the trace."""
    trace = [(sum(gap for gap, _ in gaps[: i + 1]), piece) for i, (_, piece) in enumerate(gaps)]
    link = LinkProfile(rate=rate, trace=trace)
    end = start + link.transfer(num_bytes, start)
    edges = [start, *(at for at, _ in trace if start < at < end), end]
    sent = sum((there - here) * link.rate_at(here) for here, there in pairwise(edges))
    assert math.isclose(sent, num_bytes, rel_tol=1e-9, abs_tol=1e-9)


@pytest.mark.parametrize(
    ("made", "name", "value", "error"),
    [
        (profile, "q", -1.0, ValueError),
        (profile, "slowdown", {5: 0.0}, ValueError),
        (profile, "slowdown", [(1, 2.0), (1, 3.0)], ValueError),
        (LinkProfile, "latency", math.nan, ValueError),
        (LinkProfile, "trace", [(1.0, 0.0)], ValueError),
        (LinkProfile, "trace", [(2.0, 1.0), (1.0, 1.0)], ValueError),
    ],
)
def test_bad_input_is_named(made, name, value, error):
    with pytest.raises(error, match=name):
        made(**{name: value})
