"""Scores that compare parameters of different scales: who is sent, what is kept, and what the factors are."""

import numpy as np
import pytest
import torch

from lightning_hetero.compression import Layout, MessageFormat, TorchEncoder, merge
from lightning_hetero.compression.host.encoder import cpu_encoder
from lightning_hetero.compression.score_scaling import ScalingSettings, ScoreScaling


def made(sizes, k, *, block=1, balanced=True, dtype=torch.float32):
    layout = Layout.of([(f"p{i}", n) for i, n in enumerate(sizes)], block)
    form = MessageFormat(layout.num_blocks, k, block, "float32", layout.fingerprint())
    return TorchEncoder(layout, form, dtype=dtype, balance=ScoreScaling(layout) if balanced else None)


def sent_of(enc, gradients, step):
    message = torch.zeros(enc.form.num_bytes, dtype=torch.uint8)
    for slot, gradient in zip(enc.layout.slots, gradients, strict=True):
        assert enc.accumulate(slot, gradient, 1.0)
    enc.encode(message, step=step)
    (pack,) = enc.read(message[None], step=step)
    enc.finish()
    return pack


@pytest.mark.parametrize("balanced", [False, True])
def test_a_parameter_with_small_gradients_has_its_turn(balanced):
    """By magnitude, gradients a thousandth as large are hardly sent in 200 steps; balanced, they get an equal part."""
    enc, generator = made([500, 500], 10, balanced=balanced), torch.Generator().manual_seed(0)
    sent = np.zeros(2)
    for step in range(200):
        large, small = (torch.randn(500, generator=generator) for _ in range(2))
        pack = sent_of(enc, [large, 1e-3 * small], step)
        if step >= 50:
            sent += np.bincount((pack.indices >= 500).long().numpy(), minlength=2)
    assert (0.4 < sent[1] / sent.sum() < 0.6) if balanced else sent[1] == 0


@pytest.mark.parametrize("block", [1, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_is_lost(block, dtype):
    """Integers, so that sums are exact: all that was sent and the residual make up all gradients."""
    enc, generator = made([70, 5], 3, block=block, dtype=dtype), torch.Generator().manual_seed(0)
    due, got = torch.zeros(enc.layout.numel, dtype=dtype), torch.zeros(enc.layout.numel)
    for step in range(20):
        gradients = [torch.randint(-9, 9, (n,), generator=generator).to(dtype) for n in (70, 5)]
        for slot, gradient in zip(enc.layout.slots, gradients, strict=True):
            due[slot.start : slot.start + slot.numel] += gradient
        got += merge([sent_of(enc, gradients, step)], enc.layout.num_blocks, block=block)
    assert torch.equal(got.to(dtype) + enc.residual, due)


def test_factors_follow_the_mean_square_of_what_is_sent():
    layout = Layout.of([("a", 4), ("b", 3), ("c", 2)], block=2)
    balance = ScoreScaling(layout)
    assert set(balance.factors.values()) == {1.0}
    balance.follow(np.array([1, 3]), np.array([[3.0, 0.0], [0.0, 2.0]]))
    balance.follow(np.array([2]), np.array([[5.0, 1.0]]))
    DECAY, WIDEST = ScalingSettings().decay_per_step, ScalingSettings().min_factor
    rms = {"a": (DECAY * 9 / 4) ** 0.5, "b": (DECAY * 4 / 3 + 26 / 3) ** 0.5}
    largest = rms["b"]
    rms["c"] = WIDEST * largest  # never sent, so that its turn comes soon
    for name, value in rms.items():
        assert balance.factors[name] == pytest.approx(rms["c"] / value)


def test_state_goes_on_and_other_parameters_begin_anew():
    layout = Layout.of([("a", 4), ("b", 3)], block=1)
    balance, other = ScoreScaling(layout), ScoreScaling(layout)
    balance.follow(np.array([0, 5]), np.array([[3.0], [1.0]]))
    other.load_state_dict(balance.state_dict())
    assert other.factors == balance.factors != ScoreScaling(layout).factors
    other.load_state_dict({"gone": 1.0})
    assert set(other.factors.values()) == {1.0}


def test_numba_selects_the_same(monkeypatch):
    pytest.importorskip("numba")
    monkeypatch.setattr("lightning_hetero.compression.host.encoder.NUMBA_MIN_ELEMENTS", 1)
    plain, generator = made([300, 200], 9, block=2), torch.Generator().manual_seed(1)
    fast = cpu_encoder(plain.layout, plain.form, balanced=True)
    assert type(fast) is not type(plain)
    for step in range(5):
        gradients = [scale * torch.randn(n, generator=generator) for scale, n in ((1.0, 300), (0.01, 200))]
        one, other = sent_of(plain, gradients, step), sent_of(fast, gradients, step)
        assert torch.equal(one.indices, other.indices)
        assert torch.equal(one.values, other.values)
    assert fast.balance.factors == plain.balance.factors
    assert len(set(fast.balance.factors.values())) == 2
