"""Trainings by several kinds of strategies in turn, in the same two processes, so that all see the same machine."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

WORKLOAD = Path(__file__).parent / "_workload.py"


def in_turn(kinds, steps, batch, model, port, *more):
    """What rank 0 knows of each training, in the order of the kinds."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, str(WORKLOAD), "--kind", ",".join(kinds), "--out", str(out), "--bare"]
        command += ["--steps", str(steps), "--batch", str(batch), *more, *model]
        launch = {"NODE_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        launch |= {"MASTER_PORT": str(port), "TMPDIR": folder}
        ranks = [
            subprocess.Popen(
                command,
                env={**os.environ, **launch, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        errors = [rank.communicate(timeout=3600)[1] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise SystemExit("\n".join(errors))
        return json.loads(out.read_text())


def median_and_error(values):
    """The median, and the half-width of its 95 % interval (McGill, Tukey and Larsen 1978)."""
    low, middle, high = np.percentile(values, (25, 50, 75))
    return float(middle), float(1.57 * (high - low) / len(values) ** 0.5)
