"""When compression pays and at which density (S eq. 1-6, Alg. 1), against transcriptions and trying everything."""

import json
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.compression import MessageFormat
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.compression.auto import Computing, LinkMeasurement, choose_density, pack_bytes
from lightning_hetero.core.compression.bayesian_search import (
    ConvergenceSurrogate,
    ProfilePenalty,
    profile_convergence,
)
from lightning_hetero.core.compression.convergence_profile import ConvergenceProfile
from lightning_hetero.core.compression.objective import minimise_time_to_accuracy
from lightning_hetero.core.compression.settings import (
    COMPRESSORS,
    Automatic,
    BlockTopK,
    HalfPrecision,
    blocks_per_rank,
    parse_compression,
)
from lightning_hetero.core.observations import StepObservations

# compression="auto"

SECONDS = st.floats(0.0, 10.0)


@given(
    measured=st.builds(
        LinkMeasurement,
        latency=SECONDS,
        rate=st.floats(1e3, 1e12),
        encode=SECONDS,
        world_size=st.integers(2, 64),
        numel=st.integers(1, 10**10),
    ),
    densities=st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=6),
    values=st.sampled_from(["float32", "bfloat16", "int8"]),
    computing=st.builds(
        lambda whole, begun, last: Computing(whole, begun * whole, last), SECONDS, *[st.floats(0, 1)] * 2
    ),
    stale=st.booleans(),
    gain=st.floats(1.0, 4.0),
)
def test_the_choice_has_the_least_time_to_accuracy(measured, densities, values, computing, stale, gain):
    """``(1 + g) T`` over all candidates, dense sums included, but for what compression has to gain."""
    n, whole = measured.world_size, computing.whole
    per_block = {"float32": 64, "bfloat16": 32, "int8": 18}[values] + 2

    def objective(density):
        blocks = measured.numel / 16 * density / (n if density < 1 else 1)
        message = measured.latency + (n - 1) * blocks * per_block / measured.rate
        ready = whole + measured.encode
        return (max(ready, message) if stale else ready + message) * (1 + 0.1 * np.log10(1 / density))

    exchange = 2 * (n - 1) * (measured.latency + measured.numel * 4 / n / measured.rate)
    dense = max(whole, exchange)
    if not stale:
        dense = max(whole + computing.last * exchange, computing.begun + exchange)
    least = min(map(objective, densities))
    choice = choose_density(measured, densities, values, computing=computing, stale=stale, min_gain=gain)
    assert choice.dense_seconds == pytest.approx(dense)
    if choice.density is None:
        assert gain * least >= dense * (1 - 1e-9)
    else:
        assert objective(choice.density) == pytest.approx(least)
        assert gain * least <= dense * (1 + 1e-9)


def test_computing_is_the_slowest_workers():
    """``a + P``, ``a + gamma P`` and the share of an all-reduce that no backward pass hides; medians over steps."""
    ones = np.ones((3, 2)) * [1.0, 2.0]
    seen = StepObservations(8 * ones, 0.1 * ones, 0.4 * ones, 0.1 * ones, 0.3 * ones, 0.1 * ones, ones)
    found = Computing.of(seen)
    assert (found.whole, found.begun) == pytest.approx((1.0, 0.4))
    assert found.last == pytest.approx(0.25)
    assert Computing.of(StepObservations.empty(2)) == Computing(0.0, 0.0, 1.0)


@pytest.mark.parametrize("values", ["float32", "bfloat16", "int8"])
def test_bytes_predicted_are_those_of_the_message(values):
    form = MessageFormat(1_000_000, blocks_per_rank(1_000_000, 0.01, 2), 16, values)
    assert pack_bytes(16_000_000, 0.01, 2, values) == pytest.approx(form.num_bytes, rel=0.01)


@pytest.mark.parametrize("n", [1, 7, 1000, 5_500_000])
@pytest.mark.parametrize("world_size", [1, 2, 3, 64])
def test_the_budget_is_k_over_n_rounded_up(n, world_size):
    for density in (0.001, 0.01, 0.5):
        k = blocks_per_rank(n, density, world_size)
        assert 1 <= k <= n
        assert k <= n * density / world_size + 1.001
        assert k * world_size >= n * density - 1e-3 or k == n
    assert blocks_per_rank(n, 1.0, world_size) == n
    assert blocks_per_rank(1000, 0.01, 2) == 5, "not 6 by a rounding error"


# the best density of a total batch

STEP_TIMES = {32: 0.012, 64: 0.02, 128: 0.035, 256: 0.07, 512: 0.15}


def penalty(density, total):
    return 0.1 * -np.log10(density) + total / 1000


GRID = np.geomspace(0.001, 1.0, 500)


@pytest.mark.parametrize("stale", [True, False])
@given(bandwidth=st.floats(1e5, 1e10))
def test_the_search_is_as_good_as_trying_everything(stale, bandwidth):
    """S eq. 5 under eq. 6: stale messages fit into a step; where every step waits for its own, times add up."""
    choices = minimise_time_to_accuracy(
        STEP_TIMES, GRID, transfer=lambda d: 4e6 * d / bandwidth, penalty=penalty, stale=stale
    )
    assert [choice.total_batch_size for choice in choices] == list(STEP_TIMES)
    for found in choices:
        compute = STEP_TIMES[found.total_batch_size]

        def objective(density, compute=compute, total=found.total_batch_size):
            sent = 4e6 * density / bandwidth
            return (1 + penalty(density, total)) * (max(compute, sent) if stale else compute + sent) / total

        fitting = [d for d in GRID if not stale or 4e6 * d / bandwidth <= compute] or [GRID[0]]
        assert found.objective == pytest.approx(objective(found.density)) == pytest.approx(min(map(objective, fitting)))
        assert (found.compute, found.transfer) == pytest.approx((compute, 4e6 * found.density / bandwidth))
        assert found.communication_bound == (4e3 / bandwidth > compute)


def test_a_penalty_that_makes_samples_worth_without_end_is_refused():
    with pytest.raises(ValueError, match="penalty"):
        minimise_time_to_accuracy({8: 0.1}, GRID, transfer=lambda d: d, penalty=lambda d, _: d - 2.0)


# convergence profiles


def truth(rate, total):
    """Compression costs more the nearer it is to 1; the best batch is 100."""
    return 0.05 * -np.log10(1 - rate + 1e-3) + 0.1 * np.log2(total / 100) ** 2


def test_probes_tell_where_the_best_batch_is_at_every_rate():
    """S Alg. 1: first what is compared with; rates at random, later batches where an improvement is expected."""
    calls, saved, rng = [], [], np.random.default_rng(1)

    def probe(rate, total, staleness):
        calls.append((rate, total, staleness))
        return 0.8 * (1 + truth(rate, total) * bool(staleness)) + 0.004 * rng.normal() * bool(staleness)

    profile = profile_convergence(probe, min_total=20, max_total=500, probes=22, on_profile=saved.append)
    assert (calls[0], profile.baseline) == ((0.0, 260, 0), 0.8)
    assert {staleness for *_, staleness in calls[1:]} == {1}
    assert [point[:2] for point in profile.points] == [call[:2] for call in calls[1:]]
    assert [len(one.points) for one in saved] == list(range(1, 23))
    assert np.mean([abs(np.log2(total / 100)) < 1 for _, total, _ in calls[-12:]]) > 0.9
    assert np.histogram([rate for rate, *_ in calls[1:]], bins=4, range=(0, 1))[0].min() >= 2
    surrogate, table = ConvergenceSurrogate(profile), ProfilePenalty(profile)
    totals = np.unique(np.geomspace(20, 500, 40).round())
    for rate in (0.1, 0.5, 0.9, 0.97):
        mean, _ = surrogate.predict(rate, totals)
        assert truth(rate, totals[np.argmin(mean)]) < truth(rate, 100) + 0.03
        assert surrogate.extra_loss(rate, 100) == pytest.approx(truth(rate, 100), abs=0.04)
        np.testing.assert_allclose(table(1 - rate, totals), mean, atol=0.02)
    assert table(0.5, 10**6) == table(0.5, 500), "outside of what was tried, the nearest that was"


def test_a_probe_that_diverges_is_a_bad_point_and_one_without_baseline_is_refused():
    outcomes = iter([1.0, float("nan"), float("inf"), 1.5, 1e9, 1.2])
    profile = profile_convergence(lambda *_: next(outcomes), min_total=8, max_total=64, probes=5)
    assert [extra for *_, extra in profile.points] == pytest.approx([9.0, 9.0, 0.5, 9.0, 0.2])
    for loss in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="loss"):
            profile_convergence(lambda *_, loss=loss: loss, min_total=8, max_total=64)


@pytest.mark.parametrize(
    "change",
    [{"points": []}, {"points": [[2.0, 32, 0.1]]}, {"points": [[0.5, 8, 0.1]]}, {"format": 9}, {"max_total": 8}],
)
def test_what_is_no_profile_is_refused_with_its_file(change, tmp_path):
    profile, path = ConvergenceProfile(16, 256, 0.7, ((0.5, 32, 0.1), (0.9, 64, 0.3))), tmp_path / "profile.json"
    profile.save(path)
    assert ConvergenceProfile.load(path) == profile
    path.write_text(json.dumps({**json.loads(profile.to_json()), **change}))
    with pytest.raises(ValueError, match="profile.json"):
        ConvergenceProfile.load(path)


# settings


@pytest.mark.parametrize("name", COMPRESSORS)
def test_a_name_is_its_settings_and_supports_what_it_says(name):
    settings, meant = COMPRESSORS[name]
    assert parse_compression(name) == parse_compression(f"{name}()") == settings(**meant)
    features = {"hierarchy": [[0, 1], [2, 3]], "staleness": 1, "sparse_optimizer": True}
    for feature, value in features.items():
        supported = {"staleness": "stale"}.get(feature, feature) in settings.supports
        with nullcontext() if supported else pytest.raises(ValueError, match="compression="):
            HeteroConfig(compression=name, **{feature: value})


def test_settings_in_a_string():
    text = "block_topk(density=0.03, value_dtype='int8', selector='histogram')"
    assert parse_compression(text) == BlockTopK(0.03, value_dtype="int8", selector="histogram")
    assert parse_compression("auto(densities=[0.1, 0.01])") == Automatic((0.01, 0.1))
    assert parse_compression(None) is None
    with pytest.raises(ValueError, match="dtype='fp8'"):
        HalfPrecision("fp8")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        *((text, "compression=") for text in ("topk", "", "block_topk(0.03)", "block_topk(density=f(1))")),
        ("-" * 100_000 + "block_topk", "compression="),
        ("block_topk(share=1)", "share"),
        ("fp16(dtype='bfloat16')", "dtype"),
        ("block_topk(density=1.5)", "density=1.5"),
        ("auto(densities=())", "densities"),
        *((other, "compression=") for other in (0.01, True, BlockTopK)),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_wrong_in_a_setting_is_named(given, says):
    with pytest.raises(ValueError if isinstance(given, str) else TypeError, match=says):
        parse_compression(given)
