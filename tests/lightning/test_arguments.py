"""Bad input ends at construction or set-up, on every rank, and names the setting."""

import re
from datetime import timedelta

import pytest
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

from lightning_hetero import (
    HeteroDDPStrategy,
    PerfModelCallback,
)
from lightning_hetero.config import HeteroConfig
from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy as HeteroFabricStrategy
from tests.helpers import Points, fit
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"policy": "fastest"}, ValueError, "perf_model.*pid.*static.*even"),
        ({"local_batch_sizes": [4, -1]}, ValueError, r"local_batch_sizes\[1\]=-1"),
        ({"local_batch_sizes": [4, 2.5]}, TypeError, r"local_batch_sizes\[1\]=2.5"),
        ({"local_batch_sizes": "4,2"}, TypeError, "local_batch_sizes"),
        (
            {"local_batch_sizes": [4, 2], "policy": "static"},
            ValueError,
            "local_batch_sizes.*policy|policy.*local_batch",
        ),
        ({"min_local_batch_size": 0}, ValueError, "min_local_batch_size"),
        ({"max_local_batch_sizes": [8, -2]}, ValueError, r"max_local_batch_sizes\[1\]=-2"),
        ({"max_local_batch_sizes": 4, "min_local_batch_size": 8}, ValueError, "min_local_batch_size=8"),
        ({"local_batch_multiple": 4, "local_batch_sizes": [8, 6]}, ValueError, "local_batch_multiple=4"),
        ({"local_batch_multiple": 2, "cost_fn": "tokens"}, ValueError, "local_batch_multiple=2"),
        ({"weight_fn": 3}, TypeError, "weight_fn"),
        ({"weight_fn": len, "loss_reduction": "sum"}, ValueError, "weight_fn"),
        ({"hysteresis": -0.1}, ValueError, "hysteresis"),
        ({"change_cost": -1}, ValueError, "change_cost"),
        ({"probe_memory": 1}, TypeError, "probe_memory"),
        ({"local_batch_sizes": [7, 1], "max_local_batch_sizes": [4, 4]}, ValueError, "max_local_batch_sizes"),
        ({"staleness": 1, "compression": "powersgd"}, ValueError, "stale"),
        ({"staleness": 2}, ValueError, "staleness=2"),
        ({"model_averaging_period": 2}, ValueError, "model_averaging_period"),
        ({"ddp_comm_state": PostLocalSGDState(None, None, 1)}, ValueError, "PostLocalSGDState"),
        ({"compression": "fp16", "ddp_comm_hook": len}, ValueError, "compression.*ddp_comm_hook"),
        ({"hierarchy": "nodes", "ddp_comm_hook": len}, ValueError, "hierarchy.*ddp_comm_hook"),
        ({"xyzzy": 1}, TypeError, "xyzzy.*policy.*static_graph"),
    ],
)
def test_a_strategy_is_not_made_of_what_cannot_be(arguments, error, says):
    with pytest.raises(error, match=says):
        HeteroDDPStrategy(**arguments)


def test_keywords_of_a_subclass_and_of_ddp_are_taken():
    class Own(HeteroDDPStrategy):
        def __init__(self, colour, **kwargs):
            self.colour = colour
            super().__init__(**kwargs)

    for made in (Own("red", static_graph=True, bucket_cap_mb=5, timeout=timedelta(seconds=9)), HeteroFabricStrategy()):
        assert made.config == HeteroConfig()
    with pytest.raises(TypeError, match="unused"):
        Own("red", unused=1)


# at set-up, on every rank


BAD_SETUPS = {
    "sizes": ({"local_batch_sizes": [4, 2, 1]}, {}, "local_batch_sizes.* 3 .*2"),
    "bounds": ({"max_local_batch_sizes": [4, 2, 1]}, {}, "max_local_batch_sizes.* 3 .*2"),
    "small bounds": ({"max_local_batch_sizes": [3, 3]}, {}, "8 samples.*together 6"),
    "minimum": ({"min_local_batch_size": 8}, {}, "at least 8"),
    "multiple": ({"local_batch_multiple": 3}, {}, "local_batch_multiple=3.* 6 or 9"),
    "even and callback": ({"policy": "even"}, {"callbacks": [PerfModelCallback()]}, "several policies"),
    "ranks: settings": (lambda rank: {"hysteresis": 0.1 * (rank + 1)}, {}, "PlanMismatchError.*rank 0:.*rank 1:"),
    "ranks: batch size": ({}, lambda rank: {"batch_size": 4 + rank}, "PlanMismatchError.*rank 0:.*rank 1:"),
    "ranks: dataset": ({}, lambda rank: {"n": 24 + rank}, "PlanMismatchError.*rank 0:.*rank 1:"),
}


def _setups(rank):
    found = {}
    for name, (strategy, given, _) in BAD_SETUPS.items():
        given = dict(given(rank) if callable(given) else given)
        size, dataset = given.pop("batch_size", 4), Points(given.pop("n", 24))
        try:
            fit(rank, strategy(rank) if callable(strategy) else strategy, 2, size, dataset=dataset, **given)
            found[name] = "nothing"
        except Exception as error:  # noqa: BLE001 - the test looks at it
            found[name] = f"{type(error).__name__}: {error}"
    return found


def test_a_setup_that_cannot_be_is_refused_on_every_rank():
    for errors in run_ranks(_setups, 2):
        for name, (*_, says) in BAD_SETUPS.items():
            assert re.search(says, errors[name], re.DOTALL), (name, errors[name])
