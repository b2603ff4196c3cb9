"""A misspelt keyword of any public class or function ends at construction, with the name that was meant."""

import importlib
import inspect
import pkgutil
from dataclasses import fields

import pytest
from accelerate import Accelerator
from transformers import TrainingArguments

import lightning_hetero
from lightning_hetero.accelerate.plugin import SETTINGS
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.transformers import hetero_arguments

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
"""What is public and offered by no package, and the functions with many keywords."""

NOT_MADE_BY_USERS = {  # results that they read, and classes that take only what another package's base takes
    *("Candidate", "DensityChoice", "LinkTimes", "NoiseScaleEstimate", "WorkerTimes"),
    *("Epoch", "Given", "LearnedAnswer", "LinkAnswer", "PlanAnswer", "SimulationResult", "WorkerAnswer"),
    *("MergeRecord", "PaperEntry", "RoundResult", "SparseBatch", "HeteroTrainer", "PrecisionAtOne"),
}


def public():
    """All classes that a package of ours offers and users construct, and what else is public, by name."""
    found = [getattr(lightning_hetero, name) for name in lightning_hetero.__all__]
    found = [value for value in found if callable(value)]
    for info in pkgutil.walk_packages(lightning_hetero.__path__, "lightning_hetero."):
        if info.ispkg and "._" not in info.name and info.name != "lightning_hetero.cli":  # whose names are commands
            package = importlib.import_module(info.name)
            for value in (getattr(package, name) for name in getattr(package, "__all__", ())):
                abstract = getattr(value, "_is_protocol", False) or "__init__" not in dir(value)
                if isinstance(value, type) and not abstract and not issubclass(value, BaseException):
                    found.append(value)
    for path in MORE:
        module, _, name = f"lightning_hetero.{path}".rpartition(".")
        found.append(getattr(importlib.import_module(module), name))
    made = [value for value in found if value.__name__ not in NOT_MADE_BY_USERS]
    return {f"{value.__module__}.{value.__qualname__}": value for value in made}


PUBLIC = public()


def parameters(call):
    """Names of the keywords of a function or class, without those that pass others on."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [name for name, each in inspect.signature(call).parameters.items() if each.kind in kinds]


PASSED_ON = {  # some keywords of classes that pass them on, besides those of their signatures
    "HeteroDDPStrategy": ["accelerator", "timeout", "find_unused_parameters", "static_graph", "bucket_cap_mb"],
    "HeteroElasticStrategy": ["process_group_backend", "timeout", "start_method", "checkpoint_io"],
    "HeteroFSDPStrategy": ["save_distributed_checkpoint", "timeout"],
    "HeteroAccelerator": parameters(Accelerator),
    "HeteroPlugin": [*SETTINGS, "density"],
}


def keywords(target):
    fabric = [field.name for field in fields(HeteroConfig)] if "fabric" in target.__module__ else []
    return [*parameters(target), *PASSED_ON.get(target.__name__, []), *fabric]


def misspelt(name):
    """The name without its first, middle or last letter; a short one with a letter too many."""
    if len(name) < 4:
        return {name + name[-1]}
    return {name[:i] + name[i + 1 :] for i in (0, len(name) // 2, len(name) - 1)}


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_keyword_with_a_letter_wrong_is_refused_with_the_one_that_was_meant(name):
    target = PUBLIC[name]
    own = keywords(target)
    for keyword in own:
        for wrong in misspelt(keyword) - {*own}:
            with pytest.raises(TypeError) as caught:
                target(**{wrong: None})
            said = str(caught.value)
            assert said.startswith(target.__name__)
            assert f" {wrong}. Did you mean" in said
            assert keyword in said.partition("Did you mean")[2].partition("?")[0]


def test_classes_made_from_others_and_subclasses_name_their_own_settings():
    cls = hetero_arguments(type("Own", (TrainingArguments,), {}))
    with pytest.raises(TypeError, match=r"HeteroOwn .*hetero_polcy.*hetero_policy\?"):
        cls(output_dir="out", hetero_polcy="pid")

    class Own(lightning_hetero.BlockTopK):
        def __init__(self, colour, **kwargs):
            super().__init__(**kwargs)

    assert Own("red", density=0.5).density == 0.5
    with pytest.raises(TypeError, match=r"Own .*densty.*density\?"):
        Own("red", densty=0.5)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"policy": "perfmodl"}, "policy='perfmodl'.*'perf_model'"),
        ({"compression": "block_topk(densty=0.1)"}, "densty.*density"),
        ({"compression": "block_tpk"}, "compression=.*'block_topk'"),
    ],
)
def test_a_misspelt_value_is_refused_with_the_one_that_was_meant(setting, said):
    with pytest.raises(ValueError, match=said):
        lightning_hetero.HeteroDDPStrategy(**setting)


@checked_keywords
def split(total, policy="pid", *, least=1):
    return total + least if policy == "pid" else len(total)


def test_what_is_right_is_passed_on_and_other_errors_are_left_alone():
    assert split(3, least=2) == 5
    with pytest.raises(TypeError, match="missing 1 required"):
        split(least=2)
    with pytest.raises(TypeError, match="has no len"):
        split(3, policy="len")
