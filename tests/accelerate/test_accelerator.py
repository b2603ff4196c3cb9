"""``HeteroAccelerator``: the mathematics of one process, whatever the split, and the state of a run."""

import copy
import io
import logging
import os
import pickle
from collections import UserDict, namedtuple
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.tracking import GeneralTracker
from accelerate.utils import DataLoaderConfiguration, InitProcessGroupKwargs
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_hetero.accelerate import HeteroAccelerator, HeteroPlugin
from lightning_hetero.comm.agreement.group_lifetime import free_group_last
from lightning_hetero.session import SessionBatches
from tests.helpers import Points, run_ranks
from tests.loops import (
    SAMPLES,
    accelerate_loop,
    every_sample_once,
    flat,
    flat_grads,
    global_batches,
    network,
    replay,
)

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
    results = run({"replan": 1000, "hysteresis": 1.0}, 2, plans=plans, workers=workers)
    check(results)
    history = results[0]["history"]
    assert [sizes for _, _, sizes in history] == [(5, 5), (8, 2), (1, 9)]
    for rank, result in enumerate(results):
        for epoch, step, indices in result["seen"]:
            holding = [sizes for e, s, sizes in history if (e, s) <= (epoch, step)][-1]
            if step < 7 or workers == 0:
                assert len(indices) in (holding[rank], *([] if step < 7 else range(10)))


def test_bf16_is_close():
    results = run({"local_batch_sizes": (7, 3)}, 2, mixed_precision="bf16")
    np.testing.assert_allclose(results[0]["weights"], replay(results, schedule=2), rtol=0.05, atol=5e-3)
    np.testing.assert_array_equal(results[0]["weights"], results[1]["weights"])


@pytest.mark.parametrize("sizes", [(7, 3), (10, 0)], ids=str)
def test_gather_for_metrics_has_each_sample_once(sizes):
    results = run({"local_batch_sizes": sizes}, 2)
    for result in results:
        assert result["metrics"] == global_batches(results)


@pytest.mark.parametrize(
    ("step", "workers", "seedable"), [(3, 0, True), (8, 0, False), (8, 2, True), (10, 2, False), (10, 0, True)]
)
def test_resume_is_identical(tmp_path, step, workers, seedable):
    """8 steps an epoch: saved inside the first epoch, in its last step, and inside the second."""
    folder = str(tmp_path / "state")
    plugin, kwargs = {"replan": 1000, "hysteresis": 1.0}, {"plans": {(0, 0): (8, 2)}, "epochs": 3, "workers": workers}
    kwargs["dataloader_config"] = DataLoaderConfiguration(use_seedable_sampler=seedable)
    whole = run(plugin, 2, save={step: folder}, **kwargs)
    rest = run(plugin, 2, resume=folder, **kwargs)
    for full, part in zip(whole, rest, strict=True):
        assert part["seen"] == full["seen"][step:]
        np.testing.assert_array_equal(part["weights"], full["weights"])
        assert part["lr"] == full["lr"]


def _accelerator(**kwargs):
    from lightning_hetero.accelerate import HeteroAccelerator, HeteroPlugin

    plugin = HeteroPlugin(**kwargs.pop("plugin", {}))
    return HeteroAccelerator(cpu=True, hetero_plugin=plugin, **kwargs)


def _loader(samples=SAMPLES, batch_size=5, **kwargs):
    return DataLoader(Points(samples), batch_size, **{"shuffle": True, **kwargs})


def ranks(fn, world_size=2, *args, **kwargs):
    return run_ranks(fn, world_size, *args, env={"OMP_NUM_THREADS": "1"}, **kwargs)


def _with_user_hook(rank):
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

    handler = DistributedDataParallelKwargs(
        comm_hook=DDPCommunicationHookType.BF16, find_unused_parameters=True, bucket_cap_mb=1
    )
    accelerator = _accelerator(plugin={"local_batch_sizes": (7, 3)}, kwargs_handlers=[handler])
    model, loader = accelerator.prepare(network(torch.float32), _loader())
    x, y, _ = next(iter(loader))
    accelerator.backward(nn.functional.mse_loss(model(x.float()), y.float()))
    grads = [p.grad for p in model.parameters()]
    accelerator.end_training()
    return model.find_unused_parameters, [bool((g.bfloat16().float() == g).all()) for g in grads]


def test_the_users_communication_hook_and_ddp_arguments_are_kept():
    """Sums made in bfloat16 are bfloat16 numbers."""
    for find_unused, rounded in ranks(_with_user_hook):
        assert find_unused
        assert all(rounded)


def _waits_in_vain(rank):
    handler = InitProcessGroupKwargs(backend="gloo", timeout=timedelta(seconds=1))
    accelerator = _accelerator(kwargs_handlers=[handler])
    store = torch.distributed.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["waited"], timedelta(seconds=60))
        return store.set("seen", "")
    with pytest.raises(RuntimeError, match="[Tt]imed out"):
        accelerator.hetero_session.engine.control.gather_objects(None)
    store.set("waited", "")
    return store.wait(["seen"], timedelta(seconds=60))  # the store ends with this rank


def test_a_rank_waits_for_another_no_longer_than_the_given_timeout():
    ranks(_waits_in_vain)


class Tracker(GeneralTracker):
    name, requires_logging_directory = "list", False

    def __init__(self):
        super().__init__()
        self.rows = []

    tracker = property(lambda self: self.rows)

    def store_init_configuration(self, values):
        pass

    def log(self, values, step=None, **kwargs):
        self.rows.append((step, values))


def _tracked(rank):
    tracker = Tracker()
    accelerator = _accelerator(plugin={"replan": 4}, log_with=tracker)
    accelerator.init_trackers("test")
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, _loader(200))
    for i, (x, y, _) in enumerate(loader):
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        if i < 15:
            accelerator.log({"loss": 1.0}, step=i)
    accelerator.end_training()
    return tracker.rows


def test_metrics_come_with_the_users_own_log():
    rows = ranks(_tracked)[0]
    with_metrics = [(step, values) for step, values in rows if "hetero/step_time" in values]
    assert {"loss", "hetero/local_batch_size/rank1", "hetero/idle_fraction"} <= set(with_metrics[0][1])
    assert 4 <= with_metrics[0][0] <= 12
    assert sum("loss" in values for _, values in rows) == 15
    last_step, last = rows[-1]
    assert last_step is None
    assert "hetero/step_time" in last, "what came after the last log of the loop's own"
    assert "loss" not in last


def _evaluating(rank):
    """An evaluation inside the training loop, with a loader that Accelerate shards evenly."""
    accelerator = _accelerator(plugin={"local_batch_sizes": (7, 3)})
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, loader, evaluation = accelerator.prepare(
        model, optimizer, _loader(), _loader(13, 2, shuffle=False)
    )
    seen, gathered = [], []
    for epoch in range(2):
        for step, (x, y, index) in enumerate(loader):
            seen.append((epoch, step, index.tolist()))
            if step == 2:
                gathered.append([i for batch in evaluation for i in accelerator.gather_for_metrics(batch[2]).tolist()])
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if (epoch, step) == (0, 4):
                break
    weights = flat(model)
    accelerator.end_training()
    return {"weights": weights, "seen": seen, "gathered": gathered}


def test_evaluation_inside_the_loop_and_a_loop_left_early():
    results = ranks(_evaluating)
    for result in results:
        assert [sorted(indices) for indices in result["gathered"]] == [list(range(13))] * 2
        np.testing.assert_allclose(result["weights"], replay(results, schedule=0), **EXACT)
    second = [indices for r in results for epoch, _, indices in r["seen"] if epoch == 1]
    assert sorted(sum(second, [])) == list(range(SAMPLES))


Pair = namedtuple("Pair", ["index", "text"])


def _gathers(rank, sizes):
    """What values come back as inside a step, and the errors of those that cannot be gathered; one after another."""
    accelerator = _accelerator(plugin={"local_batch_sizes": sizes})
    loader = accelerator.prepare(_loader(14))
    for x, _, index in loader:
        ids, texts = index.tolist(), [f"s{i}" for i in index.tolist()]
        rows = accelerator.gather({"i": index, "one": torch.tensor(float(rank)), "same": torch.full((2,), rank)})
        good = {
            "mapping": UserDict(index=index, nested=(x, [index])),
            "record": Pair(index, x),
            "texts": texts,
            "mapping of both": UserDict(index=index, text=texts),
            "record of both": Pair(index, tuple(texts)),
            "array": index.numpy(),
            "objects": [{"id": i, "mask": torch.zeros(i % 3)} for i in ids],
        }
        bad = {
            "number": 3.0,
            "text": "abc",
            "both in a tuple": (index, texts),
            "other shapes": x if rank == 0 else x[:, :2],
            "other kinds": index if rank == 0 else texts,
            "cannot be sent": [lambda: 0] * len(ids),
        }
        results = {name: accelerator.gather_for_metrics(value) for name, value in good.items()}
        results["apart"] = accelerator.gather_for_metrics([torch.zeros(i % 3) for i in ids], use_gather_object=True)
        errors = {}
        for name, value in bad.items():
            with pytest.raises((TypeError, ValueError)) as caught:
                accelerator.gather_for_metrics(value)
            errors[name] = f"{caught.type.__name__}: {caught.value}"
        with pytest.raises(TypeError, match="gather.. takes tensors"):
            accelerator.gather(texts)
        break
    return pickle.dumps({"ids": ids, "x": x, "rows": rows, "results": results, "errors": errors})


@pytest.mark.parametrize("sizes", [(5, 2), (7, 0)], ids=str)
def test_gather_takes_any_structure(sizes):
    ran = list(map(pickle.loads, ranks(_gathers, 2, sizes)))
    ids = [i for result, size in zip(ran, sizes, strict=True) for i in result["ids"][:size]]
    x = torch.cat([result["x"][:size] for result, size in zip(ran, sizes, strict=True)])
    texts = [f"s{i}" for i in ids]
    assert len(ids) == 7
    for result in ran:
        got = result["results"]
        for name in ("mapping", "mapping of both"):
            assert type(got[name]) is UserDict
            assert got[name]["index"].tolist() == ids
        assert torch.equal(got["mapping"]["nested"][0], x)
        assert got["mapping"]["nested"][1][0].tolist() == ids
        assert torch.equal(got["record"].text, x)
        assert (got["record of both"].index.tolist(), got["record of both"].text) == (ids, texts)
        assert got["texts"] == got["mapping of both"]["text"] == texts
        assert got["array"].tolist() == [sample["id"] for sample in got["objects"]] == ids
        assert [len(tensor) for tensor in got["apart"]] == [i % 3 for i in ids]
        rows = {name: value.tolist() for name, value in result["rows"].items()}
        assert rows["i"] == ran[0]["ids"] + ran[1]["ids"]
        assert (rows["one"], rows["same"]) == ([0.0, 1.0], [0, 0, 1, 1])
        errors = result["errors"]
        assert errors == ran[0]["errors"]
        assert "TypeError: samples cannot be gathered: rank 0 has a float" in errors["number"]
        assert "rank 0 has a str" in errors["text"]
        assert "rank 0 has a tuple of tensors and other things" in errors["both in a tuple"]
        assert "rank 0: float64[rows, 5], rank 1: float64[rows, 2]" in errors["other shapes"]
        assert "ValueError: ranks gather different things" in errors["other kinds"]
        assert "rank 0 has a list that cannot be sent" in errors["cannot be sent"]


def _refused(rank, what):
    accelerator = _accelerator(plugin={"local_batch_sizes": (3, 1)})
    if what == "rows":
        return accelerator.prepare_data_loader(DataLoader(Stream(), None), uneven=True)
    model = network()
    if what == "batch norm":
        model = nn.Sequential(model, nn.BatchNorm1d(1))
    model, loader = accelerator.prepare(model, _loader(batch_size=2))
    x, y, _ = next(iter(loader))
    return nn.functional.mse_loss(model(x), y).backward()


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(8))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("direct backward", "loss.backward() was called directly"),
        ("batch norm", "has a size below min_local_batch_size=2"),
        ("rows", "the rows of a batch of type int cannot be counted"),
    ],
)
def test_what_cannot_be_right_is_refused_on_every_rank(what, message):
    errors = ranks(_refused, 2, what, expect_errors=True)
    assert [rank for rank, *_ in errors] == [0, 1]
    assert all(message in text for *_, text in errors)


def _left_to_accelerate(rank):
    accelerator = _accelerator()
    stream, first, second, evaluation = accelerator.prepare(
        DataLoader(Stream(), 2), _loader(), _loader(), _loader(shuffle=False)
    )
    split = [isinstance(loader.batch_sampler, SessionBatches) for loader in (first, second, evaluation)]
    items = [i for batch in stream for i in batch.tolist()]
    accelerator.free_memory()
    said = io.StringIO()
    logging.getLogger("lightning_hetero").addHandler(logging.StreamHandler(said))
    alone, again = accelerator.prepare(_loader(shuffle=False)), accelerator.prepare(_loader())
    later = [isinstance(loader.batch_sampler, SessionBatches) for loader in (alone, again)]
    accelerator.end_training()
    return split, items, later, said.getvalue()


def _skipped_by_accelerate(rank):
    from accelerate import skip_first_batches

    accelerator = _accelerator(plugin={"local_batch_sizes": (7, 3)})
    model = network()
    _, _, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), _loader())
    next(iter(skip_first_batches(loader, 1)))


def test_a_loader_that_would_not_weight_its_batches_is_refused():
    errors = run_ranks(_skipped_by_accelerate, 2, expect_errors=True)
    assert [rank for rank, *_ in errors] == [0, 1]
    assert all("skip_first_batches" in text for *_, text in errors)


def test_only_the_first_training_loader_is_split():
    results = ranks(_left_to_accelerate)
    assert [split for split, *_ in results] == [[True, False, False]] * 2
    assert sorted(i for _, items, *_ in results for i in items) == list(range(8))
    assert [later for *_, later, _ in results] == [[False, True]] * 2
    assert results[0][-1].count("prepare_data_loader(loader, uneven=True)") == 1


def _slow(rank, policy):
    from lightning_hetero.simulate import Throttle

    accelerator = _accelerator(plugin={"policy": policy, "replan": 8})
    weight = torch.randn(500, 500)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, _loader(64 * 40, 32))
    sizes, throttle = [], Throttle((0.75, 0.25)[rank]).start()
    for x, y, _ in loader:
        h = weight[: len(x)].repeat_interleave(16, 0)
        for _ in range(3):
            h = h @ weight / 25
        accelerator.backward(nn.functional.mse_loss(model(x) + 0 * h.sum(), y))
        optimizer.step()
        optimizer.zero_grad()
        sizes.append(len(x))
    throttle.stop()
    accelerator.end_training()
    return sizes


@pytest.mark.alone
@pytest.mark.parametrize("policy", ["perf_model", "pid"])
def test_the_split_follows_the_faster_process(policy):
    first, second = ranks(_slow, 2, policy)
    assert (first[0], second[0]) == (32, 32)
    assert all(a + b == 64 for a, b in zip(first, second, strict=True))
    assert max(first) > 36


def _plain_state(rank, folder, kind):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True) if kind == "plain" else _accelerator(plugin={"local_batch_sizes": (7, 3)})
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, _loader())
    free_group_last(model)  # plain Accelerate does not, and may wait for ever at the end
    if os.path.isdir(folder):
        accelerator.load_state(folder)
    for x, y, _ in loader:
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
    accelerator.wait_for_everyone()
    accelerator.save_state(folder)
    accelerator.end_training()
    return flat(model)


@pytest.mark.parametrize("order", [("plain", "hetero"), ("hetero", "plain")], ids="-then-".join)
def test_states_go_to_and_from_plain_accelerate(order, tmp_path):
    for kind in order:
        weights = ranks(_plain_state, 2, str(tmp_path / "state"), kind)
        np.testing.assert_array_equal(*weights)


def _accumulates(rank, folder, sizes):
    """Save behind the third micro-batch of windows of two, or go on from there; when gradients were summed."""
    accelerator = _accelerator(plugin={"local_batch_sizes": sizes}, gradient_accumulation_steps=2)
    model = network()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.01), _loader())
    resumed, summed = os.path.isdir(folder), []
    if resumed:
        accelerator.load_state(folder)
    for i, (x, y, _) in enumerate(accelerator.skip_first_batches(loader) if resumed else loader, start=1):
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            summed.append(accelerator.sync_gradients)
            optimizer.step()
            optimizer.zero_grad()
        if i == 3 and not resumed:
            accelerator.save_state(folder)
            break
    return summed, flat(model)


def test_ranks_that_join_sum_gradients_with_the_others(tmp_path):
    """A rank without a part in the state does not know how many micro-batches were counted."""
    folder = str(tmp_path / "state")
    ranks(_accumulates, 2, folder, (7, 3))
    outcome = ranks(_accumulates, 3, folder, (5, 3, 2))
    assert [summed for summed, _ in outcome] == [[True, False, True, False, True]] * 3
    for _, weights in outcome:
        np.testing.assert_array_equal(weights, outcome[0][1])


def test_a_broken_state_is_an_error_on_every_rank(tmp_path):
    folder = tmp_path / "state"
    ranks(_plain_state, 2, str(folder), "hetero")
    (folder / "hetero_state.pt").write_bytes(b"broken")
    errors = ranks(_plain_state, 2, str(folder), "hetero", expect_errors=True)
    assert [rank for rank, *_ in errors] == [0, 1]
    assert all("hetero_state.pt is not as it was written" in text for *_, text in errors)


def _copies(rank):
    accelerator = HeteroAccelerator(cpu=True, hetero_plugin=HeteroPlugin(local_batch_sizes=[6, 2]))
    points, model = Points(16), network()
    loaders = DataLoader(points, 4, shuffle=True), DataLoader(points, 4)
    model, optimizer, train, valid = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), *loaders)

    def step():
        for x, y, _ in train:
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()

    step()
    refused, found = [], []
    for duplicate in (copy.deepcopy, lambda given: pickle.loads(pickle.dumps(given))):
        again, model_again, valid_again, train_again = map(duplicate, (accelerator, model, valid, train))
        np.testing.assert_array_equal(flat(model_again), flat(model))
        model_again(points.x[: 4 - 3 * rank]).mean().backward()  # as plain DDP averages
        found += [[i.tolist() for *_, i in valid_again], again.hetero_plugin.local_batch_sizes, again.state.__dict__]
        found += [flat_grads(model_again), again.num_processes]
        own = [] if again is accelerator else [lambda again=again: again.plan]  # its deep copy is itself
        for use in (*own, lambda again=train_again: list(again)):
            with pytest.raises(RuntimeError, match="copy of an accelerator.*Use the original") as error:
                use()
            refused.append(str(error.value))
    step()
    weights, state = flat(model), accelerator.state.__dict__
    accelerator.end_training()
    return {"weights": weights, "found": found, "state": state, "refused": refused}


def test_copies_and_pickles_have_the_settings_and_leave_the_run_to_the_original():
    first, second = run_ranks(_copies, 2)
    np.testing.assert_array_equal(first["weights"], second["weights"])
    for rank, result in enumerate((first, second)):
        batches, sizes, state, grads, processes = result["found"][:5]
        assert batches == [[[0, 1, 2, 3], [8, 9, 10, 11]], [[4, 5, 6, 7], [12, 13, 14, 15]]][rank]
        assert (sizes, processes) == ((6, 2), 2)
        assert state == result["state"]
        np.testing.assert_array_equal(grads, first["found"][3])
        assert len(result["refused"]) == 3


class Backwards:
    """A sampler that is no ``torch.utils.data.Sampler``."""

    def __iter__(self):
        return iter(range(SAMPLES - 1, -1, -1))

    def __len__(self):
        return SAMPLES


def _own_sampler(rank, kind):
    sampler = list(range(SAMPLES - 1, -1, -1)) if kind == "list" else Backwards()
    accelerator = HeteroAccelerator(cpu=True, hetero_plugin=HeteroPlugin(local_batch_sizes=[7, 3]))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Points(SAMPLES), 5, sampler=sampler))
    seen = []
    for x, y, index in loader:
        seen += accelerator.gather_for_metrics(index).tolist()
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    return seen, [entry.plan.local_batch_sizes for entry in accelerator.plan_history]


@pytest.mark.parametrize("kind", ["list", "duck"])
def test_any_iterable_gives_the_order_of_the_samples(kind):
    for seen, plans in ranks(_own_sampler, 2, kind):
        assert seen == list(range(SAMPLES - 1, -1, -1))
        assert plans == [(7, 3)]


def _local_sgd(rank, policy):
    from accelerate.local_sgd import LocalSGD

    accelerator = HeteroAccelerator(cpu=True, hetero_plugin=HeteroPlugin(policy=policy))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, _loader(20))
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=True) as local_sgd:
        for x, y, _ in loader:
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            accelerator.reduce(torch.ones(1), "mean")  # of no model
            local_sgd.step()
    return flat(model)


def test_local_sgd_is_refused_by_name_with_unequal_batches_and_averages_equal_ones():
    errors = ranks(_local_sgd, 2, None, expect_errors=True)
    assert [(rank, kind) for rank, kind, _ in errors] == [(0, "RuntimeError"), (1, "RuntimeError")]
    assert all("LocalSGD averages" in text and "hetero_elastic" in text for *_, text in errors)
    first, second = ranks(_local_sgd, 2, "even")
    np.testing.assert_array_equal(first, second)


def _as_the_oldest(rank, folder):
    """Save in a pass's last step and go on, with what Accelerate 1.0 has otherwise."""
    from accelerate import Accelerator
    from accelerate.data_loader import DataLoaderShard

    def empty_pass(self):
        self.begin()
        iterator = iter(self.base_dataloader)
        try:
            batch = next(iterator)
        except StopIteration:
            yield
        yield batch
        yield from iterator
        self.iteration += 1
        self.end()

    DataLoaderShard.__iter__ = empty_pass
    initialise = Accelerator.__init__

    def without_parallelism(self, *args, **kwargs):
        initialise(self, *args, **kwargs)
        del Accelerator.parallelism_config

    Accelerator.__init__ = without_parallelism
    accelerator = HeteroAccelerator(cpu=True, hetero_plugin=HeteroPlugin(local_batch_sizes=[7, 3]))
    Accelerator.parallelism_config = property(lambda self: None)  # which the rest of this Accelerate needs
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, _loader(20))
    for _ in loader:
        accelerator.save_state(folder)
    accelerator.load_state(folder)
    rest = [len(batch) for batch in accelerator.skip_first_batches(loader)]
    after = [len(index) for *_, index in loader]
    accelerator.end_training()
    return rest, after, accelerator.gradient_state.in_dataloader


def test_the_lowest_accelerate_that_is_declared_will_do(tmp_path):
    """The floor in pyproject.toml is that of what is stood in for here; the tests ran with 1.0.1 as well."""
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["optional-dependencies"]["accelerate"] == ["accelerate>=1.0"]
    for rank, (rest, after, left_open) in enumerate(ranks(_as_the_oldest, 2, str(tmp_path))):
        assert rest == []
        assert after == [[7, 7], [3, 3]][rank]
        assert not left_open
