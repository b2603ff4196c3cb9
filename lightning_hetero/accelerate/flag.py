"""Hook by which ``ACCELERATE_USE_HETERO=true`` makes ``accelerate.Accelerator()`` of an unchanged script uneven.

``import torch`` installs it (``_lightning_hetero_autoload``), and only if the variable is set. The hook replaces one
attribute of Accelerate, ``Accelerator.__init__``. An ``Accelerator`` that is made while the flag is on becomes a
:class:`FlagAccelerator`, whoever makes it: the script, transformers, TRL, or a subclass in another library. The name
``accelerate.Accelerator`` stays Accelerate's class, so it does not matter who imported it before. :func:`uninstall`
takes the hook out again.
"""

import functools
import importlib
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from lightning_hetero.frontend.log import log

__all__ = ["OWNER", "install", "uninstall"]

OWNER = "accelerate.accelerator"
"""Module of Accelerate that defines ``Accelerator``."""
BEFORE = "before_hetero"
"""Attribute of the hook that keeps Accelerate's own ``__init__``."""

PLAIN_MODULE: Any = ModuleType
LATE = (
    "ACCELERATE_USE_HETERO is set, but an Accelerator was made before lightning-hetero could see it: that one stays a "
    "plain one. Set the variable before the script imports torch, leave TORCH_DEVICE_BACKEND_AUTOLOAD at 1, or import "
    "lightning_hetero first."
)


def install(module: ModuleType) -> None:
    """Install the hook; a second call changes nothing.

    Accelerate itself imports torch, so that the module often is not executed to its end yet. Then the hook is installed
    when somebody first takes ``Accelerator`` from it.

    Args:
        module: ``accelerate.accelerator``, executed or being executed.

    Example:
        >>> import accelerate.accelerator
        >>> before = accelerate.Accelerator.__init__
        >>> install(accelerate.accelerator)
        >>> accelerate.Accelerator.__init__ is before
        False
        >>> uninstall(accelerate.accelerator)
        >>> accelerate.Accelerator.__init__ is before
        True
    """
    if "Accelerator" in vars(module):
        _hook(module.Accelerator)
        if module.AcceleratorState._shared_state:
            log.warning(LATE)
    elif type(module) is ModuleType:
        _turn(module, _Executed)


def uninstall(module: ModuleType) -> None:
    """Remove the hook; without one, nothing changes. Accelerators that were made stay what they are."""
    if isinstance(module, _Executed):
        _turn(module, PLAIN_MODULE)
        return
    accelerator: Any = module.Accelerator
    before = getattr(vars(accelerator)["__init__"], BEFORE, None)
    if before is not None:
        accelerator.__init__ = before


def _turn(instance: object, cls: type) -> None:
    """Make an object one of another class."""
    object.__setattr__(instance, "__class__", cls)


class _Executed(ModuleType):
    """The module while it is executed: it installs the hook when ``Accelerator`` is first taken from it."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name == "Accelerator":
            _turn(self, PLAIN_MODULE)
            _hook(value)
        return value


def _hook(accelerator: Any) -> None:
    before: Callable[..., None] = vars(accelerator)["__init__"]
    if hasattr(before, BEFORE):
        return

    @functools.wraps(before)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        hetero = _hetero_class(type(self)) if os.environ.get("ACCELERATE_USE_HETERO", "").strip() else None
        if hetero is not None:
            _turn(self, hetero)
        constructor = before if hetero is None else _flag_accelerator().__init__
        constructor(self, *args, **kwargs)

    setattr(__init__, BEFORE, before)
    accelerator.__init__ = __init__


def _flag_accelerator() -> Any:
    """Return our class; its module imports Accelerate, so this module must not import it."""
    return importlib.import_module("lightning_hetero.accelerate.flag_accelerator").FlagAccelerator


def _hetero_class(cls: type) -> type | None:
    """Return the class that an accelerator of class ``cls`` becomes; ``None`` if it stays what it is.

    Raises:
        ValueError: if the flag is neither true nor false.
    """
    plugin, explicit = (importlib.import_module(f"lightning_hetero.accelerate.{name}") for name in ("plugin", "base"))
    if issubclass(cls, explicit.SessionAccelerator) or not plugin.switched_on():
        return None
    flagged = _flag_accelerator()
    return flagged if issubclass(flagged, cls) else _joined(cls)


@functools.cache
def _joined(cls: type) -> type:
    """Return a subclass of ``cls``, which is another library's ``Accelerator``, and of ours."""
    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}

    def reduce(self: Any, protocol: int) -> tuple[Any, ...]:
        return _unpickled, (cls,), self.__dict__

    return type(cls)(cls.__name__, (cls, _flag_accelerator()), {**names, "__reduce_ex__": reduce})


def _unpickled(cls: type) -> Any:
    kind: Any = _joined(cls)
    return kind.__new__(kind)
