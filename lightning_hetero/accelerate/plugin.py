"""Settings of :class:`HeteroAccelerator`, each with an environment variable, as Accelerate's own plugins have them."""

import difflib
import importlib
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import yaml
from accelerate import Accelerator

from lightning_hetero.accelerate.yaml_file import NO_YAML, read_yaml
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.keywords import check_names, closest
from lightning_hetero.core.validation import check_choice, check_number
from lightning_hetero.elastic import OWN_LOOP, ElasticConfig

__all__ = ["PREFIX", "SETTINGS", "SWITCH", "HeteroPlugin", "as_environment", "switched_on"]

PREFIX = "ACCELERATE_HETERO_"
SWITCH = "ACCELERATE_USE_HETERO"
CONFIG_FILE = PREFIX + "CONFIG_FILE"
SECTION = "hetero_config"

ONLY_LIGHTNING = {
    "balance_evaluation": "leave evaluation loaders to Accelerate",
    "probe_memory": "give max_local_batch_sizes",
    "staleness": "it needs a trainer that applies the last sums; compress gradients with compression='block_topk'",
    "transfer_priority": "it is for stale gradients; leave it out",
}
SETTINGS = tuple(field.name for field in fields(HeteroConfig) if field.name not in ONLY_LIGHTNING)
"""Settings by name; the variable of ``local_batch_sizes`` is ``ACCELERATE_HETERO_LOCAL_BATCH_SIZES``."""

NAMES = (*SETTINGS, "density")


@dataclass(frozen=True, init=False)
class HeteroPlugin(HeteroConfig):
    """Settings of heterogeneous data parallelism for Accelerate, those of :class:`HeteroConfig`.

    A setting that is not given is read from its environment variable (``ACCELERATE_HETERO_POLICY`` for ``policy``, and
    so on); without a variable, from the section ``hetero_config`` of the YAML file that
    ``ACCELERATE_HETERO_CONFIG_FILE`` names. In a variable, write sizes as ``24,12,16`` and functions as
    ``module:function``. ``density`` is short for ``compression="block_topk(density=...)"``.

    Args:
        settings: arguments of :class:`HeteroConfig`, except those for Lightning's Trainer only.

    Raises:
        TypeError: if a setting is unknown or has the wrong type.
        ValueError: if a value is out of range, or two settings contradict each other; the message names the variable
            that the value came from.

    Example:
        >>> HeteroPlugin(local_batch_sizes=[24, 12, 16]).local_batch_sizes
        (24, 12, 16)
    """

    def __init__(self, **settings: Any) -> None:
        _check_names("HeteroPlugin", settings)
        sources = {name: name for name in settings}
        found = _from_file(os.environ.get(CONFIG_FILE))
        sources.update({name: f"{SECTION}.{name} in {os.environ.get(CONFIG_FILE)}" for name in found})
        for name, text in check_variables(os.environ).items():
            sources[name] = f"{PREFIX}{name.upper()}={text!r}"
            try:
                found[name] = parsed(name, text)
            except ValueError as error:
                raise ValueError(f"{sources[name]}: {error}") from error
        given = {**found, **settings}
        try:
            super().__init__(**with_density(given))
        except (TypeError, ValueError) as error:
            own = [name for name in found if name not in settings]
            elsewhere = [sources[name] for name in own if name in str(error)]
            elsewhere = elsewhere or [sources[name] for name in own if name == "compression"]
            if not elsewhere:
                raise
            raise type(error)(f"{', '.join(elsewhere)}: {error}") from error


def with_density(given: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with ``density`` moved into ``compression``.

    Example:
        >>> with_density({"density": 0.05})
        {'compression': 'block_topk(density=0.05)'}
    """
    density, rest = given.get("density"), {name: value for name, value in given.items() if name != "density"}
    if density is None:
        return rest
    check_number("density", density, low=0.0, high=1.0, include_low=False)
    if rest.get("compression") not in (None, "block_topk"):
        raise ValueError(
            f"density={density!r} is that of compression='block_topk', and {rest['compression']!r} is given. "
            "Write the density there, or leave one of them out."
        )
    return {**rest, "compression": f"block_topk(density={density})"}


def switched_on(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether ``ACCELERATE_USE_HETERO`` leaves the plugin on; ``false``, ``0``, ``no`` and ``off`` turn it off.

    An empty variable counts as one that is not set.

    Raises:
        ValueError: if the variable is neither true nor false.

    Example:
        >>> switched_on({}), switched_on({"ACCELERATE_USE_HETERO": "false"})
        (True, False)
    """
    text = environment.get(SWITCH, "").strip().lower() or "true"
    check_choice(SWITCH, text, ("true", "1", "yes", "on", "false", "0", "no", "off"))
    return text in ("true", "1", "yes", "on")


def names_function(name: str, text: str) -> bool:
    """Return whether the text of a setting in a variable names a function to import.

    Example:
        >>> names_function("lr_scaling", "mine:rule"), names_function("lr_scaling", "sqrt")
        (True, False)
    """
    names = ("weight_fn", "slice_fn", "concat_fn")
    return name in names or (name in ("lr_scaling", "cost_fn") and ":" in text)


def parsed(name: str, text: str) -> Any:
    """Parse the text of a setting in an environment variable or a YAML file.

    Unlike in YAML itself, ``1e-05`` is a number.

    Raises:
        ValueError: if a function cannot be imported.

    Example:
        >>> parsed("local_batch_sizes", "24,12,16"), parsed("hysteresis", "0.05"), parsed("policy", "pid")
        ([24, 12, 16], 0.05, 'pid')
    """
    text = text.strip()
    if names_function(name, text):
        return None if text.lower() in ("", "none", "null") else _function(name, text)
    if name == "lr_scaling":  # "none" is a rule
        return text
    if text.lower() == "none":
        return None
    if name == "compression":
        return text
    try:
        value = yaml.safe_load(f"[{text}]" if "," in text and not text.startswith("[") else text)
        return float(value) if isinstance(value, str) else value
    except NO_YAML:
        return text


def as_environment(section: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables of a ``hetero_config`` section.

    Raises:
        TypeError: if the section has a setting that does not exist.

    Example:
        >>> as_environment({"policy": "pid", "local_batch_sizes": None})
        {'ACCELERATE_USE_HETERO': 'true', 'ACCELERATE_HETERO_POLICY': 'pid'}
    """
    _check_names(SECTION, section)
    variables = {SWITCH: "true"}
    for name, value in section.items():
        if value is not None:
            plain = isinstance(value, list | tuple) and not any(isinstance(item, list | tuple) for item in value)
            text = ",".join(map(str, value)) if plain else str(value)
            variables[PREFIX + name.upper()] = text.lower() if isinstance(value, bool) else text
    return variables


def _check_names(where: str, settings: Mapping[str, Any]) -> None:
    unknown = sorted(set(settings) - set(NAMES))
    for name in set(unknown) & set(ONLY_LIGHTNING):
        raise TypeError(f"{where}: {name} is for Lightning's Trainer only; {ONLY_LIGHTNING[name]}.")
    if set(unknown) & {field.name for field in fields(ElasticConfig)}:
        raise TypeError(f"{where} has no setting {', '.join(unknown)}. {OWN_LOOP}.")
    check_names(where, unknown, NAMES, kind="setting")


def check_accelerator(cls: type, given: Iterable[str]) -> None:
    """Check the names of an accelerator's keyword arguments.

    Raises:
        TypeError: if a name is unknown; the message gives the nearest known name, or says where it belongs.
    """
    parameters = inspect.signature(Accelerator.__init__).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return  # wrapped by other code, whose names are not known here
    allowed = ["hetero_plugin", *list(parameters)[1:]]
    meant = {name: _setting_meant(name) for name in given if name not in allowed and not closest(name, allowed)}
    settings = [setting for setting in meant.values() if setting]
    misspelt = [setting for name, setting in meant.items() if setting not in (None, name)]
    hint = f"Did you mean the setting {' and '.join(map(str, misspelt))}? " if misspelt else ""
    if settings:
        hint += (
            f"Give settings in the plugin: hetero_plugin=HeteroPlugin({', '.join(f'{one}=...' for one in settings)})."
        )
    check_names(cls.__name__, given, allowed, hint=hint)


def _setting_meant(name: str) -> str | None:
    """Return the setting of this name or the nearest one, ``None`` if none is near."""
    return next(iter(difflib.get_close_matches(name, NAMES, n=1)), None)


def check_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the text of each setting whose variable is set.

    Raises:
        ValueError: if a variable with our prefix belongs to no setting, or the prefix itself is misspelt.
    """
    known = {PREFIX + name.upper(): name for name in NAMES}
    given = {name: text for name, text in environment.items() if name != CONFIG_FILE and _ours(name, known)}
    for name in given:
        if name not in known:
            meant = closest(name, [*known, CONFIG_FILE], prefix=PREFIX if name.startswith(PREFIX) else "")
            raise ValueError(
                f"{name}={given[name]!r} is no setting.{meant} Allowed are {', '.join(known)}, {CONFIG_FILE}."
            )
    return {known[name]: text for name, text in given.items() if text.strip()}


def _ours(variable: str, known: Iterable[str]) -> bool:
    """Return whether a variable is meant for us: by its prefix, or as one of the known ones but for a letter or two."""
    family = variable.startswith(PREFIX.partition("_")[0])
    return variable.startswith(PREFIX) or (family and bool(difflib.get_close_matches(variable, known, cutoff=0.95)))


def _from_file(path: str | None) -> dict[str, Any]:
    if not path:
        return {}
    try:
        content = read_yaml(path) or {}
    except ValueError as error:
        raise ValueError(f"{CONFIG_FILE}={path!r} cannot be read: {error}. Give the path of a YAML file.") from error
    section = content.get(SECTION, content) if isinstance(content, dict) else None
    if not isinstance(section, dict):
        raise ValueError(f"{CONFIG_FILE}={path!r} has no section {SECTION!r} with settings. Add one.")
    _check_names(f"{SECTION} in {path}", section)
    return {name: parsed(name, value) if isinstance(value, str) else value for name, value in section.items()}


def _function(setting: str, text: str) -> Callable[..., Any]:
    """Import the function that ``module:function`` names."""
    module, _, name = text.partition(":")
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{setting}={text!r} cannot be imported: {error}. Write it as module:function, in a module on PYTHONPATH."
        ) from error
    return function
