"""Trainings under real launchers that are told to end: none hangs, each leaves a checkpoint and its exit code.

A few of the cases of ``runs.py``, which has all of them, and tells each training at many random moments.
"""

import random

import pytest

from tests.preemption import runs

CASES = [
    ("script", "lightning", "stale", "one"),
    ("torchrun", "lightning", "elastic", "launcher"),
    ("torchrun", "lightning", "fsdp", "all"),
    ("slurm", "lightning", "plain", "all"),
    ("launch", "accelerate", "plain", "launcher"),
    ("launch", "transformers", "plain", "all"),
    ("torchrun", "fabric", "plain", "one"),
    ("torchrun", "own", "plain", "launcher"),
]


def wrong(outcome):
    return {name: text for name, text in vars(outcome).items() if text and name != "seconds"}


@pytest.mark.parametrize(("launcher", "front_end", "mode", "whom"), CASES)
def test_a_training_that_is_told_to_end_saves_and_ends(launcher, front_end, mode, whom):
    assert (launcher, front_end, mode) in runs.CASES
    outcome = runs.run(launcher, front_end, mode, whom, random.Random(f"{launcher} {front_end} {mode}"))
    assert not wrong(outcome), wrong(outcome)


def test_a_job_that_does_not_end_is_counted(monkeypatch):
    monkeypatch.setattr(runs, "END_S", 0.5)
    assert list(wrong(runs.run("slurm", "deaf", "plain", "all", random.Random(0)))) == ["hang"]


def test_a_job_that_saves_nothing_is_counted():
    assert list(wrong(runs.run("slurm", "careless", "plain", "all", random.Random(0)))) == [
        "code",
        "steps",
        "checkpoint",
    ]
