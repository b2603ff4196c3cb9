"""Where `tests/strategies/test_membership.py` looks for a fault; goes with it."""

from tests.promises.faults import LinkCut

__all__ = ["LinkCut"]
