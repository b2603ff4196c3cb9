"""A CPU beside a GPU in one job over gloo, in both orders and with every exchange; clusters of both."""

from tests.gpu.common import pytest_passes
from tests.gpu.outcome import require

FILE = "tests/test_devices.py"


def gpu():
    figures = pytest_passes(["-m", "gpu", FILE, "-k", "two_kinds or clusters or not_finite", "--timeout=140"])
    require("skipped" not in figures["tests"], "tests were skipped", figures)
    return figures


def stand_in():
    """Two CPUs, through one exchange."""
    return pytest_passes([FILE, "-k", "two_kinds and devices0 and optimizer"])
