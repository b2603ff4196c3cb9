"""Settings of unequal workers among the arguments of a trainer, and on its command line."""

import json
import pickle
from dataclasses import fields

import pytest
import transformers
from transformers import HfArgumentParser, Seq2SeqTrainingArguments, TrainingArguments

from lightning_hetero.accelerate import HeteroPlugin
from lightning_hetero.accelerate.plugin import NAMES
from lightning_hetero.transformers import HeteroTrainingArguments, hetero_arguments, hetero_trainer
from lightning_hetero.transformers.arguments import by_tokens, plugin_of

QUIET = {"use_cpu": True, "report_to": [], "bf16": False}


def test_every_setting_is_an_option():
    parser = HfArgumentParser(HeteroTrainingArguments)
    options = {action.dest for action in parser._actions}
    assert {f"hetero_{name}" for name in NAMES} <= options
    assert "hetero_staleness" not in options


def test_the_command_line_reaches_the_plugin():
    line = "--output_dir out --use_cpu --report_to none --hetero_local_batch_sizes 2,2,2,15 --hetero_change_cost 1e-3"
    (args,) = HfArgumentParser(HeteroTrainingArguments).parse_args_into_dataclasses(line.split())
    plugin = plugin_of(args)
    assert plugin.local_batch_sizes == (2, 2, 2, 15)
    assert plugin.change_cost == 1e-3


@pytest.mark.parametrize("given", [[24, 12], (24, 12), "24,12", "[24, 12]"])
def test_values_and_texts(given):
    assert plugin_of(HeteroTrainingArguments(output_dir="out", **QUIET, hetero_local_batch_sizes=given)) == (
        HeteroPlugin(local_batch_sizes=[24, 12])
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"hetero_policy": "pid"}, "tokens"),
        ({"hetero_cost_fn": "auto"}, "tokens"),
        ({"hetero_cost_fn": "none"}, None),
        ({"hetero_local_batch_sizes": "24,12"}, "auto"),
        ({"hetero_local_batch_sizes": "24,12", "hetero_cost_fn": "tokens"}, "tokens"),
        ({"hetero_noise_scale": "true"}, "auto"),
        ({"hetero_max_total_batch_size": 64}, "auto"),
        ({"hetero_local_batch_multiple": "8"}, "auto"),
    ],
)
def test_batches_are_divided_by_tokens_unless_a_setting_needs_numbers(settings, expected):
    plugin = plugin_of(HeteroTrainingArguments(output_dir="out", **QUIET, **settings))
    assert by_tokens(plugin).cost_fn == expected
    assert by_tokens(by_tokens(plugin)) == by_tokens(plugin)


def test_tokens_leave_every_other_setting_as_it_was_given(monkeypatch):
    """Also an argument that is at its default where a variable says something else."""
    monkeypatch.setenv("ACCELERATE_HETERO_REPLAN", "epoch")
    monkeypatch.setenv("ACCELERATE_HETERO_DENSITY", "0.05")
    plugin = plugin_of(HeteroTrainingArguments(output_dir="out", **QUIET, hetero_replan="auto"))
    divided = by_tokens(plugin)
    assert (plugin.cost_fn, divided.cost_fn, divided.replan) == ("auto", "tokens", "auto")
    others = [one.name for one in fields(plugin) if one.name != "cost_fn"]
    assert [getattr(divided, name) for name in others] == [getattr(plugin, name) for name in others]


def test_the_environment_gives_what_arguments_leave_open(monkeypatch):
    monkeypatch.setenv("ACCELERATE_HETERO_POLICY", "pid")
    monkeypatch.setenv("ACCELERATE_HETERO_MIN_LOCAL_BATCH_SIZE", "3")
    plain = TrainingArguments(output_dir="out", **QUIET)
    assert plugin_of(plain).policy == "pid"
    mine = plugin_of(HeteroTrainingArguments(output_dir="out", **QUIET, hetero_policy="static"))
    assert (mine.policy, mine.min_local_batch_size) == ("static", 3)
    given = HeteroPlugin(policy="even")
    assert plugin_of(plain, given) is given
    monkeypatch.setenv("ACCELERATE_USE_HETERO", "false")
    assert plugin_of(plain) is None
    assert plugin_of(plain, given) is given


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"hetero_policy": "guess"}, ValueError, "--hetero_policy guess: .*perf_model"),
        ({"hetero_local_batch_sizes": "a,b"}, TypeError, "--hetero_local_batch_sizes a,b"),
        ({"hetero_weight_fn": "nothing:here"}, ValueError, "weight_fn='nothing:here' cannot be imported"),
    ],
)
def test_bad_values_are_named(settings, error, message):
    with pytest.raises(error, match=message):
        plugin_of(HeteroTrainingArguments(output_dir="out", **QUIET, **settings))


def test_settings_in_two_places():
    with pytest.raises(ValueError, match="hetero_policy among the arguments and a hetero_plugin.*Give one"):
        plugin_of(HeteroTrainingArguments(output_dir="out", **QUIET, hetero_policy="pid"), HeteroPlugin())


def test_any_class_of_arguments():
    assert hetero_arguments(HeteroTrainingArguments) is hetero_arguments(TrainingArguments) is HeteroTrainingArguments
    cls = hetero_arguments(Seq2SeqTrainingArguments)
    args = cls("out", **QUIET, hetero_policy="pid", predict_with_generate=True)
    assert args.output_dir == "out"  # positions stay those of the class
    assert plugin_of(args).policy == "pid"
    for wrong in (dict, "SFTConfig"):
        with pytest.raises(TypeError, match="give TrainingArguments or a class derived from it"):
            hetero_arguments(wrong)


@pytest.mark.parametrize("base", [TrainingArguments, Seq2SeqTrainingArguments])
def test_arguments_are_saved(base):
    """As ``training_args.bin`` of a checkpoint, and as JSON for the trackers."""
    args = hetero_arguments(base)(output_dir="out", **QUIET, hetero_weight_fn=len, hetero_local_batch_sizes=[2, 6])
    again = pickle.loads(pickle.dumps(args))
    assert isinstance(again, base)
    assert again == args
    written = json.loads(args.to_json_string())
    assert written["hetero_local_batch_sizes"] == [2, 6]
    assert "len" in written["hetero_weight_fn"]
    assert written["hetero_policy"] is None


def test_a_plugin_for_a_class():
    plugin = HeteroPlugin(policy="pid")
    cls = hetero_trainer(transformers.Trainer, plugin)
    assert cls.hetero_plugin is plugin
    assert hetero_trainer(cls) is cls
    assert hetero_trainer(cls, HeteroPlugin()).hetero_plugin != plugin
