"""Notes in the job's store: one first failure, a roll call that only living ranks answer, and the end of rank 0."""

import os
import threading
import time

import pytest
import torch.distributed as dist

from lightning_hetero.comm.failures.bulletin import Bulletin, launcher_holds_store
from lightning_hetero.comm.failures.failure import Failure
from tests.helpers import free_port


def hash_stores(world_size, _folder):
    store = dist.HashStore()
    return [store] * world_size


def file_stores(world_size, folder):
    return [dist.FileStore(str(folder / "store"), world_size) for _ in range(world_size)]


def tcp_stores(world_size, _folder):
    port = free_port()
    holder = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    return [holder] + [dist.TCPStore("127.0.0.1", port, wait_for_workers=False) for _ in range(world_size - 1)]


@pytest.fixture(params=[hash_stores, file_stores, tcp_stores], ids=lambda stores: stores.__name__)
def ranks(request, tmp_path):
    """Three ranks over a store of each kind."""
    return [Bulletin(rank, 3, dist.PrefixStore("x", s)) for rank, s in enumerate(request.param(3, tmp_path))]


def test_the_first_failure_stays_the_first(ranks):
    first, second = Failure(2, "ValueError: bad"), Failure(1, "RuntimeError: Connection closed")
    assert ranks[0].known() is None
    assert ranks[2].report(first) == first
    assert ranks[1].report(second) == first
    assert ranks[0].poll()
    assert ranks[0].first == first
    ranks[0].poll()
    assert not ranks[0].poll(), "nothing is new"


def test_ranks_that_do_not_answer_a_roll_call_are_silent(ranks):
    over = threading.Event()

    def answers():
        while not over.wait(0.005):
            ranks[1].poll()

    thread = threading.Thread(target=answers)
    thread.start()
    try:
        assert ranks[0].roll_call(2.0) == [2]
    finally:
        over.set()
        thread.join()
    assert ranks[2].roll_call(0.0) == []


def test_a_roll_call_ends_when_a_failure_is_known(ranks):
    ranks[1].report(Failure(1, "ValueError: bad"))
    began = time.monotonic()
    assert ranks[0].roll_call(60.0) == []
    assert time.monotonic() - began < 50.0
    assert ranks[0].first is not None


def test_a_roll_call_does_not_wait_for_ranks_that_have_left(ranks):
    for rank in (1, 2):
        ranks[rank].leave()
    began = time.monotonic()
    assert ranks[0].roll_call(60.0) == [1, 2]
    assert time.monotonic() - began < 50.0
    assert not ranks[0].remains(1)


def test_the_end_of_rank_0_is_known(ranks):
    assert not ranks[1].poll()
    ranks[0].end()
    assert ranks[1].poll()
    assert ranks[1].over
    assert not ranks[2].over


def test_who_holds_the_store_waits_until_the_others_have_read(ranks):
    ranks[0].end()
    ranks[2].leave()
    done = threading.Thread(target=ranks[0].settle, args=(60.0,))
    done.start()
    assert done.is_alive()
    ranks[1].poll()
    done.join(50.0)
    assert not done.is_alive()


def test_it_waits_for_no_failed_rank_and_not_for_ever(ranks):
    ranks[0].report(Failure(1, "silent"))
    ranks[2].poll()
    ranks[0].settle(60.0)
    ranks[0].end()
    began = time.monotonic()
    ranks[0].settle(0.1)
    assert 0.1 <= time.monotonic() - began < 50.0


def test_signs_of_life(ranks):
    assert ranks[0].sign_of(1) == ""
    ranks[1].sign("1 0 0 0 0")
    deadline = time.monotonic() + 20
    while ranks[0].sign_of(1) == "" and time.monotonic() < deadline:  # a store does not wait for what it sets
        time.sleep(0.01)
    assert ranks[0].sign_of(1) == "1 0 0 0 0"


def test_a_rank_begins_another_training(ranks):
    """Notes that have been deleted do not come back."""
    ranks[1].begin_another()
    assert not ranks[1].has_begun_another(1)
    ranks[1].sign_in()
    ranks[1].begin_another()
    assert ranks[1].has_begun_another(1)
    assert not ranks[1].has_begun_another(0)


def test_only_an_own_child_is_found():
    store = dist.HashStore()
    parent, own = (Bulletin(rank, 4, store) for rank in (0, 2))
    pid = os.fork()
    if pid == 0:
        time.sleep(60.0)
        os._exit(0)
    store.set("process/1", f"{pid} {os.uname().nodename}")
    store.set("process/3", f"{pid} another host")
    assert parent.child(1) == pid
    own.sign_in()
    assert parent.child(2) is None, "this very process"
    assert parent.child(3) is None
    assert parent.child(0) is None, "not known"
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    store.set("process/1", f"{pid} {os.uname().nodename}")
    assert parent.child(1) is None, "it is gone"


@pytest.mark.parametrize(("value", "holds"), [("True", True), ("False", False), (None, False)])
def test_who_holds_the_store_is_said(monkeypatch, value, holds):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    if value is not None:
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", value)
    assert launcher_holds_store() is holds
    assert ("launcher" in Bulletin(0, 2, dist.HashStore()).holder) is holds
