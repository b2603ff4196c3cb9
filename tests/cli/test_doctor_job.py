"""Place of a process in a job, and what is wrong with it, by given environments and facts."""

import pytest

from lightning_hetero.cli.doctor.job import Job, group_problems, interface_problems, job_of
from tests.cli.findings import process

TORCHRUN = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environment", "job"),
    [
        ({}, Job()),
        (TORCHRUN, Job(3, 4, 1)),
        ({"WORLD_SIZE": "1", "RANK": "0"}, Job()),
        ({"WORLD_SIZE": "", "RANK": ""}, Job()),
    ],
)
def test_the_place_in_a_job(environment, job):
    assert job_of(environment) == job


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        (
            {"WORLD_SIZE": "2"},
            "WORLD_SIZE=2 is set, and RANK, MASTER_ADDR and MASTER_PORT are not: a script would wait",
        ),
        ({**TORCHRUN, "MASTER_ADDR": ""}, "WORLD_SIZE=4 is set, and MASTER_ADDR is not"),
        ({**TORCHRUN, "RANK": "4"}, "RANK=4 is not below WORLD_SIZE=4"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two' is no whole number"),
        ({"RANK": "1"}, "RANK=1 is set, and WORLD_SIZE is not"),
        ({"RANK": "1", "WORLD_SIZE": " "}, "RANK=1 is set, and WORLD_SIZE is not"),
        ({**TORCHRUN, "RANK": "1", "WORLD_SIZE": "1"}, "RANK=1 is not below WORLD_SIZE=1"),
    ],
)
def test_a_wrong_environment_is_said_and_the_process_checked_alone(environment, told):
    job = job_of(environment)
    assert job.alone
    assert told in job.problems[0]
    assert "torchrun" in job.problems[0]


@pytest.mark.parametrize("name", ["lightning-hetero", "python", "torch", "lightning", "nccl"])
def test_versions_that_differ_are_told(name):
    (differ,) = group_problems([process(0, versions={name: "1.0", "numpy": "2.0"}), process(1, versions={name: None})])
    assert differ == f"{name} differs between ranks (rank 0: 1.0, rank 1: none). Install the same everywhere."


@pytest.mark.parametrize(
    ("variables", "fault"),
    [
        ({}, ""),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, ""),
        (
            {"GLOO_SOCKET_IFNAME": "eth"},
            "GLOO_SOCKET_IFNAME=eth: eth is no interface of rank 0's machine, which has lo, eth0",
        ),
        ({"GLOO_SOCKET_IFNAME": "lo,eth0"}, ""),
        ({"GLOO_SOCKET_IFNAME": "eth9,eth0"}, "GLOO_SOCKET_IFNAME=eth9,eth0: eth9 is no interface"),
        ({"GLOO_SOCKET_IFNAME": "=eth0"}, "GLOO_SOCKET_IFNAME==eth0: =eth0 is no interface"),
        ({"GLOO_SOCKET_IFNAME": "^lo"}, "GLOO_SOCKET_IFNAME=^lo: ^lo is no interface"),
        ({"NCCL_SOCKET_IFNAME": "eth9,eth"}, ""),
        ({"NCCL_SOCKET_IFNAME": "eth"}, ""),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, "NCCL_SOCKET_IFNAME==eth: =eth is no interface"),
        ({"NCCL_SOCKET_IFNAME": "^lo,docker"}, ""),
        ({"NCCL_SOCKET_IFNAME": "^lo,eth"}, "^lo,eth is no interface"),
        ({"GLOO_SOCKET_IFNAME": "lo"}, "GLOO_SOCKET_IFNAME=lo reaches no other machine"),
        ({"NCCL_SOCKET_IFNAME": "=lo"}, "NCCL_SOCKET_IFNAME=lo reaches no other machine"),
    ],
)
def test_interfaces_that_gloo_and_nccl_are_told_to_use(variables, fault):
    found = interface_problems([process(0, sockets=variables), process(1, "lab2", sockets=variables)])
    assert [fault in text for text in found] == [True] * bool(fault)
