"""Who talks to whom: flat, or clusters with leaders; sums and messages are the same either way."""

from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lightning_hetero.comm.collectives.topology import Topology
from tests.helpers import run_ranks


@pytest.mark.parametrize("clusters", [((0,), (1,), (2,)), ((0, 1, 2),)])
def test_single_ranks_and_one_cluster_are_flat(clusters):
    """Nothing would be gained by a leader; each rank exchanges for itself."""
    for rank in range(3):
        topology = Topology(rank, clusters)
        assert (topology.flat, topology.size, topology.is_leader) == (True, 3, True)
        assert topology.clusters == ((0,), (1,), (2,))
        assert topology.given == clusters
        assert topology.members_of(rank) == (rank,)
    assert Topology.flat_over(1, 3).clusters == ((0,), (1,), (2,))


def _exchange(rank, clusters, apart):
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    topology = Topology(rank, clusters)
    if apart:
        topology = topology.with_own_groups()
    buffers = [torch.arange(4.0) * 10**rank + bucket for bucket in range(3)]
    futures = [topology.all_reduce(buffer) for buffer in buffers]
    for future in futures:
        future.wait()
    rows = torch.zeros(topology.size, 2, dtype=torch.uint8)
    if topology.is_leader:
        rows[topology.cluster] = torch.tensor([topology.cluster + 1, rank + 10], dtype=torch.uint8)
    topology.all_gather(rows).wait()
    inside = torch.full((2,), float(10**rank))
    raised = topology.reduce_in_cluster(inside)
    if raised is not None:
        raised.wait()
    known = topology.leader, topology.cluster, topology.is_leader, topology.size, topology.members_of(rank)
    topology.close()
    return [buffer.numpy() for buffer in buffers], rows.tolist(), inside.tolist() if topology.is_leader else None, known


@pytest.mark.parametrize("apart", [False, True], ids=["", "own groups"])
@pytest.mark.parametrize("clusters", [((0,), (1,), (2,)), ((0, 2), (1,))], ids=["flat", "clusters"])
def test_every_rank_gets_the_sum_of_all_and_the_message_of_each_leader(clusters, apart):
    results = run_ranks(_exchange, 3, clusters, apart)
    for rank, (buffers, rows, inside, known) in enumerate(results):
        for bucket, buffer in enumerate(buffers):
            np.testing.assert_allclose(buffer, np.arange(4.0) * 111 + 3 * bucket)
        assert rows == [[i + 1, members[0] + 10] for i, members in enumerate(clusters)]
        mine = next(members for members in clusters if rank in members)
        assert known == (mine[0], clusters.index(mine), rank == mine[0], len(clusters), mine)
        if rank == mine[0]:
            assert inside == [float(sum(10**member for member in mine))] * 2
