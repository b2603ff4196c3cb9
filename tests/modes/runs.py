"""What the tests of several modes do with a run: save it, and compare its ranks."""

import lightning as L
import numpy as np


class Saves(L.Callback):
    """Saves behind these steps, in files of their numbers."""

    def __init__(self, folder, *steps):
        self.folder, self.steps = folder, steps

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step in self.steps:
            trainer.save_checkpoint(f"{self.folder}/{trainer.global_step}")


def alike(results, *names):
    """The results of rank 0, of which weights and these are those of the other ranks."""
    assert np.isfinite(results[0]["weights"]).all()
    for result in results[1:]:
        for name in ("weights", *names):
            np.testing.assert_array_equal(result[name], results[0][name], err_msg=name)
    return results[0]


def each(rank, train, cases):
    """Trainings one after another, by name; callbacks are given as what makes them."""
    found = {}
    for name, case in cases.items():
        try:
            found[name] = train(rank, **{**case, "callbacks": [make() for make in case.get("callbacks", ())]})
        except Exception as error:
            error.add_note(f"in the case {name!r}")
            raise
    return found


def by_name(ranks):
    """Results of all ranks by the name of the case."""
    return {name: [found[name] for found in ranks] for name in ranks[0]}
