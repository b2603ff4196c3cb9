"""Numbers from the job's store: each for one asker, in loader workers as well."""

import itertools
import pickle

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_hetero.comm.agreement.shared_counter import SharedCounter
from lightning_hetero.comm.membership.roster import MembersStore
from lightning_hetero.comm.membership.slots import GENERATION
from tests.helpers import free_port, run_ranks


class Numbers(IterableDataset):
    def __init__(self, counter, most):
        self.counter, self.most = counter, most

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return itertools.takewhile(lambda number: number < self.most, self.counter.numbers("key", worker, workers))


def _claimed(rank, workers):
    dist.init_process_group("gloo")
    counters = [SharedCounter.of_job(rank, 2) for _ in range(2)]
    found = [list(DataLoader(Numbers(counter, 11), None, num_workers=workers)) for counter in counters]
    dist.barrier()
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_each_number_is_given_once_in_each_run(workers):
    results = run_ranks(_claimed, 2, workers)
    for run in range(2):
        assert sorted(n for found in results for n in found[run]) == list(range(11))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_single_rank_shares_them_among_its_workers(workers):
    numbers = list(DataLoader(Numbers(SharedCounter.of_job(0, 1), 11), None, num_workers=workers))
    assert sorted(numbers) == list(range(11))


def test_a_store_in_a_file_is_opened_by_its_path(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    counter = SharedCounter(store, "prefix")
    assert next(counter.numbers("key")) == 0
    assert next(pickle.loads(pickle.dumps(counter)).numbers("key")) == 1


def test_workers_reach_the_store_of_a_job_with_keepers(monkeypatch):
    job = dist.TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    found = []
    for generation in range(2):
        monkeypatch.setenv(GENERATION, str(generation))
        members = MembersStore(dist.PrefixStore(f"generation/{generation}", job), lambda: False)
        store = dist.PrefixStore("0", members)
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda store=store: store)
        counter = SharedCounter.of_job(0, 2)
        found += [next(counter.numbers("key")), next(pickle.loads(pickle.dumps(counter)).numbers("key"))]
    assert found == [0, 1, 0, 1], "workers that meet anew count anew"


def test_a_store_of_one_process_cannot_be_used_by_others():
    counter = pickle.loads(pickle.dumps(SharedCounter(dist.HashStore(), "prefix")))
    with pytest.raises(ValueError, match="loader workers cannot claim shards"):
        next(counter.numbers("key"))
