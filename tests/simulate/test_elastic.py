"""Simulated elastic averaging: claims against their transcription, and the engine's own rules on what came of them."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.core.merging.batch_scaling import scale_batch_sizes
from lightning_hetero.core.merging.rules import MERGES
from lightning_hetero.elastic import ElasticConfig
from lightning_hetero.simulate import DeviceProfile, ElasticSimulator


def devices(speeds, **more):
    return [DeviceProfile(q=0.001 / v, s=0.002, k=0.002 / v, m=0.001, **more) for v in speeds]


def transcribed(profiles, size, total):
    """Whoever is free first takes the next batch, the reserved ones first; all batches are whole."""
    left, free = total - len(profiles) * size, [profile.seconds(size) for profile in profiles]
    updates, ends = [1] * len(profiles), list(free)
    while left >= 1:
        who = int(np.argmin(free))
        taken = min(size, left)
        left -= taken
        free[who] += profiles[who].seconds(taken)
        ends[who] = free[who]
        updates[who] += 1
    return updates, ends


def test_claims_are_those_of_the_rule(seed):
    rng = np.random.default_rng(seed)
    for _ in range(5):
        profiles = devices(rng.uniform(0.1, 1.0, int(rng.integers(1, 6))))
        size = int(rng.integers(1, 20))
        total = int(rng.integers(2 * len(profiles) * size, 40 * len(profiles) * size))
        config = ElasticConfig(mega_batch_size=total)
        merge = ElasticSimulator(profiles, size, 3 * total, config=config).run(1).merges[0]
        updates, ends = transcribed(profiles, size, total)
        assert merge.updates == tuple(updates)
        np.testing.assert_allclose(merge.busy, ends, rtol=1e-9)


@given(st.lists(st.floats(0.1, 1.0), min_size=1, max_size=5), st.sampled_from(sorted(MERGES)), st.integers(0, 99))
def test_every_sample_once_an_epoch_and_the_rules_of_the_engine(speeds, merge, seed):
    config = ElasticConfig(merge=merge, mega_batch_batches=20)
    result = ElasticSimulator(devices(speeds, jitter=0.1), 8, 1001, config=config, seed=seed).run(14)
    epochs, adaptive = [m.epoch for m in result.merges], config.adaptive(8)
    done = {e: sum(sum(m.samples) for m in result.merges if m.epoch == e) for e in range(epochs[-1])}
    assert set(done.values()) == {1001}
    for now, then in pairwise(result.merges):
        scaled = scale_batch_sizes(now.batch_sizes, now.updates, adaptive)
        assert then.batch_sizes == (scaled if config.rule.scales and len(speeds) > 1 else now.batch_sizes)
        weights = config.rule.weights(now.batch_sizes, now.updates, [0.01] * len(speeds), adaptive)
        assert now.weights == weights.weights
    assert all(end > begin for begin, end in zip(result.begins, result.ends, strict=True))
    assert result.ends[:-1] == result.begins[1:]
