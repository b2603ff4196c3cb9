"""Every check of `make gpu` can be found, and has more time than it takes."""

import importlib

from tests.gpu.main import CHECKS


def test_every_check_exists_and_fits_its_limit():
    for check in CHECKS:
        assert callable(getattr(importlib.import_module(f"tests.gpu.{check.module}"), check.name))
        assert check.takes < check.limit
