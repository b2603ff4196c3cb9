"""SLURM starts the processes; Lightning reads its variables, and the strategy needs nothing more."""

import json
import os
import subprocess

from tests.engines.test_torchrun import SCRIPT, check_samples
from tests.helpers import free_port
from tests.warm.interpreter import warm_python


def test_two_tasks_find_each_other_by_slurms_variables(tmp_path):
    common = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "localhost",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    tasks = [
        subprocess.Popen(
            [warm_python(), str(SCRIPT), str(tmp_path), "4", "1"],
            env={**os.environ, **common, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for task in range(2)
    ]
    try:
        outputs = [task.communicate(timeout=100)[0] for task in tasks]
    finally:
        for task in tasks:
            task.kill()
    assert [task.returncode for task in tasks] == [0, 0], "\n".join(outputs)
    assert json.loads((tmp_path / "done").read_text()) == {"step": 12, "world": 2}
    check_samples(tmp_path, 1)
