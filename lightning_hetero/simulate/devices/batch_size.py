"""Batch size of a pass, from the arguments of a module or from a batch."""

from collections.abc import Callable
from numbers import Integral
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

__all__ = ["check_size_function", "first_dimension", "size_of"]


def first_dimension(*inputs: Any) -> int:
    """Return the first dimension of the first tensor among the inputs, which is the batch size by convention.

    Args:
        inputs: arguments of a module, or a batch: tensors, or containers of tensors.

    Raises:
        ValueError: if there is no tensor with a dimension.

    Example:
        >>> first_dimension({"ids": torch.zeros(3, 5)}), first_dimension([torch.zeros(2), 7])
        (3, 2)
    """
    leaves = tree_leaves([dict(one) if hasattr(one, "keys") else one for one in inputs])
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return len(leaf)
    types = ", ".join(type(one).__name__ for one in inputs) or "none"
    raise ValueError(
        f"No tensor with a dimension is among the inputs ({types}), so the batch size is not known. Give batch_size=, "
        "a function of the inputs."
    )


def check_size_function(function: Any) -> Callable[..., int]:
    """Return a function that counts samples.

    Raises:
        TypeError: if it cannot be called.
    """
    if not callable(function):
        raise TypeError(f"batch_size={function!r} must be a function that returns the number of samples, such as len.")
    found: Callable[..., int] = function
    return found


def size_of(function: Callable[..., int], *inputs: Any) -> int:
    """Return the number of samples that a function counts.

    Raises:
        TypeError: if it returns no integer.
        ValueError: if it returns a negative one.

    Example:
        >>> size_of(len, [1, 2, 3])
        3
    """
    size = function(*inputs)
    if isinstance(size, bool) or not isinstance(size, Integral):
        raise TypeError(f"batch_size() returned {size!r}; return the number of samples, an integer.")
    if size < 0:
        raise ValueError(f"batch_size() returned {size}; return the number of samples, 0 or more.")
    return int(size)
