"""One promise through every front end: the mathematics of one process, each sample once, and a run that goes on."""

import copy
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetero import BlockTopK
from tests.helpers import Points, fit, run_ranks
from tests.loops import (
    FRONT_ENDS,
    LOSS_SETTINGS,
    SAMPLES,
    every_sample_once,
    global_batches,
    one_process,
    replay,
)

EXACT = {"rtol": 1e-12, "atol": 1e-13}
every_front_end = pytest.mark.parametrize("front_end", FRONT_ENDS)


def _run(rank, front_end, settings, world_size, kwargs):
    return FRONT_ENDS[front_end](rank, settings, kwargs.pop("batch_size", 5), world_size=world_size, **kwargs)


def run(front_end, settings, world_size, **kwargs):
    return run_ranks(_run, world_size, front_end, settings, world_size, kwargs, env={"OMP_NUM_THREADS": "1"})


def check(results):
    every_sample_once(results)
    expected = replay(results, schedule=0)
    for result in results:
        np.testing.assert_allclose(result["weights"], expected, **EXACT)


@dataclass(frozen=True)
class Case:
    """A split, and what else must not change the mathematics of one process."""

    sizes: tuple[int, ...]
    accumulate: int = 1
    loss: str = "mean"
    clip: float | None = None

    def __str__(self):
        clipped = "" if self.clip is None else "-clipped"
        return f"{'/'.join(map(str, self.sizes))}-{self.loss}{clipped}-accumulate{self.accumulate}"

    @property
    def arguments(self):
        return {"accumulate": self.accumulate, "loss": self.loss, "clip": self.clip}


SPLITS = ((1, 3), (5, 0), (7, 2, 1), (30, 1, 1))
CASES = (
    *(Case(sizes, accumulate, loss) for sizes in SPLITS for accumulate in (1, 2, 3, 4) for loss in ("mean", "sum")),
    *(Case(sizes, 4 - i, "masked") for i, sizes in enumerate(SPLITS)),
    *(Case(sizes, 1 + i % 2, clip=0.05) for i, sizes in enumerate(SPLITS)),
)


def _trained(rank, front_end, cases):
    """All cases one after another in the same process group."""
    results = []
    for i, case in enumerate(cases):
        settings, n = {"local_batch_sizes": case.sizes, **LOSS_SETTINGS[case.loss]}, len(case.sizes)
        more = {**case.arguments, "another": i + 1 < len(cases)}
        results.append(FRONT_ENDS[front_end](rank, settings, sum(case.sizes) // n, world_size=n, **more))
    return results


@cache
def trained(front_end, world_size):
    """Every rank's results of all cases with so many workers, which run in one group; or the error, for all of them."""
    cases = [case for case in CASES if len(case.sizes) == world_size]
    try:
        ranks = run_ranks(_trained, world_size, front_end, cases, env={"OMP_NUM_THREADS": "1"})
    except Exception as error:  # noqa: BLE001 - raised by each case's own test
        return error
    return dict(zip(cases, zip(*ranks, strict=True), strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
@every_front_end
def test_weights_equal_one_process(front_end, case):
    """Two epochs with ragged last batches: each sample once, and the gradient of every step that of one process."""
    group = trained(front_end, len(case.sizes))
    if isinstance(group, Exception):
        raise group
    results, total = group[case], sum(case.sizes)
    every_sample_once(results)
    assert len(results[0]["seen"]) == 2 * -(-SAMPLES // total)
    for i, batch in enumerate(global_batches(results)):
        if len(batch) == total:
            assert tuple(len(r["seen"][i][2]) for r in results) == case.sizes
    expected = one_process(results, **case.arguments)
    for result in results:
        np.testing.assert_allclose(result["grads"], expected["grads"], **EXACT)
        np.testing.assert_allclose(result["weights"], expected["weights"], **EXACT)
    if case.clip is not None:
        assert max(expected["norms"]) > case.clip


STOCK = [case for case in CASES if case.loss == "mean"]


def _stock(rank):
    """Stock Lightning on one process, all cases one after another."""
    results = []
    for case in STOCK:
        settings = {"accumulate_grad_batches": case.accumulate, "gradient_clip_val": case.clip}
        done = fit(rank, "ddp", 1, sum(case.sizes), dataset=Points(SAMPLES), max_epochs=2, **settings)
        results.append({"weights": done["weights"], "grads": done["grads"]})
    return results


@cache
def stock():
    (results,) = run_ranks(_stock, 1, env={"OMP_NUM_THREADS": "1"})
    return dict(zip(STOCK, results, strict=True))


@pytest.mark.parametrize("case", STOCK, ids=str)
def test_weights_equal_stock_lightning(case):
    """With the total as its batch size and the same accumulation, in the order that it draws by itself."""
    group = trained("lightning", len(case.sizes))
    if isinstance(group, Exception):
        raise group
    for result in group[case]:
        for name, expected in stock()[case].items():
            np.testing.assert_allclose(result[name], expected, **EXACT)


@every_front_end
def test_plans_change_the_next_batches_and_not_the_result(front_end):
    results = run(
        front_end, {"replan": 1000, "hysteresis": 1.0}, 2, plans={(0, 0): (8, 2), (0, 3): (14, 7), (1, 1): (1, 20)}
    )
    check(results)
    history = results[0]["history"]
    assert [sizes for _, _, sizes in history] == [(5, 5), (8, 2), (14, 7), (1, 20)]
    assert history == results[1]["history"]
    full = 0
    for rank, result in enumerate(results):
        for i, (epoch, step, indices) in enumerate(result["seen"]):
            sizes = [sizes for e, s, sizes in history if (e, s) <= (epoch, step)][-1]
            if len(global_batches(results)[i]) == sum(sizes):  # not the ragged last batch
                assert len(indices) == sizes[rank]
                full += 1
    assert full > 12


@every_front_end
def test_shares_are_multiples_and_weights_those_of_one_process(front_end):
    """In each batch but the ragged last one of an epoch, where one worker takes the remainder."""
    settings = {"local_batch_multiple": 2, "min_local_batch_size": 1, "replan": 2}
    results = run(front_end, settings, 3, batch_size=10, accumulate=2, plans={(0, 0): (16, 8, 6), (1, 1): (4, 8, 18)})
    every_sample_once(results)
    for result in results:
        np.testing.assert_allclose(result["weights"], one_process(results, accumulate=2)["weights"], **EXACT)
    assert {(16, 8, 6), (4, 8, 18)} <= {sizes for _, _, sizes in results[0]["history"]}
    for i, batch in enumerate(global_batches(results)):
        odd = [len(r["seen"][i][2]) % 2 for r in results]
        assert sum(odd) == len(batch) % 2
    assert 13 in map(len, global_batches(results)), "a ragged one that shares out more than a remainder"


@every_front_end
def test_resume_goes_on_at_the_next_batch(front_end, tmp_path):
    """Saved after 10 steps, the second of the second epoch."""
    path, settings = str(tmp_path / "saved"), {"local_batch_sizes": (7, 3)}
    whole = run(front_end, settings, 2, epochs=3, save={10: path})
    rest = run(front_end, settings, 2, epochs=3, resume=path)
    for full, part in zip(whole, rest, strict=True):
        assert part["seen"] == full["seen"][10:]
        np.testing.assert_array_equal(part["weights"], full["weights"])


@every_front_end
def test_a_plan_of_a_checkpoint_that_is_no_multiple_is_replaced(front_end, tmp_path):
    path = str(tmp_path / "saved")
    whole = run(front_end, {"local_batch_sizes": (7, 3)}, 2, save={3: path})
    rest = run(front_end, {"local_batch_multiple": 2, "replan": 1000}, 2, resume=path)
    every_sample_once([{"seen": before["seen"][:3] + after["seen"]} for before, after in zip(whole, rest, strict=True)])
    first = [len(result["seen"][0][2]) for result in rest]
    assert sorted(first) == [4, 6]


@every_front_end
def test_another_number_of_workers_takes_each_sample_once(front_end, tmp_path):
    path = str(tmp_path / "saved")
    whole = run(front_end, {}, 2, save={3: path})
    rest = run(front_end, {}, 3, resume=path)
    every_sample_once([*({"seen": r["seen"][:3]} for r in whole), *rest])


SPARSE = {"local_batch_sizes": (7, 3), "compression": BlockTopK(density=0.3, block=8, warmup_steps=0)}


@every_front_end
def test_compression_acts_and_replicas_stay_the_same_bit_by_bit(front_end):
    first, second = run(front_end, SPARSE, 2)
    np.testing.assert_array_equal(first["weights"], second["weights"])
    dense, _ = run(front_end, {"local_batch_sizes": (7, 3)}, 2)
    assert np.abs(first["weights"] - dense["weights"]).max() > 1e-4


@every_front_end
def test_gradients_that_were_not_sent_yet_are_in_the_checkpoint(front_end, tmp_path):
    path = str(tmp_path / "saved")
    whole = run(front_end, SPARSE, 2, epochs=3, save={9: path})
    rest = run(front_end, SPARSE, 2, epochs=3, resume=path)
    for full, part in zip(whole, rest, strict=True):
        np.testing.assert_array_equal(part["weights"], full["weights"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"local_batch_sizes": (3, 1, 2)}, "local_batch_sizes"),
        ({"policy": "fastest"}, "policy='fastest' is unknown; allowed are"),
        ({"local_batch_multiple": 4}, "local_batch_multiple=4"),
        ({"local_batch_sizes": (3, 1), "policy": "static"}, "Give one"),
    ],
    ids=["length", "policy", "multiple", "contradiction"],
)
@every_front_end
def test_wrong_settings_are_errors_on_every_rank(front_end, settings, message):
    errors = run_ranks(_run, 2, front_end, settings, 2, {}, env={"OMP_NUM_THREADS": "1"}, expect_errors=True)
    assert [rank for rank, *_ in errors] == [0, 1]
    assert all(message in text for *_, text in errors)


class Branched(nn.Module):
    """With a branch that no rank uses in odd steps; its gradient is the largest."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.extra = nn.Linear(5, 1), nn.Linear(5, 8)

    def forward(self, x, step):
        out = self.net(x)
        return out if step % 2 else out + 10 * self.extra(x).sum(1, keepdim=True)

    def flat_grads(self):
        return torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in self.parameters()])


def _branch_left_out(rank, front_end):
    """Sums over steps of applied gradients and of this rank's own, at fixed weights, and what it has not sent."""
    compression = BlockTopK(density=0.2, block=1, value_dtype="float32", warmup_steps=0)
    settings = {"local_batch_sizes": (7, 3), "compression": compression}
    model, loader = Branched(), DataLoader(Points(70, dtype=torch.float32), 5, shuffle=True)
    alone = copy.deepcopy(model)
    if front_end == "fabric":
        from lightning.fabric import Fabric

        from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy

        strategy = HeteroDDPStrategy(**settings, find_unused_parameters=True)
        training = Fabric(accelerator="cpu", devices=2, strategy=strategy)
        training.launch()
        wrapped, loader = training.setup(model), training.setup_dataloaders(loader)
        engine = strategy.engine
    else:
        from accelerate import DistributedDataParallelKwargs

        from lightning_hetero.accelerate import HeteroAccelerator, HeteroPlugin

        handlers = [DistributedDataParallelKwargs(find_unused_parameters=True)]
        training = HeteroAccelerator(cpu=True, hetero_plugin=HeteroPlugin(**settings), kwargs_handlers=handlers)
        wrapped, loader = training.prepare(model, loader)
        engine = training.engine
    applied, local = 0.0, 0.0
    for step, (x, y, _) in enumerate(loader):
        model.zero_grad()
        alone.zero_grad()
        training.backward(nn.functional.mse_loss(wrapped(x, step), y))
        (nn.functional.mse_loss(alone(x, step), y) * len(x) / 10).backward()
        applied, local = applied + model.flat_grads(), local + alone.flat_grads()
    residuals = engine.compression.averager.residuals()
    left = torch.cat([residuals[name] for name, _ in model.named_parameters()])
    return applied.numpy(), local.numpy(), left.numpy()


@pytest.mark.parametrize("front_end", ["fabric", "accelerate"])
def test_a_branch_that_is_left_out_loses_nothing_with_find_unused_parameters(front_end):
    (applied, one, left), (same, other, rest) = run_ranks(_branch_left_out, 2, front_end)
    np.testing.assert_array_equal(applied, same)
    np.testing.assert_allclose(applied + left + rest, one + other, rtol=1e-4, atol=1e-3)
    assert np.abs(left).max() > 1.0
