"""A worker leaves its process groups although a call in them waits for others."""

import os
import socket
import subprocess
import sys
import threading
import time
from functools import partial

import torch
import torch.distributed as dist

from lightning_hetero.comm.membership import group_sockets
from lightning_hetero.comm.membership.group_sockets import connect, making_group, shut_down_groups
from tests.helpers import free_port, run_ranks


def _waits(rank):
    """Rank 1 never takes part: it is not lost, so the call of rank 0 would wait for half an hour."""
    dist.init_process_group("gloo")
    group = connect(partial(dist.new_group, backend="gloo"), None)
    value = torch.ones(4)
    dist.all_reduce(value, group=group)
    ready = dist.distributed_c10d._get_default_store()
    if rank == 1:
        ready.get("left")  # waits until rank 0 has left
        return None
    failed = []

    def wait():
        try:
            dist.all_reduce(value, group=group)
        except RuntimeError as error:
            failed.append(type(error).__name__)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    closed = shut_down_groups()
    thread.join(timeout=30)
    ready.set("left", "yes")
    return closed, thread.is_alive(), failed


def test_a_waiting_call_fails_when_its_sockets_are_shut_down():
    closed, waits, failed = run_ranks(_waits, 2, timeout=60)[0]
    assert closed >= 1
    assert not waits
    assert failed == ["RuntimeError"]


def _late(rank):
    group_sockets.CONNECT_S = 0.2
    dist.init_process_group("gloo")
    group = connect(partial(dist.new_group, backend="gloo"), None)
    if rank == 1:
        time.sleep(1.0)  # as a long step
    value = torch.ones(1)
    dist.all_reduce(value, group=group)
    return float(value)


def test_the_short_timeout_is_that_of_the_making_alone():
    assert run_ranks(_late, 2) == [2.0, 2.0]


def test_other_sockets_stay():
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    with making_group():
        inside = socket.create_connection(listener.getsockname())
        server = socket.create_server(("127.0.0.1", 0))
    first, second = listener.accept()[0], listener.accept()[0]
    assert shut_down_groups() == 1, "the one that was made inside; a listening one stays"
    client.sendall(b"a")
    assert first.recv(1) == b"a"
    assert second.recv(1) == b"", "its peer sees the end"
    reached = socket.create_connection(server.getsockname())
    accepted = server.accept()[0]
    assert shut_down_groups() == 0, "each is shut down once"
    for one in (listener, client, inside, server, first, second, reached, accepted):
        one.close()


ENDS_IN_A_CALL = """
import sys, time, torch, torch.distributed as dist
from lightning_hetero.comm.membership.roster import Roster
rank, port = int(sys.argv[1]), int(sys.argv[2])
if rank == 0:
    assert Roster.of_process() is not None
store = dist.TCPStore("127.0.0.1", port, is_master=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)  # its sockets are not known, and stay
if rank == 1:
    time.sleep(300)
running = dist.all_reduce(torch.ones(4), async_op=True)
print("the script is over")
"""


def test_a_worker_ends_although_a_call_does_not():
    """Gloo may not notice that the connections are shut down."""
    port = free_port()
    holder = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    place = {"LIGHTNING_HETERO_SLOT": "0", "LIGHTNING_HETERO_SLOTS": "2", "LIGHTNING_HETERO_LIFE": "0"}
    env = {**os.environ, **place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", ENDS_IN_A_CALL]
    with subprocess.Popen([*command, "1", str(port)], env=env) as other:
        done = subprocess.run([*command, "0", str(port)], env=env, capture_output=True, text=True, timeout=120)
        other.kill()
    assert done.stdout == "the script is over\n", done.stderr
    assert done.returncode == 0, done.stderr
    del holder
