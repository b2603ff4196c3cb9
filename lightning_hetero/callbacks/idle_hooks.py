"""Hooks of a callback that would be called in each step and do nothing.

Lightning profiles a call of each hook of each callback, also of those that a callback leaves as they are: some ten
microseconds each, seven times a step. It passes over an attribute that cannot be called.
"""

from typing import Any

__all__ = ["EACH_STEP", "leave_out", "put_back"]

EACH_STEP = (
    *("on_train_batch_start", "on_before_zero_grad", "on_before_backward"),
    *("on_after_backward", "on_before_optimizer_step", "on_train_batch_end"),
)
"""Hooks of a step in which callbacks rarely have something to do."""


def leave_out(callback: Any, idle_in: type) -> None:
    """Leave out the hooks of a step that are still those of a class in which they do nothing.

    Args:
        callback: whose hooks may be overridden.
        idle_in: a class that it is derived from.

    Example:
        >>> from lightning_hetero.callbacks.base import Callback
        >>> class Watching(Callback):
        ...     def on_after_backward(self, trainer, pl_module): ...
        >>> watching = Watching()
        >>> leave_out(watching, Callback)
        >>> [name for name in EACH_STEP if getattr(watching, name)]
        ['on_after_backward']
    """
    for name in EACH_STEP:
        if getattr(type(callback), name) is getattr(idle_in, name):
            setattr(callback, name, None)


def put_back(callback: Any) -> None:
    """Undo :func:`leave_out`."""
    for name in EACH_STEP:
        vars(callback).pop(name, None)
