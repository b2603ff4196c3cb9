"""A misspelt keyword of any public class or function ends at construction, with the name that was meant."""

import importlib
import inspect
import pkgutil
import re
from dataclasses import fields

import pytest
from accelerate import Accelerator
from transformers import TrainingArguments

import lightning_hetero
from lightning_hetero.accelerate.plugin import SETTINGS
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.keywords import check_names, checked_keywords, closest
from lightning_hetero.core.validation import check_choice
from lightning_hetero.transformers import hetero_arguments

NO_PACKAGE = {"lightning_hetero.cli"}  # its names are commands
MORE = (
    "config.HeteroConfig",
    "session.HeteroSession",
    "core.batching.optperf.solve_optperf",
    "core.compression.bayesian_search.profile_convergence",
    "simulate.devices.catalog.cluster_profiles",
    "simulate.devices.catalog.device_profile",
    "simulate.planning.figures.plan_cluster",
    "simulate.planning.learned.simulate_cluster",
    "strategies.fabric_ddp.HeteroDDPStrategy",
    "strategies.lightning_fabric_ddp.HeteroDDPStrategy",
    "strategies.pytorch_lightning_ddp.HeteroDDPStrategy",
    "strategies.pytorch_lightning_elastic.HeteroElasticStrategy",
    "strategies.pytorch_lightning_fsdp.HeteroFSDPStrategy",
)
"""What is public and in no package's ``__all__``, and the functions with many keywords."""

MADE_BY_US = {
    *("Candidate", "DensityChoice", "LinkTimes", "NoiseScaleEstimate", "Residual", "TimePosterior", "Times"),
    *("Epoch", "Given", "LearnedAnswer", "LinkAnswer", "PlanAnswer", "SimulationResult", "WorkerAnswer"),
    *("MergeRecord", "PaperEntry", "RoundResult", "SparseBatch"),
}
"""Results that users read."""
THEIRS = {"HeteroTrainer", "PrecisionAtOne"}
"""Classes that take only what their base in another package takes, which refuses what it does not know."""


def public_classes():
    """All classes that a package of ours offers and users construct, and what else is public, by name."""
    found = {}
    for info in pkgutil.walk_packages(lightning_hetero.__path__, "lightning_hetero."):
        if not info.ispkg or "._" in info.name or info.name in NO_PACKAGE:
            continue
        package = importlib.import_module(info.name)
        for value in (getattr(package, name) for name in getattr(package, "__all__", ())):
            abstract = getattr(value, "_is_protocol", False) or "__init__" not in dir(value)
            if isinstance(value, type) and not abstract and not issubclass(value, BaseException):
                found[f"{value.__module__}.{value.__qualname__}"] = value
    for name in lightning_hetero.__all__:
        value = getattr(lightning_hetero, name)
        if callable(value):
            found[f"{value.__module__}.{value.__qualname__}"] = value
    for path in MORE:
        module, _, name = f"lightning_hetero.{path}".rpartition(".")
        found[f"{module}.{name}"] = getattr(importlib.import_module(module), name)
    return found


PUBLIC = {name: value for name, value in public_classes().items() if value.__name__ not in MADE_BY_US | THEIRS}


def parameters(call):
    """Names of the keywords of a function or class, without those that pass others on."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [name for name, each in inspect.signature(call).parameters.items() if each.kind in kinds]


DDP = ["accelerator", "timeout", "start_method", "find_unused_parameters", "static_graph", "bucket_cap_mb"]
PASSED_ON = {
    "HeteroDDPStrategy": [*DDP, "gradient_as_bucket_view"],
    "HeteroElasticStrategy": ["process_group_backend", "timeout", "start_method", "checkpoint_io"],
    "HeteroFSDPStrategy": ["save_distributed_checkpoint", "timeout"],
    "HeteroAccelerator": parameters(Accelerator),
    "HeteroPlugin": [*SETTINGS, "density"],
}
"""Some keywords of classes that pass them on, besides those of their signatures."""
SETTINGS_OF_FABRIC = [field.name for field in fields(HeteroConfig)]


def keywords(target):
    """Names of a target's keywords."""
    fabric = SETTINGS_OF_FABRIC if "fabric" in target.__module__ else []
    return [*parameters(target), *PASSED_ON.get(target.__name__, []), *fabric]


def misspelt(name):
    """The name without its first, middle or last letter; a short one with a letter too many."""
    if len(name) < 4:
        return [name + name[-1]]
    return [name[:i] + name[i + 1 :] for i in (0, len(name) // 2, len(name) - 1)]


def names_in(sentence):
    return set(re.findall(r"\w+", sentence))


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_keyword_with_a_letter_wrong_is_refused_with_the_one_that_was_meant(name):
    target = PUBLIC[name]
    own = keywords(target)
    for keyword in own:
        for wrong in {*misspelt(keyword)} - {*own}:
            with pytest.raises(TypeError) as caught:
                target(**{wrong: None})
            said = str(caught.value)
            assert said.startswith(f"{target.__name__} has no ")
            assert f" {wrong}. Did you mean " in said
            assert keyword in names_in(said.partition("Did you mean")[2].partition("?")[0])
            assert keyword in names_in(said.partition("Allowed are")[2]) or f"help({target.__name__}) lists" in said


def test_the_walk_finds_what_users_make():
    made = {name.rpartition(".")[2] for name in PUBLIC}
    assert {*lightning_hetero._EXPORTS} <= made
    assert {"HeteroPlugin", "HeteroConfig", "ElasticConfig", "LowRank", "DeviceProfile", "SparseAdamW"} <= made
    assert len(PUBLIC) > 95
    without = {value.__name__ for value in PUBLIC.values() if not keywords(value)}
    assert without == {"MergeRule", "PerfModelCallback", "StaticPlanner"}


def test_no_class_is_left_out_in_vain():
    assert {each.__name__ for each in public_classes().values()} >= MADE_BY_US | THEIRS


def test_what_takes_no_keyword_says_so():
    with pytest.raises(TypeError, match=r"PerfModelCallback has no argument hysteresis\. It takes none\."):
        lightning_hetero.PerfModelCallback(hysteresis=0.1)


def test_arguments_made_from_another_class_name_their_settings():
    cls = hetero_arguments(type("Own", (TrainingArguments,), {}))
    with pytest.raises(TypeError, match=r"HeteroOwn has no argument hetero_polcy\. Did you mean hetero_policy\?"):
        cls(output_dir="out", hetero_polcy="pid")


def test_a_subclass_is_named_and_its_own_keywords_are_its_own():
    class Own(lightning_hetero.BlockTopK):
        def __init__(self, colour, **kwargs):
            super().__init__(**kwargs)

    assert Own("red", density=0.5).density == 0.5
    with pytest.raises(TypeError, match=r"Own has no argument densty\. Did you mean density\?"):
        Own("red", densty=0.5)


@checked_keywords
def split(total, policy="pid", *, least=1):
    """Return what was given, or fail as a function does."""
    return total + least if policy == "pid" else len(total)


def test_what_is_right_is_passed_on_and_other_errors_are_left_alone():
    assert split(3, least=2) == 5
    assert inspect.signature(split) == inspect.signature(split.__wrapped__)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'total'"):
        split(least=2)
    with pytest.raises(TypeError, match="object of type 'int' has no len"):
        split(3, policy="len")
    with pytest.raises(TypeError, match="split has no argument poicy. Did you mean policy") as caught:
        split(3, poicy="len")
    assert caught.value.__suppress_context__, "Python's own error, which says less, is not shown"


def test_a_target_that_takes_any_keyword_is_refused():
    with pytest.raises(TypeError, match=r"takes any keyword. Let it call check_names"):
        checked_keywords(lambda total, **others: total)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("polcy", " Did you mean policy?"),
        ("Policy", " Did you mean policy?"),
        ("local-batch-sizes", " Did you mean local_batch_sizes?"),
        ("max_batch", " Did you mean max_batches?"),
        ("sizee", " Did you mean sizes or sizer?"),
        ("xyzzy", ""),
        (3, ""),
    ],
)
def test_the_nearest_names(name, meant):
    assert closest(name, ["policy", "local_batch_sizes", "max_batches", "min_batches", "sizes", "sizer"]) == meant


def test_a_common_prefix_brings_no_name_near():
    names = ["ACCELERATE_HETERO_POLICY", "ACCELERATE_HETERO_SHARD"]
    assert closest("ACCELERATE_HETERO_XYZZY", names, prefix="ACCELERATE_HETERO_") == ""
    assert closest("ACCELERATE_HETERO_SHRD", names, prefix="ACCELERATE_HETERO_").endswith("HETERO_SHARD?")


def test_a_long_list_is_not_printed_beside_a_suggestion():
    many = [f"setting_{i}" for i in range(100)]
    with pytest.raises(
        TypeError, match=r"has no argument setting_7x\. Did you mean .*\? help\(Many\) lists all 100\.$"
    ):
        check_names("Many", ["setting_7x"], many)
    with pytest.raises(TypeError, match=r"has no argument xyzzy\. Allowed are setting_0, .*setting_99\.$"):
        check_names("Many", ["xyzzy"], many)


def test_a_misspelt_value_is_refused_with_the_one_that_was_meant():
    with pytest.raises(
        ValueError, match=r"policy='perfmodl' is unknown. Did you mean 'perf_model'\? Allowed are 'perf_"
    ):
        lightning_hetero.HeteroDDPStrategy(policy="perfmodl")
    with pytest.raises(ValueError, match="policy='best' is unknown; allowed are 'perf_model', "):
        check_choice("policy", "best", ("perf_model", "pid"))
    with pytest.raises(ValueError, match="block_topk has no setting 'densty'. Did you mean density"):
        lightning_hetero.HeteroDDPStrategy(compression="block_topk(densty=0.1)")
