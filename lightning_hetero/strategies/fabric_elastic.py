"""``hetero_elastic`` under Fabric: a name that only raises an error, which says what to use instead."""

from typing import Any, NoReturn

from lightning_hetero.elastic import OWN_LOOP

__all__ = ["refuse"]


def refuse(**arguments: Any) -> NoReturn:
    """Raise the error of ``hetero_elastic`` under Fabric, in the registry's place of a strategy.

    Args:
        arguments: arguments of the alias.

    Raises:
        ValueError: always, with what to use instead.
    """
    raise ValueError(f"strategy='hetero_elastic' was given to Fabric. {OWN_LOOP}.")
