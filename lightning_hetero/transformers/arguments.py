"""Settings of unequal workers among a trainer's arguments: ``--hetero_local_batch_sizes 2,2,2,15``."""

from copy import copy
from dataclasses import dataclass, field, fields, make_dataclass
from functools import cache
from typing import Any

from transformers import TrainingArguments

from lightning_hetero.accelerate.plugin import NAMES, HeteroPlugin, parsed, switched_on
from lightning_hetero.core.keywords import checked_keywords

__all__ = ["HeteroTrainingArguments", "by_tokens", "hetero_arguments", "plugin_of"]

PREFIX = "hetero_"


class _Saved:
    """Arguments as Transformers writes them: into a checkpoint, and to the trackers as JSON."""

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments as values for JSON, with functions by their names."""
        given: dict[str, Any] = super().to_dict()  # type: ignore[misc]
        hetero = {name: value for name, value in given.items() if name.startswith(PREFIX) and value is not None}
        plain = (bool, int, float, str, list, tuple)
        return given | {name: value if isinstance(value, plain) else str(value) for name, value in hetero.items()}

    def __reduce__(self) -> Any:
        """Pickle by the class that the settings were added to, since the class itself has no name in a module."""
        base = next(cls for cls in type(self).__mro__ if not issubclass(cls, Settings | _Saved))
        return _loaded, (base, dict(vars(self)))


def _loaded(base: type, values: dict[str, Any]) -> Any:
    cls: Any = hetero_arguments(base)
    arguments = cls.__new__(cls)
    vars(arguments).update(values)
    return arguments


def _setting(name: str) -> Any:
    return field(default=None, metadata={"help": f"Unequal workers: {name} of HeteroPlugin."})


Settings = make_dataclass(
    "Settings",
    [(PREFIX + name, str | None, _setting(name)) for name in NAMES],
    bases=(_Saved,),
    namespace={"__module__": __name__},
)
"""A field for each setting of :class:`HeteroPlugin`: the value itself, or its text as in an environment variable."""


def hetero_arguments(cls: type) -> type:
    """Return a class of training arguments with the settings of unequal workers as further fields.

    Args:
        cls: dataclass of arguments, such as ``TrainingArguments`` or TRL's ``SFTConfig``.

    Returns:
        A dataclass derived from it, or the class itself if it has the settings. ``HfArgumentParser`` gives it an
        option for each: ``--hetero_policy``, ``--hetero_local_batch_sizes`` and so on.

    Raises:
        TypeError: if the class is not one of training arguments.

    Example:
        >>> hetero_arguments(TrainingArguments)(output_dir="out", hetero_policy="pid").hetero_policy
        'pid'
    """
    if not (isinstance(cls, type) and issubclass(cls, TrainingArguments)):
        raise TypeError(f"hetero_arguments({cls!r}): give TrainingArguments or a class derived from it.")
    if issubclass(cls, Settings):
        return cls
    if cls is TrainingArguments:
        return HeteroTrainingArguments
    made: type = _with_settings(cls)  # type: ignore[arg-type]  # a class is hashable, whatever its instances are
    return made


@cache
def _with_settings(cls: type) -> type:
    return checked_keywords(
        dataclass(type(f"Hetero{cls.__name__}", (Settings, cls), {"__module__": __name__, "__doc__": cls.__doc__}))
    )


@checked_keywords
@dataclass
class HeteroTrainingArguments(Settings, TrainingArguments):  # type: ignore[misc, valid-type]
    """Transformers' ``TrainingArguments`` with the settings of unequal workers.

    ``per_device_train_batch_size`` is the average over the workers. With ``hetero_local_batch_sizes``, these sizes go
    before it.

    Args:
        hetero_settings: each setting of :class:`~lightning_hetero.accelerate.HeteroPlugin` with ``hetero_`` before its
            name: the value, or its text as on a command line. One that is not given is read from the environment.
        settings: all other arguments, those of ``TrainingArguments``.

    Raises:
        TypeError: when the trainer is made, if a setting has the wrong type.
        ValueError: when the trainer is made, if a setting is out of range.

    Example:
        >>> HeteroTrainingArguments(output_dir="out", hetero_local_batch_sizes="24,12").hetero_local_batch_sizes
        '24,12'
    """


def plugin_of(args: object, given: HeteroPlugin | None = None) -> HeteroPlugin | None:
    """Return the plugin that the arguments of a trainer ask for; ``None`` if it is switched off.

    Args:
        args: arguments of the trainer.
        given: plugin that is given beside them.

    Raises:
        TypeError: if a setting has the wrong type.
        ValueError: if a value is out of range, or settings are given in both places.

    Example:
        >>> plugin_of(HeteroTrainingArguments(output_dir="out", hetero_local_batch_sizes="24,12")).local_batch_sizes
        (24, 12)
    """
    names = [one.name for one in fields(Settings)]
    settings = {name.removeprefix(PREFIX): getattr(args, name, None) for name in names}
    settings = {name: value for name, value in settings.items() if value is not None}
    if given is not None and settings:
        raise ValueError(
            f"{PREFIX}{next(iter(settings))} among the arguments and a hetero_plugin both set the split. Give one."
        )
    if settings:
        texts = {name: parsed(name, value) if isinstance(value, str) else value for name, value in settings.items()}
        try:
            return HeteroPlugin(**texts)
        except (TypeError, ValueError) as error:
            named = [f"--{PREFIX}{name} {settings[name]}" for name in settings if name in str(error)]
            raise type(error)(f"{', '.join(named)}: {error}" if named else str(error)) from error
    return given if given is not None or not switched_on() else HeteroPlugin()


def by_tokens(plugin: HeteroPlugin) -> HeteroPlugin:
    """Return a plugin whose ``cost_fn="auto"`` is ``"tokens"``, since a trainer's losses are weighted by tokens.

    It stays as it is if a setting needs numbers of samples.

    Example:
        >>> by_tokens(HeteroPlugin()).cost_fn, by_tokens(HeteroPlugin(local_batch_sizes=[3, 1])).cost_fn
        ('tokens', 'auto')
    """
    fixed = plugin.local_batch_sizes is not None or plugin.policy == "even" or plugin.local_batch_multiple > 1
    needs_numbers = fixed or plugin.noise_scale or plugin.max_total_batch_size is not None
    if plugin.cost_fn != "auto" or needs_numbers:
        return plugin
    changed = copy(plugin)  # a new one would read the environment again, and undo arguments that are at their defaults
    object.__setattr__(changed, "cost_fn", "tokens")
    return changed
