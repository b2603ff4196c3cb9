"""Simulated elastic averaging: claims against their transcription, and the engine's own rules on what came of them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.core.merging.batch_scaling import scale_batch_sizes
from lightning_hetero.core.merging.rules import MERGES
from lightning_hetero.data import PermutationStream
from lightning_hetero.elastic import ElasticConfig, ElasticEngine
from lightning_hetero.simulate import DeviceProfile, ElasticSimulator
from tests.helpers import run_ranks


def devices(speeds, **more):
    return [DeviceProfile(q=0.001 / v, s=0.002, k=0.002 / v, m=0.001, **more) for v in speeds]


def transcribed(times, sizes, total):
    """Whoever is free first takes the next batch, the reserved ones first; all batches are whole."""
    left, free = total - sum(sizes), [own(size) for own, size in zip(times, sizes, strict=True)]
    updates, ends = [1] * len(sizes), list(free)
    while left >= 1:
        who = int(np.argmin(free))
        taken = min(sizes[who], left)
        left -= taken
        free[who] += times[who](taken)
        ends[who] = free[who]
        updates[who] += 1
    return updates, ends


@pytest.mark.parametrize("seed", range(30))
def test_claims_are_those_of_the_rule(seed):
    rng = np.random.default_rng(seed)
    profiles = devices(rng.uniform(0.1, 1.0, int(rng.integers(1, 6))))
    size = int(rng.integers(1, 20))
    total = int(rng.integers(2 * len(profiles) * size, 40 * len(profiles) * size))
    config = ElasticConfig(mega_batch_size=total)
    merge = ElasticSimulator(profiles, size, 3 * total, config=config).run(1).merges[0]
    times = [lambda b, p=profile: p.seconds(b) for profile in profiles]
    updates, ends = transcribed(times, [size] * len(profiles), total)
    assert merge.updates == tuple(updates)
    np.testing.assert_allclose(merge.busy, ends, rtol=1e-9)


@settings(deadline=None, max_examples=20)
@given(st.lists(st.floats(0.1, 1.0), min_size=1, max_size=5), st.sampled_from(sorted(MERGES)), st.integers(0, 99))
def test_every_sample_once_an_epoch_and_the_rules_of_the_engine(speeds, merge, seed):
    config = ElasticConfig(merge=merge, mega_batch_batches=20)
    simulator = ElasticSimulator(devices(speeds, jitter=0.1), 8, 1001, config=config, seed=seed)
    result = simulator.run(14)
    epochs = [m.epoch for m in result.merges]
    done = {e: sum(sum(m.samples) for m in result.merges if m.epoch == e) for e in range(epochs[-1])}
    assert set(done.values()) == {1001}
    for now, then in zip(result.merges, result.merges[1:], strict=False):
        adaptive = config.adaptive(8)
        scaled = scale_batch_sizes(now.batch_sizes, now.updates, adaptive)
        assert then.batch_sizes == (scaled if config.rule.scales and len(speeds) > 1 else now.batch_sizes)
        weights = config.rule.weights(now.batch_sizes, now.updates, [0.01] * len(speeds), adaptive)
        assert now.weights == weights.weights
    assert all(end > begin for begin, end in zip(result.begins, result.ends, strict=True))
    assert result.ends[:-1] == result.begins[1:]


def test_sizes_settle_where_updates_are_equal():
    result = ElasticSimulator(devices((1.0, 0.5, 0.3)), 64, 10**6).run(12)
    last = result.merges[-1]
    assert max(last.updates) - min(last.updates) <= 0.1 * max(last.updates)
    assert last.batch_sizes[0] == 64 > last.batch_sizes[1] > last.batch_sizes[2]
    assert max(result.idle_share(11)) < 0.02
    assert result.samples == 12 * 6400


def _merges(rank):
    """Merges of a real run in which each rank claims as fast as it can."""
    torch.distributed.init_process_group("gloo")
    engine = ElasticEngine(ElasticConfig(mega_batch_batches=10), rank=rank, world_size=2)
    engine.attach(torch.nn.Linear(1, 1))
    sampler = engine.shard(PermutationStream(300, shuffle=False, seed=0), batch_size=8)
    for _ in sampler:
        engine.begin_batch()
        engine.end_batch()
    return engine.merges


def test_the_cut_into_mega_batches_and_the_scaling_are_those_of_a_real_run():
    real = run_ranks(_merges, 2)[0]
    config = ElasticConfig(mega_batch_batches=10)
    simulated = ElasticSimulator(devices((1.0, 0.5)), 8, 300, config=config).run(len(real)).merges
    assert [m.position for m in simulated] == [m.position for m in real]
    assert [sum(m.samples) for m in simulated] == [sum(m.samples) for m in real]
    for now, then in zip(real, real[1:], strict=False):
        assert then.batch_sizes == scale_batch_sizes(now.batch_sizes, now.updates, config.adaptive(8))


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"devices": []}, TypeError, "must be a list of one DeviceProfile per worker"),
        ({"batch_size": 0}, ValueError, "batch_size=0"),
        ({"samples": 1}, ValueError, "cannot give each of 2 workers a batch"),
        ({"claim_seconds": -1.0}, ValueError, "claim_seconds=-1.0"),
        ({"norm": -1.0}, ValueError, "norm=-1.0"),
        ({"seed": -1}, ValueError, "seed=-1"),
    ],
)
def test_bad_input_is_named(wrong, error, text):
    with pytest.raises(error, match=text):
        ElasticSimulator(**{"devices": devices((1.0, 0.5)), "batch_size": 8, "samples": 3000, **wrong})
