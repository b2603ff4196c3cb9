"""The rule of SGD: what is deferred, what it needs of the state, and what blocks keep of their momentum."""

import pytest
import torch

from lightning_hetero.optim.sparse.kernel_interface import FRACTION_BITS
from lightning_hetero.optim.sparse.sgd import SGDRule

GROUP = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0, "nesterov": False}


@pytest.mark.parametrize(
    ("mode", "changed", "kind"),
    [
        ("ahead", {}, "interval"),
        ("later", {}, "later"),
        ("ahead", {"momentum": 1.0}, "later"),
        ("ahead", {"momentum": 0.0, "weight_decay": 0.1}, "decay"),
        ("later", {"momentum": 0.0}, None),
    ],
)
def test_what_is_deferred(mode, changed, kind):
    assert SGDRule(mode).kind({**GROUP, **changed}) == kind


def test_state_is_needed_with_momentum_only_and_laid_out_as_the_parameter():
    p = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    rule, state = SGDRule(), {"momentum_buffer": torch.arange(120.0).view(2, 3, 4, 5)}
    assert rule.has_state({**GROUP, "momentum": 0.0}, p, {})
    assert not rule.has_state(GROUP, p, {})
    assert not rule.has_state(GROUP, p, {"momentum_buffer": None})
    assert rule.has_state(GROUP, p, state)
    assert state["momentum_buffer"].stride() == p.stride()
    assert torch.equal(state["momentum_buffer"], torch.arange(120.0).view(2, 3, 4, 5))


def test_blocks_keep_momentum_by_twice_their_mean_interval():
    """0 at the first touch; intervals are rounded down to whole steps."""
    intervals = torch.tensor([0, 1, 1 + (1 << FRACTION_BITS), (2 << FRACTION_BITS), 1 + (3 << FRACTION_BITS)])
    kept = SGDRule().kept_share(GROUP, intervals)
    torch.testing.assert_close(kept, torch.tensor([0.0, 1.0, 0.9**2, 0.9**2, 0.9**6]))
    assert SGDRule().kept_share(GROUP, None) is None
