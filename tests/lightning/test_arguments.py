"""Bad input ends at construction or set-up, on every rank, and names the setting."""

import re
from dataclasses import fields
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero import (
    AdaptiveBatchCallback,
    BlockTopK,
    DynamicBatchPIDCallback,
    GNSCallback,
    HeteroDDPStrategy,
    HeteroElasticStrategy,
    PerfModelCallback,
)
from lightning_hetero.config import FOR_OWN_LOOPS, HeteroConfig
from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy as HeteroFabricStrategy
from tests.helpers import Points, Regressor, fit, trainer_of
from tests.ranks import run_ranks

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"policy": "fastest"}, ValueError, "perf_model.*pid.*static.*even"),
        ({"policy": 3}, ValueError, "policy=3"),
        ({"loss_reduction": "none"}, ValueError, "loss_reduction.*mean.*sum"),
        ({"local_batch_sizes": [4, -1]}, ValueError, r"local_batch_sizes\[1\]=-1"),
        ({"local_batch_sizes": [0, 0]}, ValueError, "local_batch_sizes"),
        ({"local_batch_sizes": []}, ValueError, "local_batch_sizes"),
        ({"local_batch_sizes": [4, 2.5]}, TypeError, r"local_batch_sizes\[1\]=2.5"),
        ({"local_batch_sizes": [4, True]}, TypeError, "local_batch_sizes"),
        ({"local_batch_sizes": "4,2"}, TypeError, "local_batch_sizes"),
        ({"local_batch_sizes": 8}, TypeError, "local_batch_sizes"),
        (
            {"local_batch_sizes": [4, 2], "policy": "static"},
            ValueError,
            "local_batch_sizes.*policy|policy.*local_batch",
        ),
        ({"min_local_batch_size": 0}, ValueError, "min_local_batch_size"),
        ({"min_local_batch_size": 1.5}, TypeError, "min_local_batch_size"),
        ({"max_local_batch_sizes": 0}, ValueError, "max_local_batch_sizes"),
        ({"max_local_batch_sizes": [8, -2]}, ValueError, r"max_local_batch_sizes\[1\]=-2"),
        ({"max_local_batch_sizes": 4, "min_local_batch_size": 8}, ValueError, "min_local_batch_size=8"),
        ({"local_batch_multiple": 0}, ValueError, "local_batch_multiple"),
        ({"local_batch_multiple": 2.0}, TypeError, "local_batch_multiple=2.0"),
        ({"local_batch_multiple": 4, "local_batch_sizes": [8, 6]}, ValueError, "local_batch_multiple=4"),
        ({"local_batch_multiple": 8, "max_local_batch_sizes": [16, 7]}, ValueError, "local_batch_multiple=8"),
        ({"local_batch_multiple": 4, "min_local_batch_size": 5, "max_local_batch_sizes": 6}, ValueError, "multiple=4"),
        ({"local_batch_multiple": 2, "cost_fn": "tokens"}, ValueError, "local_batch_multiple=2"),
        ({"weight_fn": 3}, TypeError, "weight_fn"),
        ({"weight_fn": len, "loss_reduction": "sum"}, ValueError, "weight_fn"),
        ({"replan": "always"}, ValueError, "replan"),
        ({"replan": 0}, ValueError, "replan"),
        ({"replan": 2.5}, TypeError, "replan"),
        ({"hysteresis": -0.1}, ValueError, "hysteresis"),
        ({"hysteresis": NAN}, ValueError, "hysteresis"),
        ({"hysteresis": "3%"}, TypeError, "hysteresis"),
        ({"change_cost": -1}, ValueError, "change_cost"),
        ({"change_cost": INF}, ValueError, "change_cost"),
        ({"change_cost": "20 s"}, TypeError, "change_cost"),
        ({"balance_evaluation": "yes"}, TypeError, "balance_evaluation"),
        ({"probe_memory": 1}, TypeError, "probe_memory"),
        ({"local_batch_sizes": [7, 1], "max_local_batch_sizes": [4, 4]}, ValueError, "max_local_batch_sizes"),
        ({"local_batch_sizes": [1, 7], "max_local_batch_sizes": 4}, ValueError, "max_local_batch_sizes"),
        ({"staleness": 1, "compression": "powersgd"}, ValueError, "stale"),
        ({"staleness": 1, "compression": "fp16"}, ValueError, "stale"),
        ({"staleness": 2}, ValueError, "staleness=2"),
        ({"staleness": -1}, ValueError, "staleness=-1"),
        ({"staleness": True}, TypeError, "staleness=True"),
        ({"model_averaging_period": 2}, ValueError, "model_averaging_period"),
        ({"ddp_comm_state": PostLocalSGDState(None, None, 1)}, ValueError, "PostLocalSGDState"),
        ({"compression": "fp16", "ddp_comm_hook": len}, ValueError, "compression.*ddp_comm_hook"),
        ({"hierarchy": "nodes", "ddp_comm_hook": len}, ValueError, "hierarchy.*ddp_comm_hook"),
        ({"max_total_batch_size": 64}, TypeError, "max_total_batch_size.*AdaptiveBatchCallback"),
        ({"xyzzy": 1}, TypeError, "xyzzy.*policy.*static_graph"),
    ],
)
def test_a_strategy_is_not_made_of_what_cannot_be(arguments, error, says):
    with pytest.raises(error, match=says):
        HeteroDDPStrategy(**arguments)


LIGHTNING = {
    "timeouts": "timeout",
    "proces_group_backend": "process_group_backend",
    "start_methods": "start_method",
    "checkpoint_ios": "checkpoint_io",
}
OURS = {
    "local_batch_size": "local_batch_sizes",
    "find_unused_parameter": "find_unused_parameters",
    "gradient_as_buckets_view": "gradient_as_bucket_view",
}


@pytest.mark.parametrize(
    ("strategy", "names"),
    [
        (HeteroDDPStrategy, {**LIGHTNING, **OURS}),
        (HeteroFabricStrategy, {**LIGHTNING, **OURS}),
        (HeteroElasticStrategy, {**LIGHTNING, "merges": "merge"}),
    ],
)
def test_a_misspelt_keyword_is_refused_with_the_one_that_was_meant(strategy, names):
    for given, meant in names.items():
        with pytest.raises(TypeError, match=rf"{strategy.__name__}.* {given}\. .*{meant}\?"):
            strategy(**{given: 3})


def test_keywords_of_a_subclass_and_of_ddp_are_taken():
    class Own(HeteroDDPStrategy):
        def __init__(self, colour, **kwargs):
            self.colour = colour
            super().__init__(**kwargs)

    for made in (Own("red", static_graph=True, bucket_cap_mb=5, timeout=timedelta(seconds=9)), HeteroFabricStrategy()):
        assert made.config == HeteroConfig()
    with pytest.raises(TypeError, match="unused"):
        Own("red", unused=1)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"dead_band": 2}, ValueError, "dead_band=2"),
        ({"decay": -1}, ValueError, "decay=-1"),
        ({"decay": "slow"}, TypeError, "decay='slow'"),
    ],
)
def test_the_pid_callback_is_not_made_of_what_cannot_be(arguments, error, says):
    with pytest.raises(error, match=says):
        DynamicBatchPIDCallback(**arguments)


SETTINGS = {
    "policy": "pid",
    "loss_reduction": "sum",
    "local_batch_sizes": (3, 1),
    "min_local_batch_size": 3,
    "max_local_batch_sizes": 64,
    "local_batch_multiple": 8,
    "weight_fn": len,
    "cost_fn": len,
    "report": False,
    "replan": 7,
    "hysteresis": 0.1,
    "change_cost": 12.5,
    "balance_evaluation": True,
    "probe_memory": True,
    "compression": BlockTopK(density=0.03),
    "hierarchy": ((0, 1), (2,)),
    "sparse_optimizer": "later",
    "staleness": 1,
    "transfer_priority": True,
    "shard": "whole",
    "batch_sampler": "global",
    "slice_fn": len,
    "concat_fn": len,
    "on_nonfinite": "skip",
    "max_total_batch_size": 4096,
    "min_total_batch_size": 64,
    "lr_scaling": "none",
    "noise_scale": True,
}
BESIDE = {
    "sparse_optimizer": {"compression": "block_topk"},
    "min_total_batch_size": {"max_total_batch_size": 4096},
    "lr_scaling": {"max_total_batch_size": 4096},
}


@pytest.mark.parametrize("name", [field.name for field in fields(HeteroConfig)])
def test_every_setting_reaches_the_run_and_is_compared_between_ranks(name):
    beside = BESIDE.get(name, {})
    given = {**beside, name: SETTINGS[name]}
    for strategy, without in (
        (HeteroDDPStrategy, FOR_OWN_LOOPS),
        (HeteroFabricStrategy, ("staleness", "probe_memory")),
    ):
        if name not in without:
            assert getattr(strategy(**given).config, name) == SETTINGS[name]
    if name != "probe_memory":
        assert (HeteroConfig(**given).fingerprint() != HeteroConfig(**beside).fingerprint()) == (name != "report")


# at set-up, on every rank


class Normalised(Regressor):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(5).double()

    def forward(self, x):
        return self.net(self.norm(x))


class DrawsItself(Regressor):
    def training_step(self, dataloader_iter):
        return self.loss(next(dataloader_iter)[0])


def policies(*callbacks):
    return {"callbacks": [callback() for callback in callbacks]}


POLICY = PerfModelCallback
BAD_SETUPS = {
    "sizes": ({"local_batch_sizes": [4, 2, 1]}, {}, "local_batch_sizes.* 3 .*2"),
    "bounds": ({"max_local_batch_sizes": [4, 2, 1]}, {}, "max_local_batch_sizes.* 3 .*2"),
    "small bounds": ({"max_local_batch_sizes": [3, 3]}, {}, "8 samples.*together 6"),
    "one small bound": ({"max_local_batch_sizes": 2}, {}, "8 samples"),
    "minimum": ({"min_local_batch_size": 8}, {}, "at least 8"),
    "multiple": ({"local_batch_multiple": 3}, {}, "local_batch_multiple=3.* 6 or 9"),
    "large multiple": ({"local_batch_multiple": 8}, {}, "local_batch_multiple"),
    "multiple and bounds": (
        {"local_batch_multiple": 4, "max_local_batch_sizes": [9, 4]},
        {"batch_size": 8},
        "together 12",
    ),
    "batch normalization": ({}, {"model": Normalised, "batch_size": 1}, "at least 2"),
    "policies": ({}, policies(POLICY, DynamicBatchPIDCallback), "several policies.*PerfModel.*DynamicBatchPID"),
    "policy and callback": ({"policy": "pid"}, policies(POLICY), "several policies"),
    "even and callback": ({"policy": "even"}, policies(POLICY), "several policies"),
    "sizes and callback": ({"local_batch_sizes": [4, 2]}, policies(POLICY), "several policies.*local_batch_sizes"),
    "plain": ("ddp", policies(POLICY), "hetero_ddp"),
    "draws batches itself": ({}, {"model": DrawsItself}, "dataloader_iter"),
    "ranks: settings": (lambda rank: {"hysteresis": 0.1 * (rank + 1)}, {}, "PlanMismatchError.*rank 0:.*rank 1:"),
    "ranks: batch size": ({}, lambda rank: {"batch_size": 4 + rank}, "PlanMismatchError.*rank 0:.*rank 1:"),
    "ranks: dataset": ({}, lambda rank: {"n": 24 + rank}, "PlanMismatchError.*rank 0:.*rank 1:"),
}


def _setups(rank):
    found = {}
    for name, (strategy, given, _) in BAD_SETUPS.items():
        given = dict(given(rank) if callable(given) else given)
        given["model"] = given.get("model", Regressor)()
        size, dataset = given.pop("batch_size", 4), Points(given.pop("n", 24))
        try:
            fit(rank, strategy(rank) if callable(strategy) else strategy, 2, size, dataset=dataset, **given)
            found[name] = "nothing"
        except Exception as error:  # noqa: BLE001 - the test looks at it
            found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.filterwarnings("ignore:.*dataloader_iter")
def test_a_setup_that_cannot_be_is_refused_on_every_rank():
    for errors in run_ranks(_setups, 2):
        for name, (*_, says) in BAD_SETUPS.items():
            assert re.search(says, errors[name], re.DOTALL), (name, errors[name])


@pytest.mark.parametrize("name", ["FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy"])
@pytest.mark.parametrize("make", [POLICY, DynamicBatchPIDCallback, lambda: AdaptiveBatchCallback(64), GNSCallback])
def test_strategies_that_shard_the_model_are_refused_by_name(make, name):
    callback, sharding = make(), type(name, (), {})()
    trainer = SimpleNamespace(strategy=sharding, world_size=2, callbacks=[callback], global_rank=0)
    with pytest.raises(MisconfigurationException, match=rf"{name}.*hetero_ddp"):
        callback.setup(trainer, None, "fit")


def test_the_trainer_accepts_every_alias():
    for start in ("", "_spawn", "_fork", "_notebook"):
        for unused in ("", "_find_unused_parameters_true", "_find_unused_parameters_false"):
            assert isinstance(trainer_of(f"hetero_ddp{start}{unused}", 1).strategy, HeteroDDPStrategy)


def _wraps(rank):
    def no_stream(*args):
        raise AssertionError("on another stream, gradients would wait for it in each step")

    made, strategy = [], HeteroDDPStrategy(static_graph=True, bucket_cap_mb=5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "stream", no_stream)
        patch.setattr(torch.cuda, "Stream", no_stream)
        initialise = DistributedDataParallel.__init__

        def noted(self, *args, **kwargs):
            made.append(kwargs)
            initialise(self, *args, **kwargs)

        patch.setattr(DistributedDataParallel, "__init__", noted)
        fit(rank, strategy, 2, 4, dataset=Points(16), max_epochs=1)
    return [{key: given.get(key) for key in ("static_graph", "bucket_cap_mb", "device_ids")} for given in made]


def test_ddp_is_built_on_the_stream_that_computes_with_the_users_arguments():
    assert run_ranks(_wraps, 2) == [[{"static_graph": True, "bucket_cap_mb": 5, "device_ids": None}]] * 2
