"""What holds for every test of a fault."""

import psutil
import pytest


@pytest.fixture(autouse=True)
def _no_process_is_left_behind():
    """Whatever a rank suffered, the test ends with the processes that it began with."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    _, alive = psutil.wait_procs(left, timeout=10)
    assert not alive
