"""Settings by argument, variable, YAML file, launcher's flag and Trainer's option: one table, one order, one check."""

import json
import operator
import pickle
from dataclasses import fields

import pytest
import yaml
from accelerate.state import AcceleratorState
from transformers import HfArgumentParser, Seq2SeqTrainingArguments, TrainingArguments

from lightning_hetero import BlockTopK, HeteroDDPStrategy
from lightning_hetero.accelerate import HeteroAccelerator, HeteroPlugin
from lightning_hetero.accelerate.plugin import PREFIX, SETTINGS, as_environment, switched_on
from lightning_hetero.cli.launch import hetero_environment
from lightning_hetero.config import FOR_OWN_LOOPS, HeteroConfig
from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy as FabricStrategy
from lightning_hetero.transformers import HeteroTrainingArguments, hetero_arguments
from lightning_hetero.transformers.arguments import by_tokens, plugin_of

QUIET = {"output_dir": "out", "use_cpu": True, "report_to": [], "bf16": False}
TOTAL = {"max_total_batch_size": "4096"}


def half_linear(total, initial, trace, grad_sq_norm):
    return 1 + (total / initial - 1) / 2


VALUES = {
    "report": ("runs/first", "runs/first"),
    "policy": ("pid", "pid"),
    "loss_reduction": ("sum", "sum"),
    "local_batch_sizes": ("24, 12,16", (24, 12, 16)),
    "min_local_batch_size": ("3", 3),
    "max_local_batch_sizes": ("[64, 32]", (64, 32)),
    "local_batch_multiple": ("8", 8),
    "weight_fn": ("operator:itemgetter", operator.itemgetter),
    "cost_fn": ("operator:itemgetter", operator.itemgetter),
    "replan": ("epoch", "epoch"),
    "hysteresis": ("1e-05", 1e-05),
    "change_cost": ("12.5", 12.5),
    "hierarchy": ("[[0, 1], [2]]", ((0, 1), (2,))),
    "sparse_optimizer": ("later", "later"),
    "on_nonfinite": ("skip", "skip"),
    "max_total_batch_size": ("4096", 4096),
    "min_total_batch_size": ("64", 64),
    "lr_scaling": ("tests.front_ends.test_settings:half_linear", half_linear),
    "shard": ("whole", "whole"),
    "batch_sampler": ("global", "global"),
    "slice_fn": ("builtins:len", len),
    "concat_fn": ("builtins:len", len),
    "noise_scale": ("true", True),
    "compression": ("block_topk(density=0.03, value_dtype='int8')", BlockTopK(density=0.03, value_dtype="int8")),
}
NEEDS = {
    "sparse_optimizer": "compression",
    "min_total_batch_size": "max_total_batch_size",
    "lr_scaling": "max_total_batch_size",
}
IN_LIGHTNING = {"balance_evaluation": True, "probe_memory": True, "staleness": 1, "transfer_priority": True}


def from_variables(settings, folder):
    with pytest.MonkeyPatch.context() as patch:
        for name, text in settings.items():
            patch.setenv(PREFIX + name.upper(), text)
        return HeteroPlugin()


def from_file(settings, folder):
    (folder / "settings.yaml").write_text(yaml.safe_dump({"hetero_config": settings}))
    return from_variables({"config_file": str(folder / "settings.yaml")}, folder)


def from_flags(settings, folder):
    found = hetero_environment({}, settings, {})
    return from_variables({name.removeprefix(PREFIX): found[name] for name in found if name.startswith(PREFIX)}, folder)


def from_options(settings, folder):
    line = ["--output_dir", "out", "--use_cpu", "--report_to", "none"]
    line += [text for name, value in settings.items() for text in (f"--hetero_{name}", value)]
    return plugin_of(HfArgumentParser(HeteroTrainingArguments).parse_args_into_dataclasses(line)[0])


@pytest.fixture(params=[from_variables, from_file, from_flags, from_options], ids=lambda made: made.__name__)
def made(request, tmp_path):
    """A plugin of texts, from each of the places where users write them."""
    return lambda settings: request.param(settings, tmp_path)


def test_every_setting_has_a_row_and_is_read_from_wherever_it_is_written(made):
    assert set(VALUES) == set(SETTINGS), "give each new setting a row, and remove those that are gone"
    for name, (text, value) in VALUES.items():
        beside = {NEEDS[name]: VALUES[NEEDS[name]][0]} if name in NEEDS else {}
        found = getattr(made({name: text, **beside}), name)
        assert found == value or (callable(value) and found.__qualname__ == value.__qualname__), name


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"hysteresis": "a lot"}, "hysteresis"),
        ({"density": "0.05", "compression": "powersgd"}, "density"),
        ({"replan": "2.5"}, "replan"),
        ({"compression": "block_topk(density=7)"}, "density"),
        ({"local_batch_sizes": "3,x"}, "local_batch_sizes"),
        ({"lr_scaling": "cubic", **TOTAL}, "lr_scaling"),
        ({"cost_fn": "nowhere:count"}, "cost_fn"),
    ],
    ids=str,
)
def test_a_wrong_value_is_named_with_its_setting(made, settings, says):
    with pytest.raises((TypeError, ValueError), match=rf"(?i){says}\b"):
        made(settings)


@pytest.mark.parametrize("name", [field.name for field in fields(HeteroConfig)])
def test_every_setting_reaches_the_run_and_is_compared_between_ranks(name):
    values = {**IN_LIGHTNING, **{each: value for each, (_, value) in VALUES.items()}}
    beside = {NEEDS[name]: values[NEEDS[name]]} if name in NEEDS else {}
    given = {**beside, name: values[name]}
    strategies = {HeteroDDPStrategy: FOR_OWN_LOOPS, FabricStrategy: ("staleness", "probe_memory")}
    for strategy, without in strategies.items():
        assert name in without or getattr(strategy(**given).config, name) == given[name]
    if name != "probe_memory":
        assert (HeteroConfig(**given).fingerprint() != HeteroConfig(**beside).fingerprint()) == (name != "report")


def test_an_empty_variable_leaves_the_default(monkeypatch):
    for name in SETTINGS:
        monkeypatch.setenv(PREFIX + name.upper(), "  ")
    assert all(getattr(HeteroPlugin(), name) == getattr(HeteroConfig(), name) for name in SETTINGS)


def test_a_density_alone_is_that_of_block_top_k(made):
    assert made({"density": "0.05"}).compression == BlockTopK(density=0.05)
    assert HeteroPlugin(density=0.05, compression="block_topk").compression == BlockTopK(density=0.05)


def test_arguments_go_before_variables_before_files_and_flags_before_both(tmp_path, monkeypatch):
    section = {"hysteresis": 0.2, "replan": 7, "policy": "static"}
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump({"hetero_config": section}))
    monkeypatch.setenv(PREFIX + "CONFIG_FILE", str(tmp_path / "settings.yaml"))
    monkeypatch.setenv(PREFIX + "REPLAN", "9")
    monkeypatch.setenv(PREFIX + "POLICY", "pid")
    for plugin in (
        HeteroPlugin(policy="even"),
        plugin_of(HeteroTrainingArguments(**QUIET, hetero_policy="even")),
    ):
        assert (plugin.policy, plugin.replan, plugin.hysteresis) == ("even", 9, 0.2)
    exported = {PREFIX + "REPLAN": "6", PREFIX + "WEIGHT_FN": "left_to:workers"}
    found = hetero_environment(section, {"policy": "pid"}, exported)
    expected = {"POLICY": "pid", "REPLAN": "6", "HYSTERESIS": "0.2"}
    assert found == {"ACCELERATE_USE_HETERO": "true", **{PREFIX + name: text for name, text in expected.items()}}


def test_a_misspelt_variable_is_named_with_the_one_that_was_meant_and_those_of_others_are_left_alone(monkeypatch):
    for name in ("ACCELERATE_USE_HETERO", "ACCELERATE_USE_FSDP", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_OWN_POLICY"):
        monkeypatch.setenv(name, "true")
    assert HeteroPlugin().policy is None
    for name, meant in (("HETRO_POLICY", "ACCELERATE_HETERO_POLICY"), ("HETERO_XYZZY", "Allowed")):
        monkeypatch.setenv(f"ACCELERATE_{name}", "pid")
        with pytest.raises(ValueError, match=f"ACCELERATE_{name}=.*{meant}"):
            HeteroPlugin()
        monkeypatch.delenv(f"ACCELERATE_{name}")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: HeteroPlugin(probe_memory=True), "probe_memory.*max_local_batch_sizes"),
        (lambda: HeteroPlugin(merge="adaptive"), "merge.*ElasticEngine"),
        (lambda: from_variables({"config_file": "nowhere.yaml"}, None), "ACCELERATE_HETERO_CONFIG_FILE=.*nowhere"),
        (lambda: as_environment({"speed": 1}), "speed"),
        (lambda: HeteroAccelerator(cpu=True, hetero_plugin="pid"), "hetero_plugin"),
        (lambda: HeteroAccelerator(split_batch=True), "split_batch.*split_batches"),
        (lambda: HeteroAccelerator(local_batch_sizes=[4, 2]), r"HeteroPlugin\(local_batch_sizes=\.\.\.\)"),
        (lambda: hetero_arguments(dict), "TrainingArguments"),
        (lambda: HeteroConfig(cost_fn="words"), "cost_fn"),
        (lambda: HeteroConfig(noise_scale="yes"), "noise_scale"),
        (lambda: HeteroConfig(report=3), "report"),
        (lambda: HeteroDDPStrategy(lr_scaling="sqrt"), "lr_scaling.*AdaptiveBatchCallback"),
        (lambda: HeteroDDPStrategy(noise_scale=True), "noise_scale.*GNSCallback"),
    ],
)
def test_a_name_or_a_type_that_is_wrong_is_refused_with_what_is_right(make, says):
    with pytest.raises((TypeError, ValueError), match=says):
        make()


@pytest.mark.parametrize("takes", [HeteroConfig, FabricStrategy, HeteroPlugin])
@pytest.mark.parametrize(
    "settings",
    [
        {"max_total_batch_size": 8, "policy": "pid"},
        {"max_total_batch_size": 8, "local_batch_sizes": [6, 2]},
        {"lr_scaling": "sqrt"},
        {"cost_fn": len, "noise_scale": True},
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_are_refused_by_name(takes, settings):
    with pytest.raises(ValueError, match=list(settings)[-1]):
        takes(**settings)


@pytest.fixture
def forgotten():
    """Ranks that are forked later must not know of an accelerator in this process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_the_switch(monkeypatch, forgotten):
    said = {"": True, "ON": True, "no": False, "0": False}
    assert {text: switched_on({"ACCELERATE_USE_HETERO": text}) for text in said} == said
    with pytest.raises(ValueError, match="ACCELERATE_USE_HETERO='maybe'"):
        switched_on({"ACCELERATE_USE_HETERO": "maybe"})
    monkeypatch.setenv("ACCELERATE_USE_HETERO", "false")
    accelerator = HeteroAccelerator(cpu=True)
    assert (accelerator.plan, accelerator.hetero_session) == (None, None)
    with pytest.raises(RuntimeError, match="ACCELERATE_USE_HETERO=false"):
        accelerator.observations()
    assert HeteroAccelerator(cpu=True, hetero_plugin=HeteroPlugin()).hetero_session is not None
    plain = TrainingArguments(**QUIET)
    assert plugin_of(plain) is None
    assert plugin_of(plain, given := HeteroPlugin()) is given


# arguments of Transformers' Trainer


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"hetero_local_batch_sizes": "24,12"}, "auto"),
        ({"hetero_local_batch_sizes": "24,12", "hetero_cost_fn": "tokens"}, "tokens"),
        ({"hetero_noise_scale": "true"}, "auto"),
    ],
    ids=str,
)
def test_a_trainer_divides_batches_by_tokens_unless_a_setting_needs_numbers(settings, expected, monkeypatch):
    monkeypatch.setenv(PREFIX + "REPLAN", "epoch")
    plugin = plugin_of(HeteroTrainingArguments(**QUIET, hetero_replan="auto", **settings))
    divided = by_tokens(plugin)
    assert divided.cost_fn == expected
    kept = [name for name in SETTINGS if name != "cost_fn"]
    assert [getattr(divided, name) for name in kept] == [getattr(plugin, name) for name in kept]


def test_an_argument_may_be_a_value_or_its_text_and_settings_in_two_places_are_refused():
    for given in ([24, 12], "24,12"):
        args = HeteroTrainingArguments(**QUIET, hetero_local_batch_sizes=given)
        assert plugin_of(args) == HeteroPlugin(local_batch_sizes=[24, 12])
        with pytest.raises(ValueError, match="hetero_local_batch_sizes.*hetero_plugin"):
            plugin_of(args, HeteroPlugin())


@pytest.mark.parametrize("base", [TrainingArguments, Seq2SeqTrainingArguments])
def test_any_class_of_arguments_gets_the_settings_and_can_be_saved(base):
    """As ``training_args.bin`` of a checkpoint, and as JSON for the trackers; positions stay those of the class."""
    cls = hetero_arguments(base)
    assert hetero_arguments(cls) is cls
    assert hetero_arguments(base) is cls
    rest = {name: value for name, value in QUIET.items() if name != "output_dir"}
    args = cls("out", **rest, hetero_weight_fn=len, hetero_local_batch_sizes=[2, 6])
    again = pickle.loads(pickle.dumps(args))
    assert isinstance(again, base)
    assert (again, again.output_dir) == (args, "out")
    written = json.loads(args.to_json_string())
    assert (written["hetero_local_batch_sizes"], written["hetero_policy"]) == ([2, 6], None)
    assert "len" in written["hetero_weight_fn"]
