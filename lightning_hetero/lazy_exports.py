"""Public names of a package that are imported on first use, so that importing the package stays cheap."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["lazy_exports"]


def lazy_exports(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and the ``__dir__`` of a package whose public names are imported on first use.

    Args:
        package: its ``__name__``.
        homes: full name of the module of each public name.

    Raises:
        AttributeError: by the returned ``__getattr__``, for a name that has no home.

    Example:
        A package's ``__init__.py`` has the line::

            __getattr__, __dir__ = lazy_exports(__name__, {"Fraction": "fractions"})
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)  # found without a call from now on
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return find, names
