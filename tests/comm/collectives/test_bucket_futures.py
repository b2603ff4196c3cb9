"""A sum that gloo does not end can be failed, and the process leaves its groups and ends all the same."""

import subprocess
import sys
import threading
from functools import partial

import pytest
import torch

from lightning_hetero.comm.collectives import bucket_futures
from lightning_hetero.comm.collectives.bucket_futures import BucketFutures
from tests.helpers import free_port

CPU = torch.device("cpu")


@pytest.fixture
def futures(monkeypatch):
    monkeypatch.setattr(bucket_futures, "keep_groups", lambda: None)
    return BucketFutures()


def test_what_ends_in_time_is_passed_on(futures):
    good, bad = torch.futures.Future(), torch.futures.Future()
    first, second = futures.stand_in(good, CPU), futures.stand_in(bad, CPU)
    good.set_result([torch.ones(2)])
    bad.set_exception(ValueError("from gloo"))
    assert torch.equal(first.wait()[0], torch.ones(2))
    with pytest.raises(ValueError, match="from gloo"):
        second.wait()
    assert futures.fail("late", patience_s=0.0) == 0


def test_what_ends_while_others_are_let_go_is_not_failed(futures):
    ends, never = torch.futures.Future(), torch.futures.Future()
    first, second = futures.stand_in(ends, CPU), futures.stand_in(never, CPU)
    forward = futures.held[1]()
    thread = threading.Timer(0.1, partial(ends.set_result, 3))
    thread.start()
    assert futures.fail("Connection closed", patience_s=1.0) == 1
    thread.join()
    assert first.wait() == 3
    with pytest.raises(RuntimeError, match="Connection closed"):
        second.wait()
    assert futures.fail("again", patience_s=0.0) == 0
    never.set_result(4)  # long after
    forward(never)  # by hand, as torch hides errors of callbacks


def test_who_waits_for_a_failed_one_is_told_through_callbacks(futures):
    """As DDP waits for what the hook has made of the sum."""
    made = futures.stand_in(torch.futures.Future(), CPU).then(lambda done: done.value() + 1)
    futures.fail("Connection closed", patience_s=0.0)
    with pytest.raises(RuntimeError, match="Connection closed"):
        made.wait()


def test_groups_are_kept_only_if_a_call_is_stuck(monkeypatch):
    kept = []
    monkeypatch.setattr(bucket_futures, "keep_groups", lambda: kept.append(1))
    futures = BucketFutures()
    sent = torch.futures.Future()
    futures.stand_in(sent, CPU)
    sent.set_result(1)
    futures.fail("x", patience_s=0.0)
    assert kept == []
    futures.stand_in(torch.futures.Future(), CPU)
    futures.fail("x", patience_s=0.0)
    assert kept == [1]


def test_the_callback_of_a_stuck_call_is_not_waited_for(futures):
    never = torch.futures.Future()
    futures.stand_in(never, CPU)
    assert [callback() for callback in futures.held] != [None], "gloo's thread may free it while the process ends"
    futures.fail("x", patience_s=0.0)
    assert not futures.held


def test_older_callbacks_than_are_kept_in_view_may_fail(futures):
    futures.stand_in(torch.futures.Future(), CPU)
    futures.held.clear()
    assert futures.fail("x", patience_s=0.0) == 1


STUCK = """
import gc, os, sys, time, torch, torch.distributed as dist
from lightning_hetero.comm.collectives.bucket_futures import BucketFutures
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
rank, port = int(sys.argv[1]), int(sys.argv[2])
store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
if rank == 1:
    time.sleep(300)
futures = BucketFutures()
waited = futures.stand_in(dist.all_reduce(torch.ones(4), async_op=True).get_future(), torch.device("cpu"))
assert futures.fail("Connection closed", patience_s=0.1) == 1
try:
    waited.wait()
except RuntimeError as error:
    print(error)
dist.destroy_process_group()
gc.collect()
print("left", flush=True)
"""


def test_a_process_with_a_stuck_call_leaves_its_groups_and_ends():
    port = str(free_port())
    command = [sys.executable, "-c", STUCK]
    with subprocess.Popen([*command, "1", port], stdout=subprocess.DEVNULL) as other:
        done = subprocess.run([*command, "0", port], capture_output=True, text=True, timeout=120)
        other.kill()
    assert done.stdout.splitlines() == ["Connection closed", "left"]
    assert done.returncode == 0, done.stderr
