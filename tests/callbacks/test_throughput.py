"""What Lightning's ThroughputMonitor reports where batches are unequal: the samples of all workers, as under ddp."""

import pytest
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.loggers import Logger
from torch.utils.data import DataLoader

from lightning_hetero import HeteroDDPStrategy
from tests.helpers import Points, Regressor, run_ranks, trainer_of

N = 30  # three batches of eight and a ragged one of six


class Notes(Logger):
    name, version = "notes", 0

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_hyperparams(self, *args, **kwargs):
        """Nothing is kept."""

    def log_metrics(self, metrics, step=None):
        self.rows.append(metrics)


def samples_of(batch):
    return len(batch[0])


def _counted(rank, settings):
    said = []
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(
        "lightning_hetero.callbacks._display.throughput.log.info", lambda text, *rest: said.append(text)
    )
    model = Regressor()
    model.flops_per_batch = 10
    monitor = ThroughputMonitor(samples_of, length_fn=lambda batch: 5 * len(batch[0]), window_size=2)
    notes, strategy = Notes(), HeteroDDPStrategy(**settings) if isinstance(settings, dict) else settings
    trainer = trainer_of(strategy, 2, callbacks=[monitor], logger=notes, max_epochs=1, log_every_n_steps=1)
    trainer.fit(model, DataLoader(Points(N), 4, shuffle=True))
    found = [(row["train/samples"], row["train/lengths"]) for row in notes.rows if "train/samples" in row]
    monkeypatch.undo()
    return (
        found,
        monitor.batch_size_fn is samples_of,
        [text for text in said if "ThroughputMonitor takes rank 0" in text],
    )


@pytest.mark.parametrize("settings", [{"local_batch_sizes": [6, 2]}, {"local_batch_sizes": [0, 8]}, "ddp"], ids=str)
def test_the_number_of_ranks_times_the_samples_is_those_of_all(settings):
    (found, put_back, said), (_, _, elsewhere) = run_ranks(_counted, 2, settings)
    assert put_back
    assert found == [(4, 20), (8, 40), (12, 60), (15, 75)]
    assert (len(said), elsewhere) == (settings != "ddp", [])
