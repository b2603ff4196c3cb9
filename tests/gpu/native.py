"""The tests of kernels that the interpreter runs elsewhere, natively: compression and optimizers side by side."""

from concurrent.futures import ThreadPoolExecutor

from tests.gpu.common import pytest_passes
from tests.gpu.outcome import require

FILES = ("tests/compression/interpreted.py", "tests/optim/interpreted.py")
INTERPRETED = {"TRITON_INTERPRET": "1"}


def gpu():
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda file: pytest_passes([file, "--timeout=140"]), FILES))
    figures = dict(zip(FILES, (each["tests"] for each in found), strict=True))
    require(not any("skipped" in text for text in figures.values()), "tests were skipped", figures)
    return figures


def stand_in():
    """One test of each file through the interpreter; the tests run all of them so."""
    kernels = pytest_passes([FILES[0], "-k", "a_step_is_that_of_the_reference and int8"], INTERPRETED)
    steps = pytest_passes([FILES[1], "-k", "without_elements"], INTERPRETED)
    return {FILES[0]: kernels["tests"], FILES[1]: steps["tests"]}
