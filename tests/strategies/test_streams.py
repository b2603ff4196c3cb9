"""Streams through every front end: equal to one process, each sample once, plans that change, errors, resumption."""

import functools
import itertools
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetero import BatchPlan, HeteroDDPStrategy
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.perf_model import PerfModelPlanner
from tests.helpers import Points, Regressor, collected, run_ranks, trainer_of
from tests.loops import flat, flat_grads, network, one_process
from tests.streams import SAMPLES, Batches, Loader, Numbered, Sharded, Sized, sizes_of, taken, thirds

SPLIT = (5, 3)
EVERYTHING = list(range(SAMPLES))


class Planned(Regressor):
    """Adopts plans and saves behind given steps; knows batches that are dicts."""

    def __init__(self, plans=None, save=None):
        super().__init__()
        self.net = network()
        self.plans, self.save, self.steps, self.checked = plans or {}, save or {}, 0, []

    def training_step(self, batch, batch_idx):
        if isinstance(batch, dict):
            batch = batch["x"], batch["y"], batch["index"]
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.steps += 1
        sizes = self.plans.get((self.trainer.current_epoch, batch_idx))
        if sizes is not None:
            self.trainer.strategy.adopt(BatchPlan(sum(sizes), sizes))
        if self.steps in self.save:
            self.trainer.save_checkpoint(self.save[self.steps])


class Checked(Planned):
    def validation_step(self, batch, batch_idx):
        self.checked.append((self.trainer.current_epoch, self.trainer.global_step))


def lightning(rank, data, *, ranks=2, batch_size=4, workers=0, resume=None, plans=None, save=None, val=False, **given):
    settings, loader = given.pop("settings", {"local_batch_sizes": SPLIT}), given.pop("loader", {})
    model = (Checked if val else Planned)(plans, save)
    given.setdefault("max_epochs", 1)
    trainer = trainer_of(HeteroDDPStrategy(**settings), ranks, **given)
    fitted = data if isinstance(data, Loader) else DataLoader(data, batch_size, num_workers=workers, **loader)
    validated = DataLoader(Sized(range(4)), 4) if val else None
    trainer.fit(model, fitted, validated, ckpt_path=resume)
    history = [(e.epoch, e.step, e.plan.local_batch_sizes) for e in trainer.strategy.plan_history]
    grads = np.stack([g.numpy() for g in model.grads])
    return {
        "seen": model.seen,
        "weights": flat(model.net),
        "grads": grads,
        "history": history,
        "steps": trainer.global_step,
        "checked": model.checked,
    }


def fabric(rank, data, *, batch_size=4, workers=0, plans=None, settings=None, save=None, resume=None, max_epochs=1):
    from lightning.fabric import Fabric

    from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy as Strategy

    one = Fabric(accelerator="cpu", devices=2, strategy=Strategy(**settings or {"local_batch_sizes": SPLIT}))
    one.launch()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = one.setup(model, optimizer)
    loader = one.setup_dataloaders(DataLoader(data, batch_size, num_workers=workers))
    session, state = one.strategy.session, {"model": model, "optimizer": optimizer, "loader": loader, "epoch": 0}
    if resume is not None:
        one.load(resume, state)
    seen, grads = [], []
    for epoch in range(state["epoch"], max_epochs):
        for x, y, index in loader:
            step = session.position[1] - 1
            seen.append((epoch, step, index[: session.engine.own_size].tolist()))
            one.backward(nn.functional.mse_loss(model(x), y))
            grads.append(flat_grads(model))
            optimizer.step()
            optimizer.zero_grad()
            if plans and (epoch, step) in plans:
                one.strategy.adopt(BatchPlan(sum(plans[epoch, step]), plans[epoch, step]))
            if save and len(seen) in save:
                one.save(save[len(seen)], {**state, "epoch": epoch})
    history = [(e.epoch, e.step, e.plan.local_batch_sizes) for e in one.strategy.plan_history]
    one.strategy.teardown()
    return {"seen": seen, "weights": flat(model), "grads": np.stack(grads), "history": history}


def accelerate(
    rank, data, *, batch_size=4, workers=0, plans=None, settings=None, save=None, resume=None, max_epochs=1, **config
):
    from accelerate.utils import DataLoaderConfiguration

    from lightning_hetero.accelerate import HeteroAccelerator, HeteroPlugin

    plugin = HeteroPlugin(**settings or {"local_batch_sizes": SPLIT})
    one = HeteroAccelerator(cpu=True, hetero_plugin=plugin, dataloader_config=DataLoaderConfiguration(**config))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, loader = one.prepare(model, optimizer, DataLoader(data, batch_size, num_workers=workers))
    session, seen, grads, first, skipped = one.hetero_session, [], [], 0, None
    if resume is not None:
        one.load_state(resume)
        first, skipped = session.position[0], one.skip_first_batches(loader)
    for epoch in range(first, max_epochs):
        for x, y, index in loader if skipped is None else skipped:
            step = session.position[1] - 1
            seen.append((epoch, step, index[: session.engine.own_size].tolist()))
            one.backward(nn.functional.mse_loss(model(x), y))
            grads.append(flat_grads(model))
            optimizer.step()
            optimizer.zero_grad()
            if plans and (epoch, step) in plans:
                one.adopt(BatchPlan(sum(plans[epoch, step]), plans[epoch, step]))
            if save and len(seen) in save:
                one.save_state(save[len(seen)])
        skipped = None
    history = [(e.epoch, e.step, e.plan.local_batch_sizes) for e in one.plan_history]
    one.end_training()
    return {"seen": seen, "weights": flat(model), "grads": np.stack(grads), "history": history}


FRONT_ENDS = {"lightning": lightning, "fabric": fabric, "accelerate": accelerate}


def _run(rank, front_end, data, kwargs):
    return FRONT_ENDS[front_end](rank, data(rank), **kwargs)


def run(front_end, data, **kwargs):
    return run_ranks(_run, 2, front_end, data, kwargs)


def same(rank):
    return Numbered(range(SAMPLES))


def own(rank):
    return Numbered(thirds(rank))


def check_equal(results):
    """Gradients and weights of the union of what ranks drew, in one process."""
    expected = one_process(results)
    for result in results:
        np.testing.assert_allclose(result["grads"], expected["grads"], rtol=0, atol=1e-12)
        np.testing.assert_allclose(result["weights"], expected["weights"], rtol=0, atol=1e-12)


@pytest.mark.parametrize("shard", ["mine", "whole"])
@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_gradients_are_those_of_one_process_and_a_plan_changes_the_next_batches(front_end, shard):
    settings = {"local_batch_sizes": SPLIT, "shard": shard}
    results = run(front_end, own if shard == "mine" else same, settings=settings, max_epochs=2, plans={(0, 1): (2, 6)})
    for epoch in range(2):
        assert taken(results, epoch) == EVERYTHING
    if shard == "whole":
        flat_order = [sum((r["seen"][i][2] for r in results), []) for i in range(len(results[0]["seen"]))]
        assert sum(flat_order, []) == 2 * EVERYTHING
    check_equal(results)
    (_, first, sizes) = results[0]["history"][-1]
    steps = sizes_of(results)
    assert (sizes, steps[first - 1], steps[first]) == ((2, 6), SPLIT, (2, 6))
    assert first <= (2 if shard == "mine" else 2) + 8


@pytest.mark.parametrize("shard", ["mine", "whole"])
def test_shares_of_streams_are_multiples(shard):
    """But for the remainder of a stream; others take the share of one that has ended."""
    settings = {"local_batch_sizes": (6, 2), "local_batch_multiple": 2, "shard": shard}
    results = run("lightning", own if shard == "mine" else same, settings=settings, plans={(0, 1): (2, 6)})
    assert taken(results) == EVERYTHING
    check_equal(results)
    steps = sizes_of(results)
    assert {(6, 2), (2, 6)} < set(steps)
    odd = [(step, rank) for step, sizes in enumerate(steps) for rank, size in enumerate(sizes) if size % 2]
    last = max(step for step, sizes in enumerate(steps) if sizes[0])  # of the odd stream of rank 0
    assert odd == [(last, 0) if shard == "mine" else (len(steps) - 1, 1)]


class Longer(Numbered):
    """A stream that has more samples in its second epoch."""

    def __init__(self, rank):
        super().__init__(thirds(rank))
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        yield from (self.points[i] for i in self.indices[: len(self.indices) if self.passes > 1 else 12])


@pytest.mark.parametrize("shard", ["mine", "whole"])
def test_a_plan_may_change_where_the_end_of_a_stream_without_a_length_is_near(shard):
    """And the next pass may be longer."""
    plans = {(0, step): (2, 6) if step % 2 else (5, 3) for step in range(10)}
    settings = {"local_batch_sizes": SPLIT, "shard": shard}
    data = same if shard == "whole" else Longer
    results = run("lightning", data, settings=settings, max_epochs=2, plans=plans)
    assert taken(results, 1) == EVERYTHING
    assert len(taken(results, 0)) == (73 if shard == "whole" else 24)
    check_equal(results)


def test_defaults_are_those_of_the_front_ends():
    for front_end, data in (("lightning", own), ("fabric", own), ("accelerate", same)):
        results = run(front_end, data)
        assert taken(results) == EVERYTHING
        assert sizes_of(results)[0] == SPLIT


def test_accelerate_dispatches_no_stream_that_is_split():
    results = run("accelerate", same, dispatch_batches=True, workers=2)
    assert taken(results) == EVERYTHING
    assert sizes_of(results)[:9] == [SPLIT] * 9


def test_split_batches_makes_the_batch_size_the_total():
    results = run("accelerate", same, split_batches=True, batch_size=8, settings={"replan": "epoch"})
    assert sizes_of(results)[0] == (4, 4)
    assert taken(results) == EVERYTHING


def _learned(rank, front_end, shard):
    """Rank 1 takes three times as long for a sample."""
    decide = PerfModelPlanner.decide

    def told(self, observations, current, context):
        sizes = np.tile(np.array(current.local_batch_sizes, dtype=float), (8, 1))
        seconds, zeros = sizes * np.array([1.0, 3.0]), np.zeros_like(sizes)
        step = np.repeat(seconds.max(axis=1, keepdims=True), 2, axis=1)
        return decide(self, StepObservations(sizes, zeros, seconds, seconds, zeros, zeros, step), current, context)

    PerfModelPlanner.decide = told
    data = own(rank) if shard == "mine" else same(rank)
    settings = {"replan": 1, "shard": shard}
    return FRONT_ENDS[front_end](rank, data, batch_size=2, settings=settings, **({"max_epochs": 1}))


@pytest.mark.parametrize(
    ("front_end", "shard"), [("lightning", "mine"), ("lightning", "whole"), ("fabric", "mine"), ("accelerate", "whole")]
)
def test_what_is_learned_changes_the_next_batches(front_end, shard):
    results = run_ranks(_learned, 2, front_end, shard)
    assert taken(results) == EVERYTHING
    steps = sizes_of(results)
    (_, first, sizes) = results[0]["history"][1]
    assert (steps[0], sizes, steps[first]) == ((2, 2), (3, 1), (3, 1))


def _lightning_cases(rank, folder):
    """Loaders and settings of the Trainer, one training after another."""
    found = {}
    mine = functools.partial(lightning, rank)
    found["persistent"] = mine(own(rank), workers=2, max_epochs=2, loader={"persistent_workers": True})
    found["rows"] = mine(Batches(thirds(rank)), batch_size=None)
    found["loader of batches"] = mine(Loader(thirds(rank)))
    found["accumulated"] = mine(own(rank), accumulate_grad_batches=2)
    found["max_steps"] = mine(own(rank), max_epochs=-1, max_steps=13)
    found["limited"] = mine(own(rank), limit_train_batches=3, max_epochs=2)
    found["checked"] = mine(own(rank), val=True, val_check_interval=4)
    found["checked at the end"] = mine(own(rank), val=True)
    found["sized"] = mine(Sized(thirds(rank)), val=True, val_check_interval=0.5)
    found["one that is empty"] = mine(Numbered(EVERYTHING if rank else []))
    found["even"] = mine(own(rank), settings={"policy": "even"}, limit_train_batches=5)
    lines = collected()
    mine(same(rank), limit_train_batches=2)
    found["told"] = [line for line in lines if "begin with the same samples" in line]
    return found


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
def test_lightning_runs_streams_as_users_have_them(tmp_path):
    found = run_ranks(_lightning_cases, 2, str(tmp_path))
    told = [one.pop("told") for one in found]
    assert [len(lines) for lines in told] == [1, 0]
    cases = {name: [one[name] for one in found] for name in found[0]}
    assert taken(cases["persistent"], 0) == taken(cases["persistent"], 1) == EVERYTHING
    for name in ("rows", "loader of batches", "checked", "checked at the end", "sized", "accumulated"):
        assert taken(cases[name]) == EVERYTHING, name
        assert sizes_of(cases[name])[:6] == [SPLIT] * 6
    check_equal(cases["rows"])
    assert cases["accumulated"][0]["steps"] == 5
    assert [one["steps"] for one in cases["max_steps"]] == [13, 13]
    assert taken(cases["max_steps"]) == EVERYTHING
    assert sizes_of(cases["limited"], 0) == sizes_of(cases["limited"], 1) == [SPLIT] * 3
    assert [step for _, step in cases["checked"][0]["checked"]][1:] == [4, 8]
    assert [step for _, step in cases["checked at the end"][0]["checked"]][1:] == [10]
    assert [step for _, step in cases["sized"][0]["checked"]][1:] == [5, 10]
    assert taken(cases["one that is empty"]) == EVERYTHING
    assert [len(indices) for _, _, indices in cases["one that is empty"][0]["seen"]] == [0] * 10
    assert sizes_of(cases["even"]) == [(4, 4)] * 5
    assert cases["even"][0]["history"] == []


def _fails(rank, front_end):
    data = Numbered(thirds(rank), fails_at=14 if rank else None)
    return FRONT_ENDS[front_end](rank, data, settings={"local_batch_sizes": SPLIT, "shard": "mine"})


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_an_error_of_one_stream_is_raised_on_every_rank(front_end):
    errors = run_ranks(_fails, 2, front_end, expect_errors=True)
    assert [(rank, kind) for rank, kind, _ in errors] == [(0, "RuntimeError"), (1, "OSError")]
    assert "rank 1: OSError: the archive ends here" in errors[0][2]


def _moves(rank, front_end):
    if front_end == "lightning":
        from lightning_hetero import AdaptiveBatchCallback

        return lightning(rank, own(rank), settings={}, callbacks=[AdaptiveBatchCallback(max_total_batch_size=64)])
    return FRONT_ENDS[front_end](rank, own(rank), settings={"max_total_batch_size": 64})


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_a_total_that_moves_is_refused(front_end):
    errors = run_ranks(_moves, 2, front_end, expect_errors=True)
    assert [rank for rank, *_ in errors] == [0, 1]
    assert all("the length of a stream is not known" in text for *_, text in errors)


def _claims_need_shards(rank):
    return lightning(rank, own(rank), settings={"shard": "claim"})


def test_shards_are_claimed_of_datasets_that_have_some():
    errors = run_ranks(_claims_need_shards, 2, expect_errors=True)
    assert all("shard='claim' is for a DataLoader" in text for *_, text in errors)
    assert len(errors) == 2


def _claims_of_map_style_data(rank, front_end):
    return FRONT_ENDS[front_end](rank, Points(SAMPLES), settings={"shard": "claim"})


@pytest.mark.parametrize("front_end", ["lightning", "accelerate"])
def test_a_map_style_dataset_has_no_shards_to_claim(front_end):
    errors = run_ranks(_claims_of_map_style_data, 2, front_end, expect_errors=True)
    assert len(errors) == 2
    assert all("Leave shard out" in text for *_, text in errors)


LENGTHS = [9, 0, 4, 17, 8, 1, 20, 14]


def sharded(rank):
    return Sharded(LENGTHS)


def examples(numbers):
    points = Numbered([]).points
    for number in numbers:
        yield {"x": points.x[number].tolist(), "y": points.y[number].tolist(), "index": number}


def hugging_face(rank):
    datasets = pytest.importorskip("datasets")
    ends = list(itertools.accumulate(LENGTHS, initial=0))
    parts = [[n] for n in range(SAMPLES)]
    stream = datasets.IterableDataset.from_generator(
        lambda numbers: examples(itertools.chain.from_iterable(numbers)),
        gen_kwargs={"numbers": [list(itertools.chain(*parts[a:b])) for a, b in itertools.pairwise(ends) if a < b]},
    )
    return stream.shuffle(seed=3, buffer_size=5).map(_tensors)


def _tensors(example):
    return {**example, **{name: torch.tensor(example[name], dtype=torch.float64) for name in "xy"}}


def split_by_node(rank):
    from datasets.distributed import split_dataset_by_node

    return split_dataset_by_node(hugging_face(rank), rank, 2)


@pytest.mark.parametrize(
    ("data", "shard", "workers"),
    [
        (sharded, "claim", 0),
        (sharded, "claim", 2),
        (hugging_face, "claim", 0),
        (hugging_face, "claim", 2),
        (hugging_face, "whole", 0),
        (split_by_node, "mine", 0),
        (split_by_node, "mine", 2),
    ],
)
def test_datasets_with_shards(data, shard, workers):
    settings = {"local_batch_sizes": (4, 1), "shard": shard}
    results = run("lightning", data, batch_size=2, workers=workers, settings=settings, max_epochs=2)
    for epoch in range(2):
        assert taken(results, epoch) == EVERYTHING
    assert sizes_of(results)[0] == (4, 1)
    check_equal(results)


@pytest.mark.parametrize(
    ("front_end", "shard", "stop"),
    [
        ("lightning", "mine", 4),
        ("lightning", "whole", 4),
        ("lightning", "claim", 4),
        ("lightning", "mine", 10),
        ("fabric", "mine", 4),
        ("accelerate", "whole", 4),
        ("accelerate", "claim", 4),
    ],
)
def test_training_is_resumed_where_it_was(front_end, shard, stop, tmp_path):
    data = {"mine": own, "whole": same, "claim": sharded}[shard]
    settings = {"local_batch_sizes": SPLIT, "shard": shard}
    place = str(tmp_path / "state")
    whole = run(front_end, data, settings=settings, max_epochs=2, save={stop: place})
    rest = run(front_end, data, settings=settings, max_epochs=2, resume=place)
    begun = whole[0]["seen"][:stop]
    first = [{"seen": r["seen"][:stop]} for r in whole]
    for epoch in range(2):
        both = sorted(taken(first, epoch) + taken(rest, epoch))
        assert both == EVERYTHING
    assert rest[0]["seen"][0][:2] == ((0, stop) if stop < 10 else (1, 0))
    assert len(begun) == stop
    if shard != "claim":  # who claims which shard is a matter of time
        for before, after in zip(whole, rest, strict=True):
            assert after["seen"] == before["seen"][stop:]
            np.testing.assert_allclose(after["weights"], before["weights"], rtol=0, atol=1e-12)


def test_another_number_of_ranks_resumes_what_it_can(tmp_path):
    for shard, data in (("whole", same), ("claim", sharded), ("mine", own)):
        place, settings = str(tmp_path / shard), {"local_batch_sizes": SPLIT, "shard": shard}
        before = run("lightning", data, settings=settings, save={4: place}, max_steps=4)
        settings = {"local_batch_sizes": (4, 2, 2), "shard": shard}
        if shard == "mine":
            given = {"settings": settings, "resume": place, "ranks": 3}
            errors = run_ranks(_run, 3, "lightning", data, given, expect_errors=True)
            assert len(errors) == 3
            assert all("saved inside an epoch by 2 ranks" in text for *_, text in errors)
            continue
        after = run_ranks(_run, 3, "lightning", data, {"settings": settings, "resume": place, "ranks": 3})
        assert sorted(taken(before) + taken(after)) == EVERYTHING
        assert re.fullmatch("4", str(after[0]["seen"][0][1]))


def _plain(rank, shard):
    """A session, DDP and nothing else; the second pass is left early, the third one is whole."""
    from torch.nn.parallel import DistributedDataParallel

    from lightning_hetero.comm import gradient_hook
    from lightning_hetero.config import HeteroConfig
    from lightning_hetero.data.streams.source import SampleStream
    from lightning_hetero.engine import HeteroEngine
    from lightning_hetero.session import HeteroSession

    torch.distributed.init_process_group("gloo")
    config = HeteroConfig(local_batch_sizes=SPLIT)
    engine = HeteroEngine(config, rank=rank, world_size=2, device=torch.device("cpu"))
    session, model = HeteroSession(engine), DistributedDataParallel(network())
    model.register_comm_hook(engine.hook_state, gradient_hook)
    session.watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = own(rank) if shard == "mine" else same(rank)
    batches = session.shard(SampleStream(DataLoader(data, 4), shard))
    seen, grads = [], []
    for steps in (None, 2, None):
        for step, (x, y, index) in enumerate(itertools.islice(session.steps(lambda: iter(batches)), steps)):
            seen.append((session.position[0], step, index[: engine.own_size].tolist()))
            loss = engine.scale_loss(nn.functional.mse_loss(model(x), y))
            with engine.backward():
                loss.backward()
            grads.append(flat_grads(model))
            optimizer.step()
            optimizer.zero_grad()
    session.close()
    return {"seen": seen, "weights": flat(model), "grads": np.stack(grads)}


@pytest.mark.parametrize("shard", ["mine", "whole"])
def test_a_loop_of_one_s_own(shard):
    results = run_ranks(_plain, 2, shard)
    assert taken(results, 0) == taken(results, 2) == EVERYTHING
    assert sizes_of(results, 1) == [SPLIT] * 2
    check_equal(results)


def _even_in_fabric(rank):
    from lightning.fabric import Fabric

    from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy as Strategy

    fabric = Fabric(accelerator="cpu", devices=2, strategy=Strategy(policy="even"))
    fabric.launch()
    loader = fabric.setup_dataloaders(DataLoader(own(rank), 4))
    return [index.tolist() for *_, index in loader], fabric.strategy.engine.sampler


def _even_in_accelerate(rank):
    from lightning_hetero.accelerate import HeteroAccelerator, HeteroPlugin

    accelerator = HeteroAccelerator(cpu=True, hetero_plugin=HeteroPlugin(policy="even"))
    optimizer = torch.optim.SGD(network().parameters(), lr=0.1)
    _, loader = accelerator.prepare(optimizer, DataLoader(Numbered(range(16)), 4))
    return [index.tolist() for *_, index in loader], accelerator.engine.sampler


def test_an_even_policy_leaves_a_stream_as_it_is():
    for rank, (batches, sampler) in enumerate(run_ranks(_even_in_fabric, 2)):
        expected = list(thirds(rank))
        assert batches == [expected[i : i + 4] for i in range(0, len(expected), 4)]
        assert sampler is None
    for rank, (batches, sampler) in enumerate(run_ranks(_even_in_accelerate, 2)):
        assert batches == [list(range(first, first + 4)) for first in (4 * rank, 8 + 4 * rank)]
        assert sampler is None
