"""How tests start their ranks: forked, or from the beginning where a GPU is used."""

import os
import sys
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.helpers import RankError, run_ranks


def _began(rank, parent):
    return os.environ["RANK"], os.environ["MASTER_ADDR"], os.getppid() == parent, "tests.test_helpers" in sys.modules


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_ranks_know_who_they_are(start):
    assert run_ranks(_began, 2, os.getpid(), start=start) == [(str(rank), "127.0.0.1", True, True) for rank in (0, 1)]


def _warns(rank):
    warnings.warn("the stream does not match", UserWarning, stacklevel=1)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_warning_is_an_error_in_a_rank(start):
    with pytest.raises(RankError, match="the stream does not match"):
        run_ranks(_warns, 1, start=start)


def test_a_gpu_in_the_process_that_forks_is_an_error(monkeypatch):
    """Not in every test that follows, with another message in each."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="spawn"):
        run_ranks(_began, 1, os.getpid())


def _reads_late(rank):
    """Rank 0, which holds the store, is done before rank 1 opens its last group."""
    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.set("left", "behind")
        return "behind"
    time.sleep(0.5)
    return store.get("left").decode()


def test_the_store_lasts_until_all_ranks_are_done():
    assert run_ranks(_reads_late, 2) == ["behind"] * 2
