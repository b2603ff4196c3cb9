"""``HeteroAccelerator``: the mathematics of one process, whatever the split, and the state of a run."""

import numpy as np
import pytest

from tests.helpers import run_ranks
from tests.loops import accelerate_loop, every_sample_once, global_batches, replay

EXACT = {"rtol": 1e-12, "atol": 1e-13}


def _train(rank, plugin, batch_size, kwargs):
    return accelerate_loop(rank, plugin, batch_size, **kwargs)


def run(plugin, world_size, batch_size=5, **kwargs):
    return run_ranks(_train, world_size, plugin, batch_size, kwargs, env={"OMP_NUM_THREADS": "1"})


def check(results, **kwargs):
    every_sample_once(results)
    expected = replay(results, schedule=len(results), **kwargs)
    for result in results:
        np.testing.assert_allclose(result["weights"], expected, **EXACT)


@pytest.mark.parametrize("workers", [0, 2])
def test_changing_plans_change_the_next_batch_and_not_the_result(workers):
    plans = {(0, 0): (8, 2), (1, 1): (1, 9)}
    results = run({"replan": 1000}, 2, plans=plans, workers=workers)
    check(results)
    history = results[0]["history"]
    assert [sizes for _, _, sizes in history] == [(5, 5), (8, 2), (1, 9)]
    for rank, result in enumerate(results):
        for epoch, step, indices in result["seen"]:
            holding = [sizes for e, s, sizes in history if (e, s) <= (epoch, step)][-1]
            if step < 6 or workers == 0:
                assert len(indices) in (holding[rank], *([] if step < 6 else range(10)))


def test_clipping_by_norm():
    results = run({"local_batch_sizes": (7, 2, 1)}, 3, clip=0.05)
    check(results, clip=0.05)
    assert results[0]["norms"] == results[1]["norms"]
    assert max(results[0]["norms"]) > 0.05


def test_bf16_is_close():
    results = run({"local_batch_sizes": (7, 3)}, 2, mixed_precision="bf16")
    np.testing.assert_allclose(results[0]["weights"], replay(results, schedule=2), rtol=0.05, atol=5e-3)
    np.testing.assert_array_equal(results[0]["weights"], results[1]["weights"])


@pytest.mark.parametrize("sizes", [(7, 3), (10, 0)], ids=str)
def test_gather_for_metrics_has_each_sample_once(sizes):
    results = run({"local_batch_sizes": sizes}, 2)
    for result in results:
        assert result["metrics"] == global_batches(results)


@pytest.mark.parametrize(("step", "workers"), [(3, 0), (7, 0), (7, 2), (9, 2)])
def test_resume_is_identical(tmp_path, step, workers):
    """7 steps an epoch: saved inside the first epoch, in its last step, and inside the second."""
    folder = str(tmp_path / "state")
    plugin, kwargs = {"replan": 1000}, {"plans": {(0, 0): (8, 2)}, "epochs": 3, "workers": workers}
    whole = run(plugin, 2, save={step: folder}, **kwargs)
    rest = run(plugin, 2, resume=folder, **kwargs)
    for full, part in zip(whole, rest, strict=True):
        assert part["seen"] == full["seen"][step:]
        np.testing.assert_array_equal(part["weights"], full["weights"])
        assert part["lr"] == full["lr"]
