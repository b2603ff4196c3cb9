"""``HeteroPlugin``: each setting from its argument, its environment variable or a file, in that order, and checked."""

import pytest

from lightning_hetero import BlockTopK
from lightning_hetero.accelerate import HeteroAccelerator, HeteroPlugin
from lightning_hetero.accelerate.plugin import PREFIX, SETTINGS, as_environment, switched_on
from lightning_hetero.config import HeteroConfig

VALUES = {
    "report": ("runs/first", "runs/first"),
    "policy": ("pid", "pid"),
    "loss_reduction": ("sum", "sum"),
    "local_batch_sizes": ("24, 12,16", (24, 12, 16)),
    "min_local_batch_size": ("3", 3),
    "max_local_batch_sizes": ("[64, 32]", (64, 32)),
    "local_batch_multiple": ("8", 8),
    "weight_fn": ("operator:itemgetter", __import__("operator").itemgetter),
    "cost_fn": ("operator:itemgetter", __import__("operator").itemgetter),
    "replan": ("epoch", "epoch"),
    "hysteresis": ("1e-05", 1e-05),
    "change_cost": ("12.5", 12.5),
    "hierarchy": ("[[0, 1], [2]]", ((0, 1), (2,))),
    "sparse_optimizer": ("later", "later"),
    "on_nonfinite": ("skip", "skip"),
    "max_total_batch_size": ("4096", 4096),
    "min_total_batch_size": ("64", 64),
    "lr_scaling": ("none", "none"),
    "shard": ("whole", "whole"),
    "batch_sampler": ("global", "global"),
    "slice_fn": ("builtins:len", len),
    "concat_fn": ("builtins:len", len),
    "noise_scale": ("true", True),
    "compression": ("block_topk(density=0.03, value_dtype='int8')", BlockTopK(density=0.03, value_dtype="int8")),
}
BESIDE = {
    "sparse_optimizer": {"COMPRESSION": "block_topk"},
    "min_total_batch_size": {"MAX_TOTAL_BATCH_SIZE": "4096"},
    "lr_scaling": {"MAX_TOTAL_BATCH_SIZE": "4096"},
}
"""What some settings go with only."""


def test_every_setting_has_a_value_here():
    assert set(VALUES) == set(SETTINGS), "give each new setting a line in VALUES, and remove those that are gone"


@pytest.mark.parametrize("name", VALUES)
def test_setting_is_read_from_its_variable(name, monkeypatch):
    text, value = VALUES[name]
    for other, given in BESIDE.get(name, {}).items():
        monkeypatch.setenv(PREFIX + other, given)
    monkeypatch.setenv(PREFIX + name.upper(), text)
    assert getattr(HeteroPlugin(), name) == value


def test_values_that_are_nested_too_deeply_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_HETERO_HYSTERESIS", "[" * 5000)
    with pytest.raises((TypeError, ValueError), match="ACCELERATE_HETERO_HYSTERESIS"):
        HeteroPlugin()
    monkeypatch.delenv("ACCELERATE_HETERO_HYSTERESIS")
    path = tmp_path / "settings.yaml"
    path.write_text("hetero_config: " + "[" * 5000)
    monkeypatch.setenv("ACCELERATE_HETERO_CONFIG_FILE", str(path))
    with pytest.raises(ValueError, match="ACCELERATE_HETERO_CONFIG_FILE=.*cannot be read"):
        HeteroPlugin()


@pytest.mark.parametrize("text", ["1e-05", "0.00001", "1E-5"])
def test_a_number_that_yaml_takes_for_text_is_a_number(text, tmp_path, monkeypatch):
    path = tmp_path / "settings.yaml"
    path.write_text(f"hetero_config:\n  hysteresis: {text}\n  density: {text}\n")
    monkeypatch.setenv("ACCELERATE_HETERO_CONFIG_FILE", str(path))
    plugin = HeteroPlugin()
    assert (plugin.hysteresis, plugin.compression) == (1e-05, BlockTopK(density=1e-05))


@pytest.mark.parametrize("compression", [None, "block_topk"])
def test_density_is_that_of_block_topk(compression, monkeypatch):
    monkeypatch.setenv("ACCELERATE_HETERO_DENSITY", "0.05")
    if compression is not None:
        monkeypatch.setenv("ACCELERATE_HETERO_COMPRESSION", compression)
    assert HeteroPlugin().compression == BlockTopK(density=0.05)


def test_clusters_survive_the_way_through_the_environment(monkeypatch):
    for name, text in as_environment({"hierarchy": [[0, 2], [1]]}).items():
        monkeypatch.setenv(name, text)
    assert HeteroPlugin().hierarchy == ((0, 2), (1,))


def test_density_of_another_compressor_is_refused():
    with pytest.raises(ValueError, match="density=0.05 is that of compression='block_topk'.*'powersgd' is given"):
        HeteroPlugin(density=0.05, compression="powersgd")


@pytest.mark.parametrize("name", SETTINGS)
def test_an_empty_variable_and_none_leave_the_default(name, monkeypatch):
    monkeypatch.setenv(PREFIX + name.upper(), "  ")
    assert getattr(HeteroPlugin(), name) == getattr(HeteroConfig(), name)


def test_argument_goes_before_variable_before_file(tmp_path, monkeypatch):
    path = tmp_path / "settings.yaml"
    path.write_text("hetero_config:\n  hysteresis: 0.2\n  replan: 7\n  policy: static\n")
    monkeypatch.setenv("ACCELERATE_HETERO_CONFIG_FILE", str(path))
    monkeypatch.setenv("ACCELERATE_HETERO_REPLAN", "9")
    monkeypatch.setenv("ACCELERATE_HETERO_POLICY", "pid")
    plugin = HeteroPlugin(policy="even")
    assert (plugin.policy, plugin.replan, plugin.hysteresis) == ("even", 9, 0.2)


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("POLICY", "fastest", r"ACCELERATE_HETERO_POLICY='fastest': policy='fastest' is unknown; allowed are .*pid"),
        ("HYSTERESIS", "2", r"ACCELERATE_HETERO_HYSTERESIS='2': hysteresis=2"),
        ("HYSTERESIS", "a lot", r"ACCELERATE_HETERO_HYSTERESIS='a lot': .*; give a number from 0.0 to 1.0"),
        ("DENSITY", "a lot", r"ACCELERATE_HETERO_DENSITY='a lot': .*; give a number above 0.0 to 1.0"),
        ("DENSITY", "0", r"ACCELERATE_HETERO_DENSITY='0': .*; give a number above 0.0 to 1.0"),
        ("LOSS_REDUCTION", "max", r"ACCELERATE_HETERO_LOSS_REDUCTION='max': .* allowed are 'mean', 'sum'"),
        ("REPLAN", "2.5", r"ACCELERATE_HETERO_REPLAN='2.5': .*; give an integer >= 1"),
        ("COMPRESSION", "zip", r"ACCELERATE_HETERO_COMPRESSION='zip': .* allowed are 'block_topk', "),
        ("LOCAL_BATCH_SIZES", "3,x", r"ACCELERATE_HETERO_LOCAL_BATCH_SIZES='3,x': .*; give an integer >= 0"),
        ("MIN_LOCAL_BATCH_SIZE", "0", r"ACCELERATE_HETERO_MIN_LOCAL_BATCH_SIZE='0': .*; give an integer >= 1"),
        ("MAX_LOCAL_BATCH_SIZES", "8,0", r"ACCELERATE_HETERO_MAX_LOCAL_BATCH_SIZES='8,0': .*; give an integer >= 1"),
        (
            "WEIGHT_FN",
            "no_module:count",
            r"ACCELERATE_HETERO_WEIGHT_FN='no_module:count': .* cannot be imported.* Write",
        ),
        (
            "POLICI",
            "pid",
            r"ACCELERATE_HETERO_POLICI='pid' is no setting. Did you mean ACCELERATE_HETERO_POLICY\? Allowed",
        ),
        ("XYZZY", "1", r"ACCELERATE_HETERO_XYZZY='1' is no setting. Allowed are .*ACCELERATE_HETERO_POLICY"),
        ("CONFIG_FILE", "/nowhere.yaml", r"ACCELERATE_HETERO_CONFIG_FILE='/nowhere.yaml' cannot be read"),
    ],
)
def test_a_wrong_variable_is_named_with_its_value(variable, text, message, monkeypatch):
    monkeypatch.setenv(PREFIX + variable, text)
    with pytest.raises((ValueError, TypeError), match=message):
        HeteroPlugin()


@pytest.mark.parametrize("variable", ["ACCELERATE_HETRO_POLICY", "ACCELERATE_HETERO_POLIC", "ACCELERATE_HETEROPOLICY"])
def test_a_misspelt_variable_is_named_with_the_one_that_was_meant(variable, monkeypatch):
    monkeypatch.setenv(variable, "pid")
    with pytest.raises(ValueError, match=f"{variable}='pid' is no setting. Did you mean ACCELERATE_HETERO_POLICY"):
        HeteroPlugin()


def test_variables_of_others_are_left_alone(monkeypatch):
    for name in ("ACCELERATE_USE_HETERO", "ACCELERATE_USE_FSDP", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_OWN_POLICY"):
        monkeypatch.setenv(name, "true")
    assert HeteroPlugin().policy is None


def test_wrong_arguments():
    with pytest.raises(
        TypeError, match="HeteroPlugin has no setting polici. Did you mean policy. Allowed are policy, "
    ):
        HeteroPlugin(polici="pid")
    with pytest.raises(TypeError, match="probe_memory is for Lightning's Trainer only; give max_local_batch_sizes"):
        HeteroPlugin(probe_memory=True)
    with pytest.raises(ValueError, match="^policy='x' is unknown"):
        HeteroPlugin(policy="x")
    with pytest.raises(TypeError, match="hetero_config has no setting speed"):
        as_environment({"speed": 1})
    with pytest.raises(TypeError, match="hetero_plugin='pid' is a str; give a HeteroPlugin"):
        HeteroAccelerator(cpu=True, hetero_plugin="pid")


def test_a_start_that_may_meet_addresses_of_workers_that_are_gone_says_so(caplog, monkeypatch):
    monkeypatch.setattr("lightning_hetero.frontend.log.log.propagate", True)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    HeteroAccelerator(cpu=True, hetero_plugin=HeteroPlugin())
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in caplog.text


def test_switch(monkeypatch):
    with pytest.raises(ValueError, match="ACCELERATE_USE_HETERO='maybe' is unknown; allowed are 'true'"):
        switched_on({"ACCELERATE_USE_HETERO": "maybe"})
    monkeypatch.setenv("ACCELERATE_USE_HETERO", "false")
    accelerator = HeteroAccelerator(cpu=True)
    assert accelerator.plan is None
    assert accelerator.hetero_session is None
    with pytest.raises(RuntimeError, match="ACCELERATE_USE_HETERO=false"):
        accelerator.observations()
    assert HeteroAccelerator(cpu=True, hetero_plugin=HeteroPlugin()).hetero_session is not None


def test_settings_of_elastic_averaging_are_told_where_they_belong():
    with pytest.raises(TypeError, match="no setting merge. .* use lightning_hetero.elastic.ElasticEngine"):
        HeteroPlugin(merge="adaptive")


def test_a_misspelt_keyword_of_the_accelerator_is_refused_with_the_nearest_one():
    with pytest.raises(TypeError, match="HeteroAccelerator has no argument split_batch. Did you mean split_batches"):
        HeteroAccelerator(split_batch=True)


def test_a_setting_that_is_given_to_the_accelerator_belongs_into_the_plugin():
    with pytest.raises(TypeError, match=r"no argument local_batch_sizes.*HeteroPlugin\(local_batch_sizes=...\)"):
        HeteroAccelerator(local_batch_sizes=[4, 2])


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"polcy": "even"}, "Did you mean the setting policy\\? Give settings in the plugin: .*policy=...\\)"),
        (
            {"replan": 4, "local_batch_size": [4, 2]},
            "no argument replan.*HeteroPlugin\\(replan=..., local_batch_sizes=...\\)",
        ),
        ({"hetero_plugn": None}, "Did you mean hetero_plugin\\? Allowed are"),
        ({"quite_another": 1}, "no argument quite_another. Allowed are"),
    ],
)
def test_a_misspelt_setting_that_is_given_to_the_accelerator_is_known(given, meant):
    with pytest.raises(TypeError, match=meant):
        HeteroAccelerator(**given)


def half_linear(total, initial, trace, grad_sq_norm):
    return 1 + (total / initial - 1) / 2


def test_a_rule_for_the_learning_rate_may_be_a_function(tmp_path, monkeypatch):
    monkeypatch.setenv(PREFIX + "MAX_TOTAL_BATCH_SIZE", "64")
    monkeypatch.setenv(PREFIX + "LR_SCALING", "tests.accelerate.test_plugin:half_linear")
    assert HeteroPlugin().lr_scaling(32, 16, 0.0, 0.0) == 1.5
    monkeypatch.setenv(PREFIX + "LR_SCALING", "tests.accelerate.test_plugin:third")
    with pytest.raises(ValueError, match="ACCELERATE_HETERO_LR_SCALING.*cannot be imported"):
        HeteroPlugin()
    monkeypatch.setenv(PREFIX + "LR_SCALING", "cubic")
    with pytest.raises(ValueError, match="ACCELERATE_HETERO_LR_SCALING='cubic': lr_scaling='cubic' is unknown"):
        HeteroPlugin()


def test_a_moving_total_from_a_file(tmp_path, monkeypatch):
    path = tmp_path / "settings.yaml"
    path.write_text("hetero_config:\n  max_total_batch_size: 4096\n  lr_scaling: none\n")
    monkeypatch.setenv("ACCELERATE_HETERO_CONFIG_FILE", str(path))
    assert (HeteroPlugin().max_total_batch_size, HeteroPlugin().lr_scaling) == (4096, "none")
    monkeypatch.setenv(PREFIX + "POLICY", "pid")
    with pytest.raises(ValueError, match="ACCELERATE_HETERO_POLICY='pid'.* says otherwise. Give one"):
        HeteroPlugin()
