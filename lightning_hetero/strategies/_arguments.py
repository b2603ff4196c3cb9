"""Checks of a strategy's keyword arguments, so that a misspelled one fails at construction, not in the training."""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero.config import FOR_OWN_LOOPS, HeteroConfig
from lightning_hetero.core.keywords import check_names

__all__ = ["arguments_of", "check_arguments", "check_communication", "refuse_for_own_loops"]

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


def check_communication(config: HeteroConfig, given: Mapping[str, Any]) -> None:
    """Check that Lightning's arguments on how gradients are sent agree with the settings.

    Args:
        config: settings.
        given: arguments of Lightning's strategy.

    Raises:
        ValueError: if both say how gradients are sent, or models are to be averaged.
    """
    for name in ("compression", "hierarchy"):
        if getattr(config, name) is not None and given.get("ddp_comm_hook") is not None:
            raise ValueError(f"{name}= and ddp_comm_hook= both say how gradients are sent. Give one of them.")
    averaged = given.get("model_averaging_period") is not None
    if averaged or isinstance(given.get("ddp_comm_state"), PostLocalSGDState):
        raise ValueError(
            "model averaging (post-local SGD) averages models of all workers alike, which is wrong for unequal "
            "batches. Leave model_averaging_period and PostLocalSGDState out."
        )
