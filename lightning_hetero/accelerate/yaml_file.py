"""Reading YAML as Accelerate's config files have it; whatever a file holds, it is read or it is a ``ValueError``."""

from typing import Any

import yaml

__all__ = ["NO_YAML", "read_yaml"]

NO_YAML = (yaml.YAMLError, ValueError, RecursionError, LookupError, TypeError, AttributeError)
"""Errors of text that is no YAML; PyYAML raises the last ones for values of another type than their tag says."""


def read_yaml(path: str) -> Any:
    """Return the content of a YAML file; nothing in it is executed.

    Raises:
        ValueError: with the reason, if it cannot be read or is no YAML.
    """
    try:
        with open(path, encoding="utf-8") as file:
            return yaml.safe_load(file)
    except (OSError, *NO_YAML) as error:
        raise ValueError(f"{error}" or type(error).__name__) from error
