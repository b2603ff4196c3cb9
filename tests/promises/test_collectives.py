"""Sums, messages and gathers between ranks: flat, by clusters, of unequal numbers of rows; and calls that are stuck."""

import socket
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.collectives import async_ops
from lightning_hetero.comm.collectives.async_ops import (
    async_all_gather,
    async_all_reduce,
)
from lightning_hetero.comm.collectives.bucket_futures import BucketFutures
from lightning_hetero.comm.collectives.cluster_discovery import VARIABLE, discover_clusters, link_seconds
from lightning_hetero.comm.collectives.topology import Topology
from tests.helpers import Points, Regressor, fit
from tests.loops import SAMPLES, one_process
from tests.promises.virtual import VirtualTime
from tests.ranks import run_ranks

CPU = torch.device("cpu")

# sums and gathers in the background


def _gathers(rank):
    dist.init_process_group("gloo")
    buffer = torch.tensor([1.0 + 2.0j * rank])
    async_all_reduce(buffer).wait()
    found = [buffer.item()]
    for backend in ("gloo", "nccl"):  # NCCL's way is one call, which gloo can make as well
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(async_ops, "backend_of", lambda device, group=None, backend=backend: backend)
            rows, seen = torch.zeros(3, 5, dtype=torch.uint8), []
            rows[rank] = rank + 1
            async_all_gather(rows, rank, range(3), None, seen.append).wait()
            found.append((rows[:, 0].tolist(), sorted(seen)))
    return found


def test_rows_are_gathered_in_place_and_complex_numbers_are_summed():
    assert run_ranks(_gathers, 3) == [[3.0 + 6.0j, *[([1, 2, 3], [0, 1, 2])] * 2]] * 3


# flat, or by clusters


def _exchange(rank, given):
    dist.init_process_group("gloo")
    found = []
    for clusters in given:
        topology = Topology(rank, clusters)
        for one in (topology, topology.with_own_groups()):
            buffers = [torch.arange(4.0) * 10**rank + bucket for bucket in range(3)]
            for future in [one.all_reduce(buffer) for buffer in buffers]:
                future.wait()
            rows, seen = torch.zeros(one.size, 2, dtype=torch.uint8), []
            if one.is_leader:
                rows[one.cluster] = torch.tensor([one.cluster + 1, rank + 10], dtype=torch.uint8)
            one.all_gather(rows, seen.append).wait()
            inside = torch.full((2,), float(10**rank))
            raised = one.reduce_in_cluster(inside)
            if raised is not None:
                raised.wait()
            known = one.leader, one.cluster, one.is_leader, one.size, one.members_of(rank)
            one.close()
            found.append(([buffer.numpy() for buffer in buffers], rows.tolist(), sorted(seen), inside.tolist(), known))
        topology.open()
        again = torch.ones(2)
        topology.all_reduce(again).wait()
        found[-1] += (again.tolist(),)
        topology.close()
    return found


def test_every_rank_gets_the_sum_of_all_and_the_message_of_each_leader():
    given = [((0,), (1,), (2,)), ((0, 2), (1,))]
    for rank, found in enumerate(run_ranks(_exchange, 3, given)):
        twice = [one for one in given for _ in range(2)]
        for (buffers, rows, seen, inside, known, *again), clusters in zip(found, twice, strict=True):
            for bucket, buffer in enumerate(buffers):
                np.testing.assert_allclose(buffer, np.arange(4.0) * 111 + 3 * bucket)
            assert rows == [[i + 1, members[0] + 10] for i, members in enumerate(clusters)]
            assert seen == list(range(len(clusters)))
            mine = next(members for members in clusters if rank in members)
            assert known == (mine[0], clusters.index(mine), rank == mine[0], len(clusters), mine)
            assert rank != mine[0] or inside == [float(sum(10**member for member in mine))] * 2
            assert again in ([], [[3.0, 3.0]])


# clusters that a setting asks for


@pytest.mark.parametrize(
    ("setting", "answers", "expected"),
    [
        (None, ["a", "a", "b"], ((0,), (1,), (2,))),
        ("nodes", ["one", "two", "one", "two", "three"], ((0, 2), (1, 3), (4,))),
        ("env", ["lab", "office", "lab"], ((0, 2), (1,))),
        ("env", ["lab", None, "", "lab"], f"{VARIABLE}.* 1, 2"),
        (((0, 1), (2,)), ["", "", ""], ((0, 1), (2,))),
        (((0, 1),), ["", "", ""], "2"),
    ],
)
def test_clusters_are_those_that_the_setting_asks_for(monkeypatch, setting, answers, expected):
    monkeypatch.setenv(VARIABLE, "lab")
    said = []
    ranks = SimpleNamespace(rank=0, world_size=len(answers), gather_objects=lambda own: said.append(own) or answers)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            discover_clusters(setting, ranks)
    else:
        assert discover_clusters(setting, ranks) == expected
    asked = {"nodes": socket.gethostname(), "env": "lab"}.get(setting if isinstance(setting, str) else "")
    assert said == ([asked] if asked and len(answers) > 1 else [])


def _pings(rank):
    dist.init_process_group("gloo")
    plane, now = ControlPlane(rank, 3), [0.0]

    def moved(call):
        def counted(tensor, peer):
            call(tensor, peer)
            now[0] += 0.125 * (1 + {rank, peer}.issuperset({1, 2}))

        return counted

    plane.send, plane.receive = moved(plane.send), moved(plane.receive)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.perf_counter", lambda: now[0])
        return link_seconds(plane).tolist(), discover_clusters("auto", plane)


def test_each_two_ranks_are_timed_and_all_ranks_know_all_times():
    """Links that differ by less than three times are those of one cluster."""
    found = [[0.0, 0.25, 0.25], [0.25, 0.0, 0.5], [0.25, 0.5, 0.0]], ((0, 1, 2),)
    assert run_ranks(_pings, 3) == [found] * 3


# all-gather of unequal numbers of rows

SIZES = (7, 3)
OURS = pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional:FutureWarning")  # Lightning's own gather


def numbered(rank, sizes, width=2):
    """Rows that are numbered over all ranks, so that the order can be seen."""
    first = sum(sizes[:rank])
    return torch.arange(first * width, (first + sizes[rank]) * width, dtype=torch.float64).view(-1, width)


def _rows(rank):
    from lightning.fabric import Fabric

    from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy

    fabric = Fabric(accelerator="cpu", devices=3, strategy=HeteroDDPStrategy(local_batch_sizes=(7, 3, 2)))
    fabric.launch()
    pair = dist.new_group([0, 1])
    mine = numbered(rank, (4, 1, 2)).requires_grad_()
    fabric.all_gather(mine, sync_grads=True).square().sum().backward()
    found = {
        "uneven": fabric.all_gather(numbered(rank, (4, 1, 2))),
        "some have none": fabric.all_gather(numbered(rank, (0, 3, 0))),
        "one dimension": fabric.all_gather(torch.arange(rank + 1)),
        "equal": fabric.all_gather(numbered(rank, (2, 2, 2))),
        "numbers": fabric.all_gather(float(rank)),
        "nested": fabric.all_gather({"a": [torch.full((rank + 1, 1), rank)]})["a"][0],
        "of all three": mine.grad - 6 * mine.detach(),
    }
    if rank < 2:
        found["pair"] = fabric.all_gather(numbered(rank, (4, 1)), group=pair)
    errors = []
    for tensor in (
        torch.zeros(2 + rank, 1 + rank),
        torch.zeros(rank + 1, dtype=(torch.int64, torch.bool)[rank % 2]),
        torch.zeros(()) if rank == 0 else torch.zeros(2),
    ):
        with pytest.raises(ValueError, match=r"all_gather.*rank 0: ") as error:
            fabric.all_gather(tensor)
        errors.append(str(error.value))
    fabric.strategy.teardown()
    return {name: gathered.tolist() for name, gathered in found.items()} | {"errors": errors}


@OURS
def test_rows_come_in_the_order_of_the_ranks_and_equal_shapes_are_stacked():
    for rank, found in enumerate(run_ranks(_rows, 3)):
        assert found["uneven"] == [numbered(0, (7,)).tolist()]
        assert found["some have none"] == [numbered(0, (3,)).tolist()]
        assert found["one dimension"] == [[0, 0, 1, 0, 1, 2]]
        assert found["equal"] == numbered(0, (6,)).view(3, 2, 2).tolist()
        assert found["numbers"] == [0.0, 1.0, 2.0]
        assert found["nested"] == [[[0], [1], [1], [2], [2], [2]]]
        assert found["of all three"] == [[0.0, 0.0]] * (4, 1, 2)[rank], "a gradient is the sum of those of all ranks"
        assert rank == 2 or found["pair"] == [numbered(0, (5,)).tolist()]
        for error, named in zip(found["errors"], ("float32[4, 3]", "bool[2]", "float32[]"), strict=True):
            assert named in error


class GathersRows(Regressor):
    """As in docs/what-gets-averaged.md: the loss of the rows of all ranks."""

    def loss(self, batch):
        x, y, _ = batch
        outputs, targets = (self.all_gather(rows, sync_grads=True).flatten(0, 1) for rows in (self(x), y))
        return nn.functional.mse_loss(outputs, targets)


def _gathered_loss(rank):
    return fit(rank, {"local_batch_sizes": SIZES}, 2, 5, model=GathersRows(), dataset=Points(SAMPLES), max_epochs=1)


@OURS
def test_a_loss_of_gathered_rows_has_the_gradients_of_one_process():
    results = run_ranks(_gathered_loss, 2)
    expected = one_process(results)
    for result in results:
        np.testing.assert_allclose(result["grads"], expected["grads"], rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(result["weights"], expected["weights"], rtol=1e-12, atol=1e-14)


# a sum that gloo does not end


def test_what_ends_in_time_is_passed_on_and_what_does_not_is_failed_for_good():
    """As DDP waits for what the hook has made of the sum."""
    futures, (good, bad, late, never) = BucketFutures(), (torch.futures.Future() for _ in range(4))
    fronts = [futures.stand_in(one, CPU) for one in (good, bad, late, never)]
    made = fronts[3].then(lambda done: done.value() + 1)
    good.set_result([torch.ones(2)])
    bad.set_exception(ValueError("from gloo"))
    assert torch.equal(fronts[0].wait()[0], torch.ones(2))
    with pytest.raises(ValueError, match="from gloo"):
        fronts[1].wait()
    with VirtualTime() as clock:
        threading.Thread(target=lambda: (clock.sleep(0.3), late.set_result(3))).start()
        assert futures.fail("Connection closed", patience_s=1.0) == 1
    assert fronts[2].wait() == 3
    for future in (fronts[3], made):
        with pytest.raises(RuntimeError, match="Connection closed"):
            future.wait()
    never.set_result(4)  # long after
    assert futures.fail("again", patience_s=0.0) == 0
