"""Which encoder a rank works with, scores that compare parameters, and what the log says without a GPU's kernels."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightning_hetero import BlockTopK
from lightning_hetero.compression import Layout, MessageFormat, TorchEncoder, encoder_choice
from lightning_hetero.compression.host.encoder import cpu_encoder
from lightning_hetero.compression.score_scaling import ScoreScaling
from tests.kernels.backends import HOSTS, VALUES, Step, encoder, flat_of

LAYOUT = Layout.of([("w", 320)], 16)
FORM = MessageFormat(LAYOUT.num_blocks, 4, 16, "bfloat16")


def chosen(caplog, settings, device, dtype):
    parameters = {"w": SimpleNamespace(device=torch.device(device), dtype=dtype)}
    with caplog.at_level(logging.INFO, logger="lightning_hetero"):
        made = encoder_choice.encoder_for(settings, LAYOUT, FORM, parameters, 2)
    return made, [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("settings", "device", "dtype", "selector", "said"),
    [
        (BlockTopK(selector="sample"), "cpu", torch.bfloat16, "sample", None),
        (BlockTopK(), "cpu", torch.float64, "exact", None),
        (BlockTopK(selector="exact"), "cuda", torch.float32, "exact", "selector='exact'"),
        (BlockTopK(scores="balanced"), "cuda", torch.float32, "exact", "scores='balanced'"),
        (BlockTopK(), "cuda", torch.float64, "exact", "float64"),
        (BlockTopK(), "cuda", torch.float32, "histogram", "kernels fail"),  # what the kernels would select
    ],
    ids=str,
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels work here")
def test_the_host_does_what_there_are_no_kernels_for_and_says_so_once(caplog, settings, device, dtype, selector, said):
    pytest.importorskip("triton")
    made, lines = chosen(caplog, settings, device, dtype)
    assert isinstance(made, TorchEncoder)
    assert made.selector == selector
    assert made.residual.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert [said in line for line in lines] == [True] * (said is not None)


def test_without_triton_the_log_says_what_to_install(caplog, monkeypatch):
    monkeypatch.setattr(encoder_choice, "find_spec", lambda name: None)
    made, (line,) = chosen(caplog, BlockTopK(), "cuda", torch.float32)
    assert made.selector == "histogram"
    assert "lightning-hetero[triton]" in line


def test_numba_is_used_where_it_is_and_the_model_is_large(monkeypatch):
    pytest.importorskip("numba", exc_type=ImportError)

    def kind(numel, dtype=torch.float32):
        layout = Layout.of([("p", numel)], 16)
        return type(cpu_encoder(layout, MessageFormat(layout.num_blocks, 5, 16, "float32"), dtype=dtype)).__name__

    assert kind(1_000_000) == "NumbaEncoder"
    assert kind(999_983) == kind(1_000_000, torch.float64) == "TorchEncoder"
    monkeypatch.setattr("lightning_hetero.compression.host.encoder.find_spec", lambda name: None)
    assert kind(1_000_000) == "TorchEncoder"


@pytest.mark.parametrize("values", VALUES)
def test_double_residuals_lose_nothing(values):
    enc, rows = encoder(("torch", "exact"), (50, 3), 0.5, values=values, dtype=torch.float64)
    gradients = [torch.randn(n, dtype=torch.float64) for n in (50, 3)]
    one = Step(enc, gradients, 0.5)
    one.send(rows[0], step=0)
    _, merged, _ = one.receive(rows, step=0)
    torch.testing.assert_close(merged + enc.residual, flat_of(enc.layout, gradients) * 0.5, rtol=1e-14, atol=1e-16)


# scores that compare parameters of different scales


@pytest.mark.parametrize("backend", HOSTS[::2], ids="-".join)
def test_a_parameter_with_small_gradients_has_its_turn(backend):
    """By magnitude, gradients a thousandth as large would hardly be sent; balanced, they get an equal part."""
    enc, rows = encoder(backend, (500, 500), 0.01, block=1)
    enc.balance = ScoreScaling(enc.layout)
    generator, counts = torch.Generator().manual_seed(0), np.zeros(2)
    for step in range(150):
        gradients = [scale * torch.randn(500, generator=generator) for scale in (1.0, 1e-3)]
        Step(enc, gradients, 1.0).send(rows[0], step=step)
        (pack,) = enc.read(rows, step=step)
        enc.finish()
        if step >= 40:
            counts += np.bincount((pack.indices >= 500).long().numpy(), minlength=2)
    assert 0.35 < counts[1] / counts.sum() < 0.65


def test_factors_follow_the_mean_square_of_what_is_sent():
    """``rms^2 = 0.99 rms^2 + 0.01 sum s^2 / n``; no root is taken as less than 2^-10 of the largest."""
    layout = Layout.of([("a", 4), ("b", 3), ("c", 2)], block=2)
    balance, other = ScoreScaling(layout), ScoreScaling(layout)
    assert set(balance.factors.values()) == {1.0}
    balance.follow(np.array([1, 3]), np.array([[3.0, 0.0], [0.0, 2.0]]))
    balance.follow(np.array([2]), np.array([[5.0, 1.0]]))
    rms = {"a": (0.99 * 9 / 4) ** 0.5, "b": (0.99 * 4 / 3 + 26 / 3) ** 0.5}
    rms["c"] = 2.0**-10 * max(rms.values())  # never sent, so that its turn comes soon
    for name, value in rms.items():
        assert balance.factors[name] == pytest.approx(rms["c"] / value)
    other.load_state_dict(balance.state_dict())
    assert other.factors == balance.factors
