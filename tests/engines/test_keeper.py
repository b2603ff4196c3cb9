"""torchrun with keepers: the command of the documentation, with real processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.strategies.test_membership import SLOTS, STEPS, Outcome
from tests.warm.interpreter import warmed

TORCHRUN = Path(sys.executable).with_name("torchrun")
SCRIPT = """
import sys
from pathlib import Path
from tests.strategies.test_membership import train
train(Path(sys.argv[1]), [(1, 0, 6, "forward", 9)], {}, True)
"""


@pytest.mark.alone
def test_the_command_goes_on_without_a_killed_worker(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "expects-1").touch()
    command = warmed(
        TORCHRUN,
        *("--standalone", f"--nproc-per-node={SLOTS}", "-m", "lightning_hetero.keeper", "--max-restarts=2"),
        *(tmp_path / "train.py", tmp_path),
    )
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path}
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            code = process.wait(timeout=150)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    text = (tmp_path / "log").read_text()
    assert code == 0, text[-5000:]
    found = Outcome(tmp_path)
    found.check(STEPS)
    assert found.lives == {(0, 0), (1, 0), (1, 1), (2, 0)}
    assert found.worlds() == {SLOTS - 1, SLOTS}
    assert found.difference() < 1e-12
    assert "training goes on in step 6 with workers 0, 2" in text
