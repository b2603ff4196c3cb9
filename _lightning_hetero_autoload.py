"""Registration of the strategies' names with Lightning, and of Accelerate's flag, before our package is imported.

``import torch`` calls :func:`boot` through the ``torch.backends`` entry point, and so does ``import lightning_hetero``.
This module stands outside the package and imports nothing heavy: an entry point that imports Lightning would be a
circular import, and one that raises would break ``import torch``.

A strategy is first registered as a lazy factory, right after the module that owns the registry is executed. The class
replaces the factory when its own module is imported (``lightning_hetero.strategies._registration``).

If ``ACCELERATE_USE_HETERO`` is set, the hook of ``lightning_hetero.accelerate.flag`` goes into Accelerate in the same
way, and that of ``lightning_hetero.transformers`` into Transformers. Without it, nothing of them is touched.
"""

import functools
import importlib
import importlib.abc
import importlib.machinery
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

__all__ = [
    "DDP_ALIASES",
    "ELASTIC_ALIASES",
    "FABRIC_ALIASES",
    "FSDP_ALIASES",
    "TARGETS",
    "RegistryFinder",
    "Target",
    "boot",
    "enter",
]

log = logging.getLogger("lightning_hetero")


class Target(NamedTuple):
    """One strategy class and the registry that it belongs to.

    Attributes:
        module: the module that owns the registry.
        registry: name of the registry in that module.
        strategy: the class as ``"module:name"``, imported when it is first needed.
        name: what users give to ``Trainer(strategy=...)``.
        aliases: suffix of each alias of ``name`` -> the arguments that the strategy is made with.
    """

    module: str
    registry: str
    strategy: str
    name: str
    aliases: Mapping[str, Mapping[str, Any]]


_START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
_UNUSED_PARAMETERS: dict[str, dict[str, bool]] = {
    "": {},
    "_find_unused_parameters_false": {"find_unused_parameters": False},
    "_find_unused_parameters_true": {"find_unused_parameters": True},
}
DDP_ALIASES: dict[str, dict[str, Any]] = {
    start + unused: {**flags, "start_method": method}
    for start, method in _START_METHODS.items()
    for unused, flags in _UNUSED_PARAMETERS.items()
}

ELASTIC_ALIASES: dict[str, dict[str, Any]] = {
    start: {"start_method": method} for start, method in _START_METHODS.items()
}

FSDP_ALIASES: dict[str, dict[str, Any]] = {"": {}}

FABRIC_ALIASES: dict[str, dict[str, Any]] = {
    **{start: {"start_method": method} for start, method in _START_METHODS.items()},
    "_find_unused_parameters_true": {"find_unused_parameters": True, "start_method": "popen"},
}

# The only table of names. A strategy for another registry is one more line here.
_LIGHTNING = "lightning_hetero.strategies.lightning_ddp:HeteroDDPStrategy"
_PYTORCH_LIGHTNING = "lightning_hetero.strategies.pytorch_lightning_ddp:HeteroDDPStrategy"
_LIGHTNING_ELASTIC = "lightning_hetero.strategies.lightning_elastic:HeteroElasticStrategy"
_PYTORCH_LIGHTNING_ELASTIC = "lightning_hetero.strategies.pytorch_lightning_elastic:HeteroElasticStrategy"
_LIGHTNING_FSDP = "lightning_hetero.strategies.lightning_fsdp:HeteroFSDPStrategy"
_PYTORCH_LIGHTNING_FSDP = "lightning_hetero.strategies.pytorch_lightning_fsdp:HeteroFSDPStrategy"
_FABRIC = "lightning_hetero.strategies.fabric_ddp:HeteroDDPStrategy"
_LIGHTNING_FABRIC = "lightning_hetero.strategies.lightning_fabric_ddp:HeteroDDPStrategy"
_NO_ELASTIC_FABRIC = "lightning_hetero.strategies._fabric.refused:refuse_elastic"
_NO_FSDP_FABRIC = "lightning_hetero.strategies._fabric.refused:refuse_fsdp"
TARGETS: tuple[Target, ...] = (
    Target("lightning.pytorch.strategies", "StrategyRegistry", _LIGHTNING, "hetero_ddp", DDP_ALIASES),
    Target("pytorch_lightning.strategies", "StrategyRegistry", _PYTORCH_LIGHTNING, "hetero_ddp", DDP_ALIASES),
    Target("lightning.pytorch.strategies", "StrategyRegistry", _LIGHTNING_ELASTIC, "hetero_elastic", ELASTIC_ALIASES),
    Target(
        "pytorch_lightning.strategies",
        "StrategyRegistry",
        _PYTORCH_LIGHTNING_ELASTIC,
        "hetero_elastic",
        ELASTIC_ALIASES,
    ),
    Target("lightning.pytorch.strategies", "StrategyRegistry", _LIGHTNING_FSDP, "hetero_fsdp", FSDP_ALIASES),
    Target("pytorch_lightning.strategies", "StrategyRegistry", _PYTORCH_LIGHTNING_FSDP, "hetero_fsdp", FSDP_ALIASES),
    Target("lightning.fabric.strategies", "STRATEGY_REGISTRY", _FABRIC, "hetero_ddp", FABRIC_ALIASES),
    Target("lightning_fabric.strategies", "STRATEGY_REGISTRY", _LIGHTNING_FABRIC, "hetero_ddp", FABRIC_ALIASES),
    Target("lightning.fabric.strategies", "STRATEGY_REGISTRY", _NO_ELASTIC_FABRIC, "hetero_elastic", ELASTIC_ALIASES),
    Target("lightning_fabric.strategies", "STRATEGY_REGISTRY", _NO_ELASTIC_FABRIC, "hetero_elastic", ELASTIC_ALIASES),
    Target("lightning.fabric.strategies", "STRATEGY_REGISTRY", _NO_FSDP_FABRIC, "hetero_fsdp", FSDP_ALIASES),
    Target("lightning_fabric.strategies", "STRATEGY_REGISTRY", _NO_FSDP_FABRIC, "hetero_fsdp", FSDP_ALIASES),
)
MODULES = frozenset(target.module for target in TARGETS)

FLAG = "ACCELERATE_USE_HETERO"
ACCELERATOR, TRAINER = "accelerate.accelerator", "transformers.trainer"


def boot() -> None:
    """Enter every strategy of :data:`TARGETS` in its registry: now if that is loaded, else when it is imported.

    If the flag for Accelerate is set, its hook is installed likewise. Calling it again changes nothing. It never
    raises: errors are logged, and only the names are missing. Torch calls it on ``import torch``, which any error
    would break for every program on the machine. So the handlers below are broad where foreign code runs: finders,
    loaders, and registries of any version.
    """
    try:
        if _FINDER not in sys.meta_path:
            sys.meta_path.insert(0, _FINDER)
    except Exception:  # other finders compare themselves with ours, and the list may be no list; see boot()
        log.warning("The import hook that registers the hetero strategies was not installed.", exc_info=True)
    for name in (*MODULES, ACCELERATOR, TRAINER):
        module = sys.modules.get(name)
        if module is not None and _is_awaited(name):
            _enter_lazily(module)


def _is_awaited(name: str) -> bool:
    """Return whether something is to be done after the execution of a module; asked at every import of the process."""
    return name in MODULES or (name in (ACCELERATOR, TRAINER) and _flag_is_set())


def _flag_is_set() -> bool:
    """Return whether the flag is anything but off; an invalid value is an error when an accelerator is made."""
    return os.environ.get(FLAG, "").strip().lower() not in ("", "false", "0", "no", "off")


def enter(target: Target, registry: Any, strategy: Callable[..., Any]) -> None:
    """Put ``strategy`` into ``registry`` under all aliases of ``target``, in place of what is there."""
    for suffix, arguments in target.aliases.items():
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        description = f"{target.name} of lightning-hetero, for unequal workers ({given})"
        registry.register(target.name + suffix, strategy, description=description, override=True, **arguments)


class RegistryFinder(importlib.abc.MetaPathFinder):
    """Import hook that enters the lazy factories right after a module that owns a registry was executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a registry's module with the other finders and hook its execution; ``None`` for any other module."""
        if not _is_awaited(fullname):
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = find and find(fullname, path, target)
            if spec is not None:
                _add_to_execution(spec)
                return spec
        return None


_FINDER = RegistryFinder()


def _add_to_execution(spec: importlib.machinery.ModuleSpec) -> None:
    """Wrap ``exec_module`` of this loader instance only; the loader keeps its type and its other methods."""
    loader: Any = spec.loader

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module
        loader.exec_module(module)
        _enter_lazily(module)

    try:
        loader.exec_module = exec_module
    except Exception:  # the loader is of another package, and may refuse the attribute with any error; see boot()
        log.warning("The hetero strategies cannot be registered with %s.", spec.name, exc_info=True)


def _enter_lazily(module: ModuleType) -> None:
    """Enter the lazy factory of each strategy of this module's registries, unless the strategy is there already."""
    if module.__name__ in (ACCELERATOR, TRAINER):
        _install_flag(module)
    for target in TARGETS:
        if target.module != module.__name__:
            continue
        try:
            registry = getattr(module, target.registry)
            if target.name not in registry:
                enter(target, registry, functools.partial(_construct, target.strategy))
        except Exception:  # the registry is Lightning's, of any version; see boot()
            log.warning("%r was not registered with %s.", target.name, module.__name__, exc_info=True)


def _install_flag(module: ModuleType) -> None:
    """Install the hook of the flag in Accelerate, or that in Transformers."""
    try:
        if module.__name__ == ACCELERATOR:
            importlib.import_module("lightning_hetero.accelerate.flag").install(module)
        elif getattr(module.__spec__, "_initializing", False):
            module.__class__ = _Executed
        else:
            package = importlib.import_module("lightning_hetero.transformers")
            getattr(package, "adapt", lambda: None)()  # while it is imported, it does so at its own end
    except Exception:  # both are of any version; see boot()
        log.warning("%s is set, and has no effect: %s could not be hooked.", FLAG, module.__name__, exc_info=True)


class _Executed(ModuleType):
    """The module of ``Trainer`` while it is executed: it is hooked when ``Trainer`` is first taken from it."""

    def __getattribute__(self, name: str) -> Any:
        if name == "Trainer":
            self.__class__ = ModuleType  # type: ignore[assignment]
            _install_flag(self)
        return ModuleType.__getattribute__(self, name)


def _construct(strategy: str, *args: Any, **kwargs: Any) -> Any:
    module, _, name = strategy.partition(":")
    return getattr(importlib.import_module(module), name)(*args, **kwargs)
