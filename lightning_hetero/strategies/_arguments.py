"""Checks of a strategy's keyword arguments, so that a misspelled one fails at construction, not in the training."""

import inspect
from collections.abc import Iterable
from dataclasses import fields

from torch.nn.parallel import DistributedDataParallel

from lightning_hetero.config import FOR_OWN_LOOPS, HeteroConfig
from lightning_hetero.core.validation import check_names

__all__ = ["arguments_of", "check_arguments", "refuse_for_own_loops"]

GIVEN_BY_LIGHTNING = ("self", "module", "device_ids", "args", "kwargs")


def arguments_of(strategy: type) -> list[str]:
    """Return the names of all keyword arguments of a strategy: its own, ours, and those of torch's wrapper.

    Args:
        strategy: a class; every class that it is made of passes on what it does not take itself.
    """
    initialisers = [vars(cls)["__init__"] for cls in strategy.__mro__[:-1] if "__init__" in vars(cls)]
    names = [field.name for field in fields(HeteroConfig)]
    for initialiser in (*initialisers, DistributedDataParallel.__init__):
        names += inspect.signature(initialiser).parameters
    return [name for name in dict.fromkeys(names) if name not in GIVEN_BY_LIGHTNING]


def check_arguments(strategy: object, given: Iterable[str]) -> None:
    """Check the names of what was given to a strategy beside its own arguments.

    Raises:
        TypeError: if a name is unknown; the message gives the nearest known name.
    """
    check_names(type(strategy).__name__, given, arguments_of(type(strategy)))


def refuse_for_own_loops(strategy: object, given: Iterable[str]) -> None:
    """Check that a strategy for Lightning's Trainer was given no setting that the Trainer replaces by a callback.

    Raises:
        TypeError: if it was; the message names the callback.
    """
    for name in FOR_OWN_LOOPS:
        if name in given:
            raise TypeError(
                f"{type(strategy).__name__} has no argument {name}, which is for training loops of one's own. Under "
                f"Lightning's Trainer, give Trainer(callbacks=[{FOR_OWN_LOOPS[name]}])."
            )
