"""The package's lines are shown from the moment on that a front end is imported, unless logging is set up already."""

import subprocess

import pytest

from tests.warm.interpreter import warm_python

SHOWN = "import logging; log = logging.getLogger('lightning_hetero'); print(log.level, len(log.handlers))"


def printed(code):
    return subprocess.run([warm_python(), "-c", code], capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize(
    "front_end",
    [
        "from lightning_hetero import HeteroDDPStrategy",
        "from lightning_hetero import HeteroElasticStrategy",
        "from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy",
        "from lightning_hetero.accelerate import HeteroAccelerator",
        "from lightning_hetero.session import HeteroSession",
    ],
    ids=lambda line: line.removeprefix("from lightning_hetero").replace(" import ", "."),
)
def test_lines_are_shown_before_a_run_begins(front_end):
    assert printed(f"{front_end}; {SHOWN}") == ["20", "1"]


def test_logging_that_is_set_up_stays_as_it_is():
    begin = "import logging; logging.basicConfig(level=30); logging.getLogger('lightning_hetero').setLevel(40)"
    assert printed(f"{begin}; from lightning_hetero.session import HeteroSession; {SHOWN}") == ["40", "0"]
