"""One rank over NCCL: every exchange trains as on a CPU, a sum takes what it takes, and the process ends in peace."""

import subprocess
import sys

import torch

from tests.gpu.common import GPU, busy, pytest_passes, ranks
from tests.gpu.outcome import require

SUM = 0.005


def _timed_sum(rank):
    """Seconds of a sum that is made to take 5 ms behind the host's back, as the observer saw them."""
    import numpy as np
    from torch.utils.data import DataLoader

    from lightning_hetero import HeteroDDPStrategy
    from lightning_hetero.comm.collectives import async_ops as sums
    from tests.helpers import Points, Regressor, trainer_of

    side, async_all_reduce = torch.cuda.Stream(GPU), sums.async_all_reduce

    def slow(buffer, group=None):
        side.wait_stream(torch.cuda.current_stream(GPU))
        with torch.cuda.stream(side):
            busy(GPU, SUM)
            return async_all_reduce(buffer, group)

    sums.async_all_reduce = slow
    strategy = HeteroDDPStrategy(replan=8, process_group_backend="nccl")
    trainer = trainer_of(strategy, 1, accelerator="gpu", max_epochs=2)
    trainer.fit(Regressor(dtype=torch.float32), DataLoader(Points(160, dtype=torch.float32), 8))
    return float(np.nanmedian(strategy.observations().last_sync))


def gpu():
    figures = pytest_passes(["-m", "gpu", "tests/test_devices.py", "-k", "over_nccl", "--timeout=90"])
    (seconds,) = ranks(_timed_sum, 1)
    figures["ms of a sum of 5 ms"] = 1e3 * seconds
    require(abs(seconds - SUM) < 3e-4, "the time of a sum is wrong", figures)
    done = subprocess.run([sys.executable, "-m", "tests.gpu.nccl"], capture_output=True, text=True, check=False)
    figures["exit status of a training"] = done.returncode
    require(done.returncode == 0, f"a training over NCCL ended with {done.stderr[-300:]}", figures)
    return figures


def _train():
    """A training in this very process, which then ends as a user's script does."""
    from torch.utils.data import DataLoader

    from lightning_hetero import BlockTopK, HeteroDDPStrategy
    from tests.helpers import Points, Regressor, trainer_of

    strategy = HeteroDDPStrategy(compression=BlockTopK(density=0.5, block=4), process_group_backend="nccl")
    trainer = trainer_of(strategy, 1, accelerator="gpu", max_epochs=1)
    trainer.fit(Regressor(dtype=torch.float32), DataLoader(Points(64, dtype=torch.float32), 8))


if __name__ == "__main__":
    _train()
