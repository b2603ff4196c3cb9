"""Clusters that the setting ``hierarchy`` asks for: given, by name, by environment, by timed messages."""

import socket
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.collectives.cluster_discovery import PING, VARIABLE, discover_clusters, link_seconds
from tests.helpers import run_ranks


def control(answers):
    """Ranks that answer so; what this rank says is noted."""
    said = []
    return SimpleNamespace(
        rank=0, world_size=len(answers), gather_objects=lambda own: said.append(own) or answers
    ), said


def test_without_a_setting_or_on_one_rank_each_is_for_itself():
    ranks, said = control(["a", "a", "b"])
    assert discover_clusters(None, ranks) == ((0,), (1,), (2,))
    alone, _ = control(["a"])
    assert discover_clusters("nodes", alone) == ((0,),)
    assert said == [], "nobody is asked"


def test_nodes_are_told_apart_by_the_names_of_hosts():
    ranks, said = control(["one", "two", "one", "two", "three"])
    assert discover_clusters("nodes", ranks) == ((0, 2), (1, 3), (4,))
    assert said == [socket.gethostname()]


def test_the_environment_names_the_cluster_of_each_process(monkeypatch):
    monkeypatch.setenv(VARIABLE, "lab")
    ranks, said = control(["lab", "office", "lab"])
    assert discover_clusters("env", ranks) == ((0, 2), (1,))
    assert said == ["lab"]
    missing, _ = control(["lab", None, "", "lab"])
    with pytest.raises(ValueError, match=f"{VARIABLE}, which is not set on rank 1, 2"):
        discover_clusters("env", missing)


def test_clusters_that_are_given_have_to_name_all_ranks():
    ranks, _ = control(["", "", ""])
    assert discover_clusters(((0, 1), (2,)), ranks) == ((0, 1), (2,))
    with pytest.raises(ValueError, match="2"):
        discover_clusters(((0, 1),), ranks)


def _pings(rank, world_size, num_bytes=None):
    dist.init_process_group("gloo")
    plane, met = ControlPlane(rank, world_size), []
    send, receive = plane.send, plane.receive
    plane.send = lambda tensor, to: met.append(("send", to, tensor.nbytes)) or send(tensor, to)
    plane.receive = lambda tensor, source: met.append(("receive", source, tensor.nbytes)) or receive(tensor, source)
    return link_seconds(plane, num_bytes), met


def test_transfers_have_the_size_that_is_asked_for():
    assert {size for _, met in run_ranks(_pings, 2, 2, 64) for *_, size in met} == {64}


@pytest.mark.parametrize("world_size", [2, 3])
def test_each_two_ranks_are_timed_and_all_ranks_know_all_times(world_size):
    """Three round trips of 256 KiB for each pair; the lower rank begins."""
    results = run_ranks(_pings, world_size, world_size)
    seconds = results[0][0]
    for rank, (known, met) in enumerate(results):
        np.testing.assert_array_equal(known, seconds)
        for other in set(range(world_size)) - {rank}:
            trips = [kind for kind, peer, _ in met if peer == other]
            there, back = ("send", "receive") if rank < other else ("receive", "send")
            assert trips == [there, back] * PING.repeats
        assert {size for *_, size in met} == {PING.num_bytes}
    np.testing.assert_array_equal(seconds, seconds.T)
    assert (np.diag(seconds) == 0).all()
    assert (seconds[~np.eye(world_size, dtype=bool)] > 0).all()
