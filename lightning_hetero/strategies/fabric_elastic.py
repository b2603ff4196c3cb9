"""``hetero_elastic`` is not for Fabric: its name is known there so that who asks for it is told what to use instead."""

from typing import Any, NoReturn

from lightning_hetero.elastic import OWN_LOOP

__all__ = ["refuse"]


def refuse(**arguments: Any) -> NoReturn:
    """Stand in the registry where a strategy would.

    Args:
        arguments: those of the alias.

    Raises:
        ValueError: always, with what to use instead.
    """
    raise ValueError(f"strategy='hetero_elastic' was given to Fabric. {OWN_LOOP}.")
