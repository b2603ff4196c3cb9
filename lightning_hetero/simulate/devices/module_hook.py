"""Hook of a module that a copy of the module does not take along."""

from collections.abc import Callable
from typing import Any

__all__ = ["ModuleHook", "do_nothing"]


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing, as a hook of a copied module."""


def _nothing() -> Callable[..., None]:
    return do_nothing


class ModuleHook:
    """Hook that calls a function; a copied or saved module gets one that does nothing.

    A copy, such as the model of an average of weights, runs on no device, and what a hook belongs to need not be saved.

    Args:
        call: function with the arguments of the hook.

    Example:
        >>> import copy
        >>> hook = ModuleHook(lambda module, inputs: len(inputs))
        >>> hook(None, (1, 2)), copy.deepcopy(hook) is do_nothing
        (2, True)
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return do_nothing

    def __reduce__(self) -> Any:
        return _nothing, ()
