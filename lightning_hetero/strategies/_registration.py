"""Registration of a strategy class in place of the lazy factories that stood in for it."""

from typing import Any

from _lightning_hetero_autoload import TARGETS, enter


def register(cls: type, registry: Any) -> None:
    """Register ``cls`` under all of its names, in place of the factories that stood in for it.

    A strategy module calls it at its end, with the registry of its own namespace. The names and the arguments behind
    each of them are those of the table in ``_lightning_hetero_autoload``.

    Args:
        cls: a strategy class that the table names.
        registry: the ``StrategyRegistry`` of Lightning that the table names for the class.

    Raises:
        ValueError: if the table does not name the class.
    """
    strategy = f"{cls.__module__}:{cls.__qualname__}"
    targets = [target for target in TARGETS if target.strategy == strategy]
    if not targets:
        known = ", ".join(target.strategy for target in TARGETS)
        raise ValueError(
            f"{strategy} is in no line of the table of strategies, which has {known}. "
            "Add a line to TARGETS in _lightning_hetero_autoload.py."
        )
    for target in targets:
        enter(target, registry, cls)
