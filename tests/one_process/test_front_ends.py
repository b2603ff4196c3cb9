"""One promise through every front end: gradients and weights of one process, each sample once, a run that goes on.

``FRONT_ENDS`` has a row for each front end, ``CASES`` one for each kind of split, loss, data and mode that is exact.
Every front end trains every case, two epochs in float64, and one process in plain torch repeats its global batches.
"""

from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest
from torch.utils.data import DataLoader

from lightning_hetero import BlockTopK
from tests import loops
from tests.data.kinds import Batched, Buckets
from tests.loops import LOSS_SETTINGS, SAMPLES, every_sample_once, global_batches, one_process
from tests.ranks import run_ranks
from tests.streams import Numbered

FRONT_ENDS = {**loops.FRONT_ENDS, "lightning, sharded": loops.sharded_loop, "plain torch": loops.plain_loop}
SAVING = [name for name in FRONT_ENDS if name != "plain torch"]
ENV = {"OMP_NUM_THREADS": "1"}


# kinds of data; under Lightning there are more in tests/data

BACKWARDS = list(range(SAMPLES))[::-1]


def own_order(rank, batch_size, dataset, **kwargs):
    return DataLoader(dataset, batch_size, sampler=BACKWARDS, **kwargs)


def own_batches(rank, batch_size, dataset, **kwargs):
    return DataLoader(dataset, batch_sampler=Buckets(), **kwargs)


def made_batches(rank, batch_size, dataset, **kwargs):
    return DataLoader(Batched(), batch_size=None, shuffle=True, **kwargs)


def loaded_by_workers(rank, batch_size, dataset, **kwargs):
    return DataLoader(dataset, batch_size, shuffle=True, **{**kwargs, "num_workers": 1})


def whole_stream(rank, batch_size, dataset, **kwargs):
    return DataLoader(Numbered(range(SAMPLES)), batch_size, **kwargs)


def own_stream(rank, batch_size, dataset, **kwargs):
    """Two thirds of the samples on rank 0."""
    return DataLoader(Numbered([i for i in range(SAMPLES) if (i % 3 == 2) == rank]), batch_size, **kwargs)


# what is exact


@dataclass(frozen=True)
class Case:
    """A training; ``tolerance`` is that of what is rounded on the way."""

    sizes: tuple[int, ...] | None = (7, 3)
    ranks: int = 2
    total: int = 10
    accumulate: int = 1
    loss: str = "mean"
    clip: float | None = None
    loader: object = None
    plans: dict = field(default_factory=dict)
    settings: dict = field(default_factory=dict)
    tolerance: float = 1e-12
    but: tuple[str, ...] = ()

    @property
    def replayed(self):
        return {"accumulate": self.accumulate, "loss": self.loss, "clip": self.clip}

    def train(self, front_end, rank, **kwargs):
        given = {**LOSS_SETTINGS[self.loss], **self.settings}
        if self.sizes is not None:
            given["local_batch_sizes"] = self.sizes
        more = {"loader": self.loader, "plans": self.plans} | (
            {} if self.accumulate == 1 else {"accumulate": self.accumulate}
        )
        more = {name: value for name, value in more.items() if value}
        return FRONT_ENDS[front_end](
            rank,
            given,
            self.total // self.ranks,
            world_size=self.ranks,
            loss=self.loss,
            clip=self.clip,
            **more,
            **kwargs,
        )


def split(*sizes, **kwargs):
    return Case(sizes, len(sizes), sum(sizes), **kwargs)


STILL = {"replan": 1000, "hysteresis": 1.0}
PLAIN, SHARDED = ("plain torch",), ("lightning, sharded",)
CASES = {
    "mean": split(1, 3),
    "a worker without samples": split(5, 0, loss="sum"),
    "three workers": split(7, 2, 1, loss="sum"),
    "accumulation": split(7, 3, accumulate=3, but=PLAIN),
    "accumulated sums": split(30, 1, 1, accumulate=4, loss="sum", but=PLAIN),
    "accumulated counts": split(7, 2, 1, accumulate=2, loss="masked", but=PLAIN),
    "counts": split(7, 3, loss="masked"),
    "clipping": split(7, 3, clip=0.05),
    "clipped windows": split(7, 2, 1, accumulate=2, clip=0.05, but=PLAIN),
    "plans that change": Case(None, plans={(0, 0): (8, 2), (0, 3): (14, 7), (1, 1): (1, 20)}, settings=STILL),
    "multiples": Case(
        None, 3, 30, accumulate=2, plans={(0, 0): (16, 8, 6), (1, 1): (4, 8, 18)}, but=PLAIN,
        settings={"local_batch_multiple": 2, "min_local_batch_size": 1, "replan": 2},
    ),
    "a sampler": Case(loader=own_order, but=PLAIN),
    "batches of a sampler": Case(loader=own_batches, but=PLAIN),
    "batches of a dataset": Case(loader=made_batches, but=PLAIN),
    "loader workers": Case(loader=loaded_by_workers, but=PLAIN),
    "a stream that is split": Case(loader=whole_stream, settings={"shard": "whole"}, but=PLAIN),
    "a stream of each": Case(None, loader=own_stream, settings={"shard": "mine"}, but=PLAIN),
    "clusters": split(3, 1, 4, 2, settings={"hierarchy": [[0, 2, 3], [1]]}, but=SHARDED + PLAIN),
    "delays that nothing asks for": split(
        7, 3, settings={**STILL, "staleness": 1}, but=("fabric", "accelerate") + SHARDED + PLAIN
    ),
    "all blocks": split(
        7, 3, settings={"compression": BlockTopK(density=1.0, value_dtype="float32")}, tolerance=1e-6,
        but=SHARDED + PLAIN,
    ),
}  # fmt: skip
ROWS = [(front_end, name) for front_end in FRONT_ENDS for name, case in CASES.items() if front_end not in case.but]


def _train(rank, front_end, names):
    """Cases one after another in the same process group."""
    results = []
    for i, name in enumerate(names):
        try:
            results.append(CASES[name].train(front_end, rank, another=i + 1 < len(names)))
        except Exception as error:
            error.add_note(f"in the case {name!r} of {front_end}")
            raise
    return results


@cache
def trained(front_end, ranks):
    """Every rank's results of all cases of so many workers; or the error, for all of them."""
    names = [name for row, name in ROWS if row == front_end and CASES[name].ranks == ranks]
    try:
        results = run_ranks(_train, ranks, front_end, names, env=ENV)
    except Exception as error:  # noqa: BLE001 - raised by each case's own test
        return error
    return dict(zip(names, zip(*results, strict=True), strict=True))


def results_of(front_end, name):
    group = trained(front_end, CASES[name].ranks)
    if isinstance(group, Exception):
        raise group
    return group[name]


def close(results, expected, tolerance):
    for result in results:
        for name in ("grads", "weights"):
            np.testing.assert_allclose(result[name], expected[name], rtol=tolerance, atol=tolerance / 10, err_msg=name)


@pytest.mark.parametrize(("front_end", "name"), ROWS)
def test_gradients_and_weights_equal_one_process(front_end, name):
    case, results = CASES[name], results_of(front_end, name)
    every_sample_once(results)
    expected = one_process(results, **case.replayed)
    close(results, expected, case.tolerance)
    assert case.clip is None or max(expected["norms"]) > case.clip
    history = results[0]["history"]
    assert all(result["history"] == history for result in results)
    batches = global_batches(results)
    for i, batch in enumerate(batches if case.loader in (None, own_order, loaded_by_workers) else ()):
        now = results[0]["seen"][i][:2]
        sizes = [sizes for epoch, step, sizes in history if (epoch, step) <= now][-1]
        if len(batch) == sum(sizes):  # not the ragged last one of an epoch
            assert tuple(len(result["seen"][i][2]) for result in results) == sizes
        elif "local_batch_multiple" in case.settings:  # one worker takes the remainder
            assert sum(len(result["seen"][i][2]) % 2 for result in results) == len(batch) % 2
    assert {*case.plans.values()} <= {sizes for _, _, sizes in history}
    if not case.plans and case.loader is None:
        assert len(batches) == 2 * -(-SAMPLES // case.total)
    if front_end == "plain torch" and not case.plans:  # which hold no sync round for a thousand steps
        for result in results:
            assert {name.partition("/")[0] for metrics in result["metrics"] for name in metrics} == {"hetero"}
    if case.loader is own_order:
        assert sum(batches, []) == 2 * BACKWARDS


# a run that goes on

SPARSE = {"compression": BlockTopK(density=0.3, block=8, warmup_steps=0)}


def _saved(rank, front_end, folder):
    """A run that is saved in its second epoch, and the one that goes on; the same with gradients that are owed."""
    train, split, found = FRONT_ENDS[front_end], {"local_batch_sizes": (7, 3)}, {}
    kinds = {"dense": split} | ({} if "sharded" in front_end else {"sparse": {**split, **SPARSE}})
    for name, settings in kinds.items():
        saves = {steps: f"{folder}/{name}{steps}" for steps in (3, 10)}
        found[name] = train(rank, settings, 5, world_size=2, epochs=3, save=saves, another=True)
        found[f"{name}, later"] = train(rank, settings, 5, world_size=2, epochs=3, resume=saves[10], another=True)
    even = {"local_batch_multiple": 2, "replan": 1000}
    found["even"] = train(rank, even, 5, world_size=2, resume=f"{folder}/dense3")
    return found


def _more(rank, front_end, folder):
    return FRONT_ENDS[front_end](rank, {}, 5, world_size=3, resume=f"{folder}/dense3")


@pytest.mark.parametrize("front_end", SAVING)
def test_a_saved_run_goes_on_at_the_next_batch(front_end, tmp_path):
    ranks = run_ranks(_saved, 2, front_end, str(tmp_path), env=ENV)
    for found in ranks:
        for name in {"dense", "sparse"} & set(found):
            assert found[f"{name}, later"]["seen"] == found[name]["seen"][10:]
            np.testing.assert_array_equal(found[f"{name}, later"]["weights"], found[name]["weights"])
        if "sparse" in found:
            np.testing.assert_array_equal(found["sparse"]["weights"], ranks[0]["sparse"]["weights"])
            assert np.abs(found["sparse"]["weights"] - found["dense"]["weights"]).max() > 1e-4, "nothing was compressed"
    before = [{"seen": found["dense"]["seen"][:3]} for found in ranks]
    even = [found["even"] for found in ranks]
    every_sample_once([*before, *even])
    assert sorted(len(result["seen"][0][2]) for result in even) == [4, 6], "the plan of the checkpoint is no multiple"
    every_sample_once([*before, *run_ranks(_more, 3, front_end, str(tmp_path), env=ENV)])


WRONG = {
    "local_batch_sizes": {"local_batch_sizes": (3, 1, 2)},
    "policy": {"policy": "fastest"},
    "local_batch_multiple": {"local_batch_multiple": 4},
    "local_batch_sizes.*policy|policy.*local_batch_sizes": {"local_batch_sizes": (3, 1), "policy": "static"},
}


def _wrong(rank, front_end):
    for match, settings in WRONG.items():
        with pytest.raises(ValueError, match=match):
            FRONT_ENDS[front_end](rank, settings, 5, world_size=2)
    return True


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_wrong_settings_are_errors_that_name_them_on_every_rank(front_end):
    assert run_ranks(_wrong, 2, front_end, env=ENV) == [True, True]
