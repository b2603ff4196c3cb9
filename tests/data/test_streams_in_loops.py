"""Streams in loops of one's own: plans, resumes, defaults and refusals; and streams of ``datasets`` under the Trainer.

That gradients and weights are those of one process while no plan changes is in tests/one_process.
"""

import itertools

import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy
from tests.data.kinds import CHANGED, SPLITS, claimed, trained
from tests.helpers import Points
from tests.loops import FRONT_ENDS, one_process, plain_loop
from tests.ranks import run_ranks
from tests.streams import SAMPLES, Numbered, sizes_of, taken, thirds

EVERYTHING = list(range(SAMPLES))
SIZES = {"local_batch_sizes": SPLITS[2]}
STREAMS = {
    "mine": lambda rank: DataLoader(Numbered(thirds(rank)), 4),
    "whole": lambda rank: DataLoader(Numbered(EVERYTHING), 4),
    "claim": claimed,
    "fails": lambda rank: DataLoader(Numbered(thirds(rank), fails_at=14 if rank else None), 4),
    "map": lambda rank: DataLoader(Points(SAMPLES), 4),
}


def _run(rank, loop, data, settings, given, layout):
    if loop == "plain torch":
        rest = {name: value for name, value in settings.items() if name != "shard"}
        return plain_loop(rank, rest, 4, world_size=2, stream=(STREAMS[data], settings["shard"]), **given)
    if layout:
        from accelerate.utils import DataLoaderConfiguration

        given = {**given, "dataloader_config": DataLoaderConfiguration(**layout)}
    loader = lambda rank, batch_size, dataset, **_: STREAMS[data](rank)  # noqa: E731
    return FRONT_ENDS[loop](rank, settings, 4, world_size=2, loader=loader, **given)


def run(loop, data, settings, layout=None, **given):
    return run_ranks(_run, 2, loop, data, settings, given, layout)


def check_equal(results):
    expected = one_process(results)
    for result in results:
        np.testing.assert_allclose(result["grads"], expected["grads"], rtol=0, atol=1e-12)
        np.testing.assert_allclose(result["weights"], expected["weights"], rtol=0, atol=1e-12)


@pytest.mark.parametrize("shard", ["mine", "whole"])
@pytest.mark.parametrize("loop", ["fabric", "accelerate", "plain torch"])
def test_a_plan_changes_the_next_batches_and_not_the_result(loop, shard):
    results = run(loop, shard, {**SIZES, "shard": shard}, plans={(0, 1): CHANGED})
    assert taken(results, 0) == taken(results, 1) == EVERYTHING
    check_equal(results)
    _, first, sizes = results[0]["history"][-1]
    found = sizes_of(results)
    assert (sizes, found[first - 1], found[first]) == (CHANGED, SPLITS[2], CHANGED)
    assert first <= 2 + 8
    if shard == "whole":
        in_order = [i for step in zip(*(r["seen"] for r in results), strict=True) for *_, own in step for i in own]
        assert in_order == 2 * EVERYTHING


@pytest.mark.parametrize(
    ("loop", "shard"), [("fabric", "mine"), ("accelerate", "whole"), ("accelerate", "claim"), ("fabric", "claim")]
)
def test_training_is_resumed_where_it_was(loop, shard, tmp_path):
    settings, place = {**SIZES, "shard": shard}, str(tmp_path / "state")
    whole = run(loop, shard, settings, save={4: place})
    rest = run(loop, shard, settings, resume=place)
    begun = [{"seen": r["seen"][:4]} for r in whole]
    for epoch in range(2):
        assert sorted(taken(begun, epoch) + taken(rest, epoch)) == EVERYTHING
    assert rest[0]["seen"][0][:2] == (0, 4)
    if shard != "claim":  # who claims which shard is a matter of time
        for before, after in zip(whole, rest, strict=True):
            assert after["seen"] == before["seen"][4:]
            np.testing.assert_allclose(after["weights"], before["weights"], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("loop", "data", "settings", "layout", "sizes"),
    [
        ("fabric", "mine", SIZES, None, SPLITS[2]),
        ("accelerate", "whole", SIZES, None, SPLITS[2]),
        ("accelerate", "whole", SIZES, {"dispatch_batches": True}, SPLITS[2]),  # nothing is dispatched
        ("accelerate", "whole", {"replan": "epoch"}, {"split_batches": True}, (2, 2)),  # a batch is that of all ranks
    ],
    ids=["Fabric", "Accelerate", "dispatched", "split"],
)
def test_defaults_are_those_of_the_front_ends(loop, data, settings, layout, sizes):
    results = run(loop, data, settings, layout)
    assert taken(results) == EVERYTHING
    assert sizes_of(results)[0] == sizes


@pytest.mark.parametrize(
    ("data", "settings", "says"),
    [
        ("mine", {"max_total_batch_size": 64}, "stream"),
        ("fails", {**SIZES, "shard": "mine"}, "the archive ends here"),
        ("map", {"shard": "claim"}, "shard"),
    ],
)
@pytest.mark.parametrize("loop", ["fabric", "accelerate"])
def test_what_cannot_be_is_refused_on_every_rank(loop, data, settings, says):
    errors = run_ranks(_run, 2, loop, data, settings, {}, None, expect_errors=True)
    assert [rank for rank, *_ in errors] == [0, 1]
    assert all(says in text for *_, text in errors)


def _even(rank):
    """The batches that a script gets; it could not train on them, for ranks have unequal numbers of them."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy=HeteroDDPStrategy(policy="even"))
    fabric.launch()
    return [index.tolist() for *_, index in fabric.setup_dataloaders(STREAMS["mine"](rank))]


def test_an_even_policy_leaves_a_stream_as_it_is():
    for rank, batches in enumerate(run_ranks(_even, 2)):
        own = list(thirds(rank))
        assert batches == [own[i : i + 4] for i in range(0, len(own), 4)]


# streams of ``datasets``


def _example(numbers):
    points = Points(SAMPLES)
    for number in itertools.chain.from_iterable(numbers):
        yield {"x": points.x[number].tolist(), "y": points.y[number].tolist(), "index": number}


def _tensors(example):
    return {**example, **{name: torch.tensor(example[name], dtype=torch.float64) for name in "xy"}}


def hugging_face(by_rank, rank):
    datasets = pytest.importorskip("datasets")
    split = pytest.importorskip("datasets.distributed").split_dataset_by_node
    parts = [list(range(a, min(a + 10, SAMPLES))) for a in range(0, SAMPLES, 10)]
    stream = datasets.IterableDataset.from_generator(_example, gen_kwargs={"numbers": parts})
    stream = stream.shuffle(seed=3, buffer_size=5).map(_tensors)
    return split(stream, rank, 2) if by_rank else stream


def _hugging_face(rank, by_rank, shard, workers):
    loader = DataLoader(hugging_face(by_rank, rank), 2, num_workers=workers)
    return trained(rank, 2, loader, {"local_batch_sizes": (4, 1), "shard": shard})


@pytest.mark.parametrize(("by_rank", "shard", "workers"), [(False, "claim", 2), (False, "whole", 0), (True, "mine", 2)])
def test_streams_of_datasets_have_each_sample_once(by_rank, shard, workers):
    results = run_ranks(_hugging_face, 2, by_rank, shard, workers)
    assert taken(results, 0) == taken(results, 1) == EVERYTHING
    assert sizes_of(results)[0] == (4, 1)
    check_equal(results)
