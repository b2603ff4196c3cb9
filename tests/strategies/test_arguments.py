"""Bad input ends at construction or set-up, on every rank, with what was given, what is allowed and what to do."""

from contextlib import nullcontext
from dataclasses import fields
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

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
from tests.helpers import Points, Regressor, fit, run_ranks, trainer_of, without_address


class Wrapped(nn.Module):
    """Stands for DDP, and knows what it was made with."""

    find_unused_parameters = False

    def __init__(self, **made_with):
        super().__init__()
        self.made_with = made_with

    def register_comm_hook(self, state, hook):
        self.hook = hook


@pytest.mark.parametrize("kind", [HeteroDDPStrategy, HeteroFabricStrategy])
def test_ddp_is_built_on_the_stream_that_computes(monkeypatch, kind):
    """On another, as Lightning does, gradients are accumulated there, and each of them waits for it in every step."""
    mixin = next(base.__module__ for base in kind.__mro__ if base.__name__.endswith("Mixin"))
    theirs = next(base.__module__ for base in kind.__mro__ if base.__name__ == "DDPStrategy")
    for module in (mixin, theirs):
        monkeypatch.setattr(f"{module}.DistributedDataParallel", Wrapped)
    monkeypatch.setattr(f"{mixin}.WrappedModel", lambda *arguments: None)
    streams = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda: "another")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(streams.append(stream)))
    strategy = kind(static_graph=True)
    for name in ("determine_ddp_device_ids", "_determine_ddp_device_ids"):
        monkeypatch.setattr(strategy, name, lambda: [1], raising=False)
    model = nn.Linear(2, 2)
    if kind is HeteroDDPStrategy:
        wrapped = strategy._setup_model(model)
    else:
        data = SimpleNamespace(min_local=1)
        engine = SimpleNamespace(config=strategy.config, data=data, hook_state=None, world_size=2)
        strategy.session = SimpleNamespace(engine=engine, watch=lambda model: None)
        wrapped = strategy.setup_module(model)
    assert wrapped.made_with == {"module": model, "device_ids": [1], "static_graph": True}
    assert streams == []


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"policy": "fastest"}, ValueError, "'perf_model', 'pid', 'static', 'even'"),
        ({"policy": 3}, ValueError, "policy=3 is unknown"),
        ({"loss_reduction": "none"}, ValueError, "'mean', 'sum'"),
        ({"local_batch_sizes": [4, -1]}, ValueError, r"local_batch_sizes\[1\]=-1 .* >= 0"),
        ({"local_batch_sizes": [0, 0]}, ValueError, "no samples"),
        ({"local_batch_sizes": []}, ValueError, "empty"),
        ({"local_batch_sizes": [4, 2.5]}, TypeError, r"local_batch_sizes\[1\]=2.5 is a float; give an integer"),
        ({"local_batch_sizes": [4, True]}, TypeError, "bool"),
        ({"local_batch_sizes": "4,2"}, TypeError, "list of integers"),
        ({"local_batch_sizes": 8}, TypeError, "list of integers"),
        ({"local_batch_sizes": [4, 2], "policy": "static"}, ValueError, "Give one"),
        ({"min_local_batch_size": 0}, ValueError, ">= 1"),
        ({"min_local_batch_size": 1.5}, TypeError, "float"),
        ({"max_local_batch_sizes": 0}, ValueError, ">= 1"),
        ({"max_local_batch_sizes": [8, -2]}, ValueError, r"max_local_batch_sizes\[1\]=-2"),
        ({"max_local_batch_sizes": 4, "min_local_batch_size": 8}, ValueError, "below min_local_batch_size=8"),
        ({"local_batch_multiple": 0}, ValueError, ">= 1"),
        ({"local_batch_multiple": 2.0}, TypeError, "local_batch_multiple=2.0"),
        ({"local_batch_multiple": 4, "local_batch_sizes": [8, 6]}, ValueError, "local_batch_multiple=4"),
        ({"local_batch_multiple": 8, "max_local_batch_sizes": [16, 7]}, ValueError, "local_batch_multiple=8"),
        (
            {"local_batch_multiple": 4, "min_local_batch_size": 5, "max_local_batch_sizes": 6},
            ValueError,
            "local_batch_multiple=4",
        ),
        ({"local_batch_multiple": 2, "cost_fn": "tokens"}, ValueError, "local_batch_multiple=2"),
        ({"weight_fn": 3}, TypeError, "not callable"),
        ({"weight_fn": len, "loss_reduction": "sum"}, ValueError, "Give one"),
        ({"replan": "always"}, ValueError, "'auto', 'epoch'"),
        ({"replan": 0}, ValueError, ">= 1"),
        ({"replan": 2.5}, TypeError, "float"),
        ({"hysteresis": -0.1}, ValueError, "out of range"),
        ({"hysteresis": float("nan")}, ValueError, "out of range"),
        ({"hysteresis": "3%"}, TypeError, "str"),
        ({"change_cost": -1}, ValueError, r"give a finite number, 0\.0 or more\.$"),
        ({"change_cost": float("inf")}, ValueError, r"give a finite number, 0\.0 or more\.$"),
        ({"change_cost": "20 s"}, TypeError, r"give a finite number, 0\.0 or more\.$"),
        ({"balance_evaluation": "yes"}, TypeError, "True or False"),
        ({"probe_memory": 1}, TypeError, "True or False"),
        ({"local_batch_sizes": [7, 1], "max_local_batch_sizes": [4, 4]}, ValueError, r"\[7, 1\] .* above max_local"),
        ({"local_batch_sizes": [1, 7], "max_local_batch_sizes": 4}, ValueError, r"\[1, 7\] has a size above"),
        ({"staleness": 1, "compression": "powersgd"}, ValueError, "only those of block_topk can be stale"),
        ({"staleness": 1, "compression": "fp16"}, ValueError, "only those of block_topk can be stale"),
        ({"staleness": 2}, ValueError, "staleness=2 is unknown; allowed are 0, 1"),
        ({"staleness": -1}, ValueError, "staleness=-1"),
        ({"staleness": True}, TypeError, "staleness=True"),
        ({"model_averaging_period": 2}, ValueError, "post-local SGD"),
        ({"ddp_comm_state": PostLocalSGDState(None, None, 1)}, ValueError, "post-local SGD"),
    ],
    ids=without_address,
)
def test_constructor_refuses(arguments, error, says):
    with pytest.raises(error, match=says):
        HeteroDDPStrategy(**arguments)


@pytest.mark.parametrize("strategy", [HeteroDDPStrategy, HeteroElasticStrategy, HeteroFabricStrategy])
@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("timeouts", "timeout"),
        ("proces_group_backend", "process_group_backend"),
        ("start_methods", "start_method"),
        ("checkpoint_ios", "checkpoint_io"),
    ],
)
def test_a_misspelt_keyword_is_refused_at_construction(strategy, given, meant):
    with pytest.raises(
        TypeError, match=rf"{strategy.__name__} has no argument {given}. Did you mean {meant}\?.*Allowed"
    ):
        strategy(**{given: 3})


@pytest.mark.parametrize("strategy", [HeteroDDPStrategy, HeteroFabricStrategy])
@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("local_batch_size", "local_batch_sizes"),
        ("find_unused_parameter", "find_unused_parameters"),
        ("gradient_as_buckets_view", "gradient_as_bucket_view"),
    ],
)
def test_a_misspelt_keyword_of_the_split_or_of_ddp_is_refused_at_construction(strategy, given, meant):
    with pytest.raises(TypeError, match=rf"has no argument {given}. Did you mean {meant}\?"):
        strategy(**{given: True})


def test_a_misspelt_keyword_of_elastic_averaging_is_refused_at_construction():
    with pytest.raises(TypeError, match="has no argument merges. Did you mean merge"):
        HeteroElasticStrategy(merges="mean")


def test_what_is_like_no_argument_is_refused_with_those_that_there_are():
    with pytest.raises(TypeError, match="has no argument xyzzy. Allowed are policy, .*static_graph"):
        HeteroDDPStrategy(xyzzy=1)


def test_keywords_of_a_subclass_and_of_ddp_are_taken():
    class Own(HeteroDDPStrategy):
        def __init__(self, colour, **kwargs):
            self.colour = colour
            super().__init__(**kwargs)

    made = Own("red", static_graph=True, bucket_cap_mb=5, timeout=timedelta(seconds=9))
    assert made._ddp_kwargs == {"static_graph": True, "bucket_cap_mb": 5}
    fabric = HeteroFabricStrategy(find_unused_parameters=True)
    assert fabric._ddp_kwargs == {"find_unused_parameters": True}


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"dead_band": 2}, ValueError, "dead_band=2"),
        ({"decay": -1}, ValueError, "decay=-1"),
        ({"decay": "slow"}, TypeError, "decay='slow'"),
    ],
)
def test_pid_callback_refuses(arguments, error, says):
    with pytest.raises(error, match=says):
        DynamicBatchPIDCallback(**arguments)


class Normalised(Regressor):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(5).double()

    def forward(self, x):
        return self.net(self.norm(x))


def _setup(rank, strategy, ranks, kwargs):
    if callable(strategy):
        strategy = strategy()
    kwargs = dict(kwargs)
    return fit(rank, strategy, ranks, kwargs.pop("batch_size", 4), dataset=Points(kwargs.pop("n", 24)), **kwargs)


@pytest.mark.parametrize(
    ("strategy", "kwargs", "error", "says"),
    [
        ({"local_batch_sizes": [4, 2, 1]}, {}, "ValueError", "3 entries for 2 workers"),
        ({"max_local_batch_sizes": [4, 2, 1]}, {}, "ValueError", "3 entries for 2 workers"),
        ({"max_local_batch_sizes": [3, 3]}, {}, "ValueError", "8 samples does not fit.*together 6"),
        ({"max_local_batch_sizes": 2}, {}, "ValueError", "does not fit"),
        ({"min_local_batch_size": 8}, {}, "ValueError", "cannot give each of 2 workers at least 8"),
        ({"local_batch_multiple": 3}, {}, "ValueError", "local_batch_multiple=3.* 6 or 9"),
        ({"local_batch_multiple": 8}, {}, "ValueError", "local_batch_multiple"),
        ({"local_batch_multiple": 4, "max_local_batch_sizes": [9, 4]}, {"batch_size": 8}, "ValueError", "together 12"),
        ({}, {"model": Normalised(), "batch_size": 1}, "ValueError", "at least 2"),
        (
            {},
            {"callbacks": [PerfModelCallback(), DynamicBatchPIDCallback()]},
            "MisconfigurationException",
            "several policies.*PerfModelCallback, DynamicBatchPIDCallback",
        ),
        ({"policy": "pid"}, {"callbacks": [PerfModelCallback()]}, "MisconfigurationException", "several policies"),
        ({"policy": "even"}, {"callbacks": [PerfModelCallback()]}, "MisconfigurationException", "several policies"),
        (
            {"local_batch_sizes": [4, 2]},
            {"callbacks": [PerfModelCallback()]},
            "MisconfigurationException",
            "several policies.*local_batch_sizes",
        ),
        ("ddp", {"callbacks": [PerfModelCallback()]}, "MisconfigurationException", "Trainer.strategy='hetero_ddp'"),
    ],
    ids=without_address,
)
def test_setup_refuses_on_every_rank(strategy, kwargs, error, says):
    import re

    errors = run_ranks(_setup, 2, strategy, 2, kwargs, expect_errors=True, timeout=60)
    assert [rank for rank, *_ in errors] == [0, 1]
    for _, kind, message in errors:
        assert error in kind
        assert re.search(says, message, re.DOTALL), message


@pytest.mark.parametrize("name", ["FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy"])
@pytest.mark.parametrize(
    "callback",
    [PerfModelCallback(), DynamicBatchPIDCallback(), AdaptiveBatchCallback(64), GNSCallback()],
    ids=lambda callback: type(callback).__name__,
)
def test_strategies_that_shard_the_model_are_refused_by_name(callback, name):
    """At setup, which every rank comes to; on a machine without a GPU their own refusal would come first."""
    sharding = type(name, (), {})()
    trainer = SimpleNamespace(strategy=sharding, world_size=2, callbacks=[callback], global_rank=0)
    with pytest.raises(MisconfigurationException, match=rf"{name}.*Use .*strategy='hetero_ddp'"):
        callback.setup(trainer, None, "fit")


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
"""A value of every setting that has to be the same on all ranks."""
BESIDE = {
    "sparse_optimizer": {"compression": "block_topk"},
    "min_total_batch_size": {"max_total_batch_size": 4096},
    "lr_scaling": {"max_total_batch_size": 4096},
}


def test_every_setting_has_a_value_here():
    assert {*SETTINGS, "probe_memory"} == {field.name for field in fields(HeteroConfig)}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_reaches_the_run_and_is_compared_between_ranks(name):
    given = {**BESIDE.get(name, {}), name: SETTINGS[name]}
    for strategy in (HeteroDDPStrategy, HeteroFabricStrategy):
        here = name not in (FOR_OWN_LOOPS if strategy is HeteroDDPStrategy else ("staleness",))
        assert not here or getattr(strategy(**given).config, name) == SETTINGS[name]
    other = HeteroConfig(**BESIDE.get(name, {}))
    assert (HeteroConfig(**given).fingerprint() != other.fingerprint()) == (name != "report")


def _different(rank, what):
    strategy = {"hysteresis": 0.1 + rank} if what == "settings" else {}
    return fit(rank, strategy, 2, 4 + rank * (what == "batch_size"), dataset=Points(24 + rank * (what == "dataset")))


@pytest.mark.parametrize("what", ["settings", "batch_size", "dataset"])
def test_ranks_that_differ_are_found(what):
    if what == "settings":
        errors = run_ranks(_different_settings, 2, expect_errors=True, timeout=60)
    else:
        errors = run_ranks(_different, 2, what, expect_errors=True, timeout=60)
    assert [(rank, kind) for rank, kind, _ in errors] == [(0, "PlanMismatchError"), (1, "PlanMismatchError")]
    assert all("rank 0:" in message and "rank 1:" in message for *_, message in errors)


def _different_settings(rank):
    return fit(rank, {"hysteresis": 0.1 * (rank + 1)}, 2, 4)


def test_trainer_accepts_every_alias():
    for start in ("", "_spawn", "_fork", "_notebook"):
        for unused in ("", "_find_unused_parameters_true", "_find_unused_parameters_false"):
            trainer = trainer_of(f"hetero_ddp{start}{unused}", 1)
            assert isinstance(trainer.strategy, HeteroDDPStrategy)
