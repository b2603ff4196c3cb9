"""Strategies that Fabric does not have: names that only raise an error, which says what to use instead."""

from typing import Any, NoReturn

from lightning_hetero.elastic import OWN_LOOP

__all__ = ["refuse_elastic", "refuse_fsdp"]


def refuse_elastic(**arguments: Any) -> NoReturn:
    """Raise the error of ``hetero_elastic`` under Fabric, in the registry's place of a strategy.

    Args:
        arguments: arguments of the alias.

    Raises:
        ValueError: always, with what to use instead.
    """
    raise ValueError(f"strategy='hetero_elastic' was given to Fabric. {OWN_LOOP}.")


def refuse_fsdp(**arguments: Any) -> NoReturn:
    """Raise the error of ``hetero_fsdp`` under Fabric, in the registry's place of a strategy.

    Args:
        arguments: arguments of the alias.

    Raises:
        ValueError: always, with what to use instead.
    """
    raise ValueError(
        "strategy='hetero_fsdp' was given to Fabric. It is a strategy of Lightning's Trainer only: use "
        "Trainer(strategy='hetero_fsdp'), or strategy='hetero_ddp' in Fabric if the model fits on every worker."
    )
