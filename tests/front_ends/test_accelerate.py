"""``HeteroAccelerator``: what it gathers, splits, logs, saves and refuses; its mathematics is in test_front_ends.py."""

import os
import pickle
from collections import UserDict, namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.local_sgd import LocalSGD
from accelerate.tracking import GeneralTracker
from accelerate.utils import (
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    ProjectConfiguration,
)
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_hetero.accelerate import HeteroAccelerator, HeteroPlugin
from lightning_hetero.comm.agreement.group_lifetime import free_group_last
from lightning_hetero.core import DamagedCheckpointError
from tests.helpers import Points, collected
from tests.loops import SAMPLES, accelerate_loop, every_sample_once, flat, global_batches, network, replay
from tests.ranks import run_ranks

EXACT = {"rtol": 1e-12, "atol": 1e-13}


def ours(settings=None, **kwargs):
    return HeteroAccelerator(cpu=True, hetero_plugin=HeteroPlugin(**(settings or {})), **kwargs)


def loader_of(samples=SAMPLES, batch_size=5, **kwargs):
    return DataLoader(Points(samples), batch_size, **{"shuffle": True, **kwargs})


def prepared(accelerator, *loaders, lr=0.05, **kwargs):
    model = network(**kwargs)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return accelerator.prepare(model, optimizer, *(loaders or [loader_of()]))


def step(accelerator, model, optimizer, x, y):
    accelerator.backward(nn.functional.mse_loss(model(x), y))
    optimizer.step()
    optimizer.zero_grad()


def refused(job, *args, says, kind=None, ranks=2):
    errors = run_ranks(job, ranks, *args, expect_errors=True)
    assert [rank for rank, *_ in errors] == list(range(ranks))
    assert all(says in text and kind in (None, name) for _, name, text in errors), errors


def _train(rank, plugin, kwargs):
    return accelerate_loop(rank, plugin, 5, **kwargs)


def run(plugin, **kwargs):
    return run_ranks(_train, 2, plugin, kwargs)


# one training


def test_bf16_is_close_and_a_rank_without_samples_gathers_none():
    results = run({"local_batch_sizes": (10, 0)}, mixed_precision="bf16")
    np.testing.assert_allclose(results[0]["weights"], replay(results, schedule=2), rtol=0.05, atol=5e-3)
    np.testing.assert_array_equal(results[0]["weights"], results[1]["weights"])
    assert [result["metrics"] for result in results] == [global_batches(results)] * 2


def _tracked(rank):
    class Tracker(GeneralTracker):
        name, requires_logging_directory, tracker = "list", False, None

        def store_init_configuration(self, values):
            pass

        def log(self, values, step=None, **kwargs):
            rows.append((step, values))

    rows = []
    accelerator = ours({"replan": 4}, log_with=Tracker())
    accelerator.init_trackers("test")
    model, optimizer, loader = prepared(accelerator, loader_of(200))
    for i, (x, y, _) in enumerate(loader):
        step(accelerator, model, optimizer, x, y)
        if i < 15:
            accelerator.log({"loss": 1.0}, step=i)
    accelerator.end_training()
    return rows


def test_metrics_come_with_the_users_own_log_and_the_rest_at_the_end():
    rows = run_ranks(_tracked, 2)[0]
    with_metrics = [(number, values) for number, values in rows if "hetero/step_time" in values]
    assert {"loss", "hetero/local_batch_size/rank1", "hetero/idle_fraction"} <= set(with_metrics[0][1])
    assert 4 <= with_metrics[0][0] <= 12
    assert sum("loss" in values for _, values in rows) == 15
    assert rows[-1][0] is None
    assert "hetero/step_time" in rows[-1][1]
    assert "loss" not in rows[-1][1]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(8))


def _loaders(rank):
    """Which of several loaders is split."""
    lines, found = collected(), {}
    accelerator = ours({"local_batch_sizes": [7, 3]})
    stream, first, second, evaluation = accelerator.prepare(
        DataLoader(Stream(), 2), loader_of(), loader_of(), loader_of(shuffle=False)
    )
    found["first"] = [len(next(iter(loader))[0]) for loader in (first, second, evaluation)]
    found["stream"] = [i for batch in stream for i in batch.tolist()]
    accelerator.free_memory()
    alone, again = accelerator.prepare(loader_of(shuffle=False)), accelerator.prepare(loader_of())
    found["again"] = [len(next(iter(loader))[0]) for loader in (alone, again)]
    accelerator.end_training()
    return found, [line for line in lines if "uneven=True" in line]


def test_only_the_first_training_loader_is_split():
    (first, lines), (second, _) = run_ranks(_loaders, 2)
    assert (first["first"], second["first"]) == ([7, 5, 5], [3, 5, 5])
    assert sorted(first["stream"] + second["stream"]) == list(range(8))
    assert (first["again"], second["again"]) == ([5, 7], [5, 3])
    assert len(lines) == 1


def _with_user_hook(rank):
    handler = DistributedDataParallelKwargs(
        comm_hook=DDPCommunicationHookType.BF16, find_unused_parameters=True, bucket_cap_mb=1
    )
    accelerator = ours({"local_batch_sizes": (7, 3)}, kwargs_handlers=[handler])
    model, _, loader = prepared(accelerator, dtype=torch.float32)
    x, y, _ = next(iter(loader))
    accelerator.backward(nn.functional.mse_loss(model(x.float()), y.float()))
    accelerator.end_training()
    return model.find_unused_parameters, [bool((p.grad.bfloat16().float() == p.grad).all()) for p in model.parameters()]


def test_the_users_communication_hook_and_ddp_arguments_are_kept():
    """Sums made in bfloat16 are bfloat16 numbers."""
    for find_unused, rounded in run_ranks(_with_user_hook, 2):
        assert find_unused
        assert all(rounded)


# gathering

Pair = namedtuple("Pair", ["index", "text"])


def _gathers(rank, sizes):
    """What values come back as inside a step, and the errors of those that cannot be gathered; one after another."""
    accelerator = ours({"local_batch_sizes": sizes})
    loader = accelerator.prepare(loader_of(14))
    for x, _, index in loader:
        ids, texts = index.tolist(), [f"s{i}" for i in index.tolist()]
        rows = accelerator.gather({"i": index, "one": torch.tensor(float(rank)), "same": torch.full((2,), rank)})
        good = {
            "mapping": UserDict(index=index, nested=(x, [index])),
            "record": Pair(index, tuple(texts)),
            "array": index.numpy(),
            "objects": [{"id": i, "mask": torch.zeros(i % 3)} for i in ids],
        }
        bad = {
            "float": 3.0,
            "tuple": (index, texts),
            "rank 0: float64[rows, 5], rank 1: float64[rows, 2]": x if rank == 0 else x[:, :2],
            "ranks gather different things": index if rank == 0 else texts,
            "cannot be sent": [lambda: 0] * len(ids),
        }
        results = {name: accelerator.gather_for_metrics(value) for name, value in good.items()}
        results["apart"] = accelerator.gather_for_metrics([torch.zeros(i % 3) for i in ids], use_gather_object=True)
        for says, value in bad.items():
            with pytest.raises((TypeError, ValueError)) as caught:
                accelerator.gather_for_metrics(value)
            assert says in str(caught.value)
        with pytest.raises(TypeError, match="tensors"):
            accelerator.gather(texts)
        break
    accelerator.end_training()
    return pickle.dumps({"ids": ids, "x": x, "rows": rows, "results": results})


@pytest.mark.parametrize("sizes", [(5, 2), (7, 0)], ids=str)
def test_gather_takes_any_structure_and_names_what_it_cannot(sizes):
    ran = list(map(pickle.loads, run_ranks(_gathers, 2, sizes)))
    ids = [i for result, size in zip(ran, sizes, strict=True) for i in result["ids"][:size]]
    x = torch.cat([result["x"][:size] for result, size in zip(ran, sizes, strict=True)])
    texts = [f"s{i}" for i in ids]
    assert len(ids) == 7
    for result in ran:
        got = result["results"]
        assert type(got["mapping"]) is UserDict
        assert got["mapping"]["index"].tolist() == got["mapping"]["nested"][1][0].tolist() == ids
        assert torch.equal(got["mapping"]["nested"][0], x)
        assert (got["record"].index.tolist(), got["record"].text) == (ids, texts)
        assert got["array"].tolist() == [sample["id"] for sample in got["objects"]] == ids
        assert [len(tensor) for tensor in got["apart"]] == [i % 3 for i in ids]
        rows = {name: value.tolist() for name, value in result["rows"].items()}
        assert rows == {"i": ran[0]["ids"] + ran[1]["ids"], "one": [0.0, 1.0], "same": [0, 0, 1, 1]}


# what cannot be right


def _wrong(rank, what):
    accelerator = ours({"local_batch_sizes": (3, 1)})
    model, loader = accelerator.prepare(network(), loader_of(batch_size=2))
    x, y, _ = next(iter(skip_first_batches(loader, 1) if what == "skipped" else loader))
    return nn.functional.mse_loss(model(x), y).backward()


@pytest.mark.parametrize(("what", "says"), [("direct backward", "loss.backward()"), ("skipped", "skip_first_batches")])
def test_what_cannot_be_right_is_refused_on_every_rank(what, says):
    refused(_wrong, what, says=says)


def _local_sgd(rank, policy):
    accelerator = ours({"policy": policy})
    model, optimizer, loader = prepared(accelerator, loader_of(20))
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=True) as local_sgd:
        for x, y, _ in loader:
            step(accelerator, model, optimizer, x, y)
            accelerator.reduce(torch.ones(1), "mean")  # of no model
            local_sgd.step()
    accelerator.end_training()
    return flat(model)


def test_local_sgd_is_refused_with_unequal_batches_and_averages_equal_ones():
    refused(_local_sgd, None, says="hetero_elastic", kind="RuntimeError")
    np.testing.assert_array_equal(*run_ranks(_local_sgd, 2, "even"))


# states


@pytest.mark.parametrize(("at", "workers", "seedable"), [(3, 0, True), (8, 2, False), (10, 0, True)])
def test_a_training_equals_one_process_and_a_resume_is_identical(tmp_path, at, workers, seedable):
    """8 steps an epoch: saved inside the first epoch, in its last step, and inside the second."""
    folder = str(tmp_path / "state")
    plugin, kwargs = {"replan": 1000, "hysteresis": 1.0}, {"plans": {(0, 0): (8, 2)}, "epochs": 3, "workers": workers}
    kwargs["dataloader_config"] = DataLoaderConfiguration(use_seedable_sampler=seedable)
    whole = run(plugin, save={at: folder}, **kwargs)
    rest = run(plugin, resume=folder, **kwargs)
    every_sample_once(whole, epochs=3)
    assert [sizes for *_, sizes in whole[0]["history"]] == [(5, 5), (8, 2)]
    expected = replay(whole, schedule=2)
    for full, part in zip(whole, rest, strict=True):
        np.testing.assert_allclose(full["weights"], expected, **EXACT)
        assert full["metrics"] == global_batches(whole), "gather_for_metrics has each sample once"
        assert part["seen"] == full["seen"][at:]
        np.testing.assert_array_equal(part["weights"], full["weights"])
        assert part["lr"] == full["lr"]


def _saves(rank, folder, kind, sizes=(7, 3)):
    accelerator = Accelerator(cpu=True) if kind == "plain" else ours({"local_batch_sizes": sizes})
    model, optimizer, loader = prepared(accelerator)
    free_group_last(model)  # plain Accelerate does not, and may wait for ever at the end
    if os.path.isdir(folder):
        accelerator.load_state(folder)
    for x, y, _ in loader:
        step(accelerator, model, optimizer, x, y)
    accelerator.wait_for_everyone()
    accelerator.save_state(folder)
    accelerator.end_training()
    return flat(model)


@pytest.mark.parametrize("order", [("plain", "hetero"), ("hetero", "plain")], ids="-then-".join)
def test_states_go_to_and_from_plain_accelerate(order, tmp_path):
    for kind in order:
        np.testing.assert_array_equal(*run_ranks(_saves, 2, str(tmp_path / "state"), kind))


FILES = ("model.safetensors", "optimizer.bin", "random_states_1.pkl", "hetero_state.pt")


def _damaged(rank, folder):
    """States of three steps, whose files change after that."""
    lines, weights = collected(), []
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
    accelerator = ours({"compression": "block_topk"}, project_config=project)
    paths = [Path(folder, "checkpoints", f"checkpoint_{i}") for i in range(3)]
    model, optimizer, loader = prepared(accelerator, DataLoader(Points(30), 5, shuffle=True))
    for x, y, _ in loader:
        step(accelerator, model, optimizer, x, y)
        accelerator.save_state()
        weights.append(flat(model))

    def change(path, at=200):
        accelerator.wait_for_everyone()
        if rank == 0:
            content = bytearray(path.read_bytes())
            content[at] ^= 16
            path.write_bytes(content)
        accelerator.wait_for_everyone()

    before = len(lines)
    accelerator.load_state()
    np.testing.assert_array_equal(flat(model), weights[2])
    assert not [line for line in lines[before:] if "whole" in line]
    change(paths[2] / FILES[0], -1)
    accelerator.load_state()
    np.testing.assert_array_equal(flat(model), weights[1])
    assert any(line.endswith("checkpoint_1") for line in lines[before:]) == (rank == 0)
    for file in FILES:
        change(paths[1] / file)
        with pytest.raises(DamagedCheckpointError, match=f"(?s)checkpoint_1 .*{file}.*checkpoint_0"):
            accelerator.load_state(str(paths[1]))
        change(paths[1] / file)
    accelerator.load_state(str(paths[1]))
    accelerator.end_training()
    return True


def test_a_state_that_changed_is_named_on_every_rank_or_passed_over(tmp_path):
    assert run_ranks(_damaged, 2, str(tmp_path)) == [True, True]
