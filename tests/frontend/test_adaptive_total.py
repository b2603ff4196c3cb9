"""Learning rate of a moving total: the count of scale-invariant steps over a loaded state."""

import torch
from torch import nn

from lightning_hetero.frontend.adaptive_total import AdaptiveTotal


def test_a_loaded_count_of_steps_replaces_that_of_optimizers_already_held():
    total, optimizer = AdaptiveTotal(64, "sqrt"), torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    total.hold([optimizer])
    optimizer.step()
    assert total.scale_invariant_steps == 1.0
    total.load_state_dict({"scale_invariant_steps": 7.0})
    assert total.scale_invariant_steps == 7.0
    optimizer.step()
    assert total.scale_invariant_steps == 8.0
