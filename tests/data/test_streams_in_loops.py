"""Streams in loops of one's own, by Fabric and Accelerate: as under the Trainer, equal to one process."""

import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetero import BatchPlan
from tests.data.kinds import CHANGED, SPLITS, claimed, trained
from tests.helpers import Points
from tests.loops import flat, flat_grads, network, one_process
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


def prepared():
    model = network()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def steps(session, model, optimizer, backward, passes, *, adopt=None, save=None):
    """Two passes, of which the first may be the rest of one; adopts a plan behind the second step, and saves there."""
    seen, grads, number = [], [], 0
    for loader in passes:
        for x, y, index in loader:
            epoch, step = session.position[0], session.position[1] - 1
            seen.append((epoch, step, index[: session.engine.own_size].tolist()))
            backward(nn.functional.mse_loss(model(x), y))
            grads.append(flat_grads(model))
            optimizer.step()
            optimizer.zero_grad()
            if (epoch, step) == (0, 1) and adopt:
                adopt(BatchPlan(sum(CHANGED), CHANGED))
            number += 1
            if number == 4 and save:
                save()
    history = [(e.epoch, e.step, e.plan.local_batch_sizes) for e in session.engine.plan_history]
    return {"seen": seen, "weights": flat(model), "grads": np.stack(grads), "history": history}


def fabric(rank, loader, settings, plan=False, save=None, resume=None):
    from lightning.fabric import Fabric

    from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy

    one = Fabric(accelerator="cpu", devices=2, strategy=HeteroDDPStrategy(**settings))
    one.launch()
    model, optimizer = one.setup(*prepared())
    loader = one.setup_dataloaders(loader)
    state = {"model": model, "optimizer": optimizer, "loader": loader}
    if resume:
        one.load(resume, state)
    given = {"adopt": one.strategy.adopt if plan else None, "save": save and (lambda: one.save(save, state))}
    found = steps(one.strategy.session, model, optimizer, one.backward, [loader] * 2, **given)
    one.strategy.teardown()
    return found


def accelerate(rank, loader, settings, plan=False, save=None, resume=None, **config):
    from accelerate.utils import DataLoaderConfiguration

    from lightning_hetero.accelerate import HeteroAccelerator, HeteroPlugin

    layout = DataLoaderConfiguration(**config)
    one = HeteroAccelerator(cpu=True, hetero_plugin=HeteroPlugin(**settings), dataloader_config=layout)
    model, optimizer, loader = one.prepare(*prepared(), loader)
    passes = [loader] * 2
    if resume:
        one.load_state(resume)
        passes[0] = one.skip_first_batches(loader)
    given = {"adopt": one.adopt if plan else None, "save": save and (lambda: one.save_state(save))}
    found = steps(one.hetero_session, model, optimizer, one.backward, passes, **given)
    one.end_training()
    return found


def own_loop(rank, loader, settings, plan=False, save=None, resume=None):
    """A session, DDP and nothing else."""
    from torch.nn.parallel import DistributedDataParallel

    from lightning_hetero.comm import gradient_hook
    from lightning_hetero.config import HeteroConfig
    from lightning_hetero.data import SampleStream
    from lightning_hetero.engine import HeteroEngine
    from lightning_hetero.session import HeteroSession

    dist.init_process_group("gloo")
    shard = settings.pop("shard")
    engine = HeteroEngine(HeteroConfig(**settings), rank=rank, world_size=2, device=torch.device("cpu"))
    session, (model, optimizer) = HeteroSession(engine), prepared()
    model = DistributedDataParallel(model)
    model.register_comm_hook(engine.hook_state, gradient_hook)
    session.watch(model)
    batches = session.shard(SampleStream(loader, shard))

    def backward(loss):
        with engine.backward():
            engine.scale_loss(loss).backward()

    passes = (session.steps(lambda: iter(batches)) for _ in range(2))
    found = steps(session, model, optimizer, backward, passes, adopt=session.adopt if plan else None)
    session.close()
    return found


LOOPS = {"fabric": fabric, "accelerate": accelerate, "own loop": own_loop}


def _run(rank, loop, data, settings, given):
    return LOOPS[loop](rank, STREAMS[data](rank), settings, **given)


def run(loop, data, settings, **given):
    return run_ranks(_run, 2, loop, data, settings, given)


def check_equal(results):
    expected = one_process(results)
    for result in results:
        np.testing.assert_allclose(result["grads"], expected["grads"], rtol=0, atol=1e-12)
        np.testing.assert_allclose(result["weights"], expected["weights"], rtol=0, atol=1e-12)


@pytest.mark.parametrize("shard", ["mine", "whole"])
@pytest.mark.parametrize("loop", LOOPS)
def test_gradients_are_those_of_one_process_and_a_plan_changes_the_next_batches(loop, shard):
    results = run(loop, shard, {**SIZES, "shard": shard}, plan=True)
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
    whole = run(loop, shard, settings, save=place)
    rest = run(loop, shard, settings, resume=place)
    begun = [{"seen": r["seen"][:4]} for r in whole]
    for epoch in range(2):
        assert sorted(taken(begun, epoch) + taken(rest, epoch)) == EVERYTHING
    assert rest[0]["seen"][0][:2] == (0, 4)
    if shard != "claim":  # who claims which shard is a matter of time
        for before, after in zip(whole, rest, strict=True):
            assert after["seen"] == before["seen"][4:]
            np.testing.assert_allclose(after["weights"], before["weights"], rtol=0, atol=1e-12)


CASES = {
    "fabric takes each rank's": ("fabric", "mine", SIZES, {}, SPLITS[2]),
    "accelerate takes the whole": ("accelerate", "whole", SIZES, {}, SPLITS[2]),
    "nothing is dispatched": ("accelerate", "whole", SIZES, {"dispatch_batches": True}, SPLITS[2]),
    "a batch of all": ("accelerate", "whole", {"replan": "epoch"}, {"split_batches": True}, (2, 2)),
}


@pytest.mark.parametrize("case", CASES)
def test_defaults_are_those_of_the_front_ends(case):
    loop, data, settings, given, sizes = CASES[case]
    results = run(loop, data, settings, **given)
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
    errors = run_ranks(_run, 2, loop, data, settings, {}, expect_errors=True)
    assert [rank for rank, *_ in errors] == [0, 1]
    assert all(says in text for *_, text in errors)


def _even(rank, loop):
    """The loader of the script, and the batches that it gets."""
    if loop == "fabric":
        from lightning.fabric import Fabric

        from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy

        one = Fabric(accelerator="cpu", devices=2, strategy=HeteroDDPStrategy(policy="even"))
        one.launch()
        loader = one.setup_dataloaders(STREAMS["mine"](rank))
    else:
        from lightning_hetero.accelerate import HeteroAccelerator, HeteroPlugin

        one = HeteroAccelerator(cpu=True, hetero_plugin=HeteroPlugin(policy="even"))
        _, loader = one.prepare(prepared()[1], DataLoader(Numbered(range(16)), 4))
    return [index.tolist() for *_, index in loader]


def test_an_even_policy_leaves_a_stream_as_it_is():
    for rank, batches in enumerate(run_ranks(_even, 2, "fabric")):
        own = list(thirds(rank))
        assert batches == [own[i : i + 4] for i in range(0, len(own), 4)]
    for rank, batches in enumerate(run_ranks(_even, 2, "accelerate")):
        assert batches == [list(range(first, first + 4)) for first in (4 * rank, 8 + 4 * rank)]


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


@pytest.mark.parametrize(
    ("by_rank", "shard", "workers"), [(False, "claim", 0), (False, "claim", 2), (False, "whole", 0), (True, "mine", 2)]
)
def test_streams_of_datasets_have_each_sample_once(by_rank, shard, workers):
    results = run_ranks(_hugging_face, 2, by_rank, shard, workers)
    assert taken(results, 0) == taken(results, 1) == EVERYTHING
    assert sizes_of(results)[0] == (4, 1)
    check_equal(results)
