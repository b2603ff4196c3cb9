"""Logged means are right under uneven sizes, and the fixed names of our metrics reach the user's logger."""

import csv

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from tests.helpers import Points, Regressor, fit, run_ranks


class Logs(Regressor):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("constant", torch.tensor(1.0), on_epoch=True, on_step=False, sync_dist=True)
        self.log("mean_x", batch[0][:, 0].mean(), on_epoch=True, on_step=False, sync_dist=True)
        self.log("step_constant", torch.tensor(3.0), on_step=True, on_epoch=False, sync_dist=True)
        return loss


def _logs(rank, sizes, n):
    return fit(rank, {"local_batch_sizes": sizes}, len(sizes), 1, model=Logs(), dataset=Points(n), max_epochs=1)


@pytest.mark.parametrize("n", [7, 21, 25])
@pytest.mark.parametrize("sizes", [(3, 4), (6, 1), (5, 0)], ids=str)
def test_epoch_means_are_means_over_samples(sizes, n):
    expected = float(Points(n).x[:, 0].mean())
    for result in run_ranks(_logs, 2, sizes, n):
        assert result["metrics"]["constant"] == pytest.approx(1.0, abs=1e-6)
        assert result["metrics"]["step_constant"] == pytest.approx(3.0, abs=1e-6)
        assert result["metrics"]["mean_x"] == pytest.approx(expected, rel=1e-4, abs=1e-6)


def _metrics(rank, folder):
    return fit(
        rank,
        {"replan": 4},
        2,
        4,
        dataset=Points(200),
        max_epochs=2,
        logger=CSVLogger(folder, name="", version=""),
        log_every_n_steps=1,
    )


def test_metrics_reach_the_logger(tmp_path):
    run_ranks(_metrics, 2, str(tmp_path))
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    found = {name: [float(r[name]) for r in rows if r.get(name)] for name in rows[0]}
    predicted = ("predicted_step_time", "predicted_step_time_error")
    for name in ("step_time", *predicted, "idle_fraction", "compute_time/rank0", "compute_time/rank1"):
        assert found[f"hetero/{name}"], name
        assert all(v >= 0 and np.isfinite(v) for v in found[f"hetero/{name}"])
    assert set(found["hetero/total_batch_size"]) == {8.0}
    sizes = zip(found["hetero/local_batch_size/rank0"], found["hetero/local_batch_size/rank1"], strict=True)
    assert all(a + b == 8 for a, b in sizes)
