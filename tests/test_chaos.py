"""The account of the benchmarks that make workers fail finds what is lost."""

import importlib
import logging
import random
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.kept import Forked, run_kept

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def benchmarks():
    """Import a benchmark; what it imports beside it is forgotten afterwards."""
    before, paths = set(sys.modules), list(sys.path)
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module
    finally:
        sys.path[:] = paths
        for logger, level in zip(loggers, levels, strict=True):  # the demo, which the soak trains, sets them
            logger.setLevel(level)
        for name in set(sys.modules) - before:
            if Path(getattr(sys.modules[name], "__file__", None) or "").parent in (FOLDER, FOLDER.parent / "examples"):
                del sys.modules[name]


@pytest.fixture
def job(benchmarks, tmp_path):
    """A job whose keepers and workers are forked."""
    fit = benchmarks("_lossy_fit")
    given = (fit.fit, fit.WORKERS, tmp_path, 0.0005, False)
    function = partial(run_kept, *given, restarts=100, silence=2.0, timeout=240.0)
    return benchmarks("_lossy_job").Job(tmp_path, Forked(function, {}))


@pytest.mark.timeout(280)
def test_no_sample_is_lost_in_some_faults(benchmarks, job):
    chaos = benchmarks("chaos")
    kinds = ["kill", "link cut", "freeze", "pause", "segfault"]
    *found, total = chaos.train(job, random.Random(1), kinds, 0.3, 3)
    assert sorted(row["kind"] for row in found) == sorted(kinds)
    assert total["events"] == len(kinds)
    assert total["lives"] >= 4 + 3, "three were started again"
    assert total["samples"] == 960 * total["epochs"]
    assert total["goodput"] > 0
    assert total["calm_goodput"] > 0


def test_a_fault_that_loses_all_workers_costs_the_time_until_they_train_anew(benchmarks):
    """No step from before the fault is in the weights."""
    chaos, event = benchmarks("chaos"), SimpleNamespace(at=10.0)
    assert chaos.stall([SimpleNamespace(time=at) for at in (14.0, 15.0)], event) == 4.0
    assert chaos.stall([SimpleNamespace(time=at) for at in (9.5, 10.25, 12.75, 20.0)], event) == 2.5


def lives(benchmarks, groups):
    """Lives whose notes say that these groups of ranks took the steps; one sample a rank and step."""
    module, slots = benchmarks("_lossy_job"), {}
    for number, (start, steps) in enumerate(groups):
        for rank in range(len(steps[0])):
            life = slots.setdefault(rank, module.Life(rank, 0, 1, 0.0))
            place = {"generation": number, "rank": rank, "time": float(number)}
            life.notes.append({"start": start, "world": len(steps[0]), **place})
            for step, samples in enumerate(steps, start):
                life.notes.append({"step": step, "epoch": 0, "samples": [samples[rank]], **place})
                life.notes.append({"done": step, **place})
    return list(slots.values())


def test_steps_that_nobody_has_any_more_are_void(benchmarks):
    module = benchmarks("_lossy_job")
    noted = lives(benchmarks, [(0, [(0, 1), (2, 3), (4, 5)]), (1, [(6,), (7,)])])
    steps, void = module.steps_in_the_weights(noted, 3)
    assert [step.samples for step in steps] == [((0,), (1,)), ((6,),), ((7,),)]
    assert void == 2


def test_a_step_without_the_notes_of_a_rank_is_an_error(benchmarks):
    module = benchmarks("_lossy_job")
    noted = lives(benchmarks, [(0, [(0, 1), (2, 3)])])
    noted[1].notes = noted[1].notes[:3]
    with pytest.raises(module.LossError, match=r"step 1 of group 0: of 2 ranks, \[0\]"):
        module.steps_in_the_weights(noted, 2)
    with pytest.raises(module.LossError, match="first 1 steps"):
        module.steps_in_the_weights(lives(benchmarks, [(1, [(0, 1)])]), 2)


def epoch(module, order):
    total = module.TOTAL
    return [module.Step(0, (tuple(order[at : at + total]),), 0.0) for at in range(0, len(order), total)]


def test_a_lost_sample_and_one_that_is_taken_twice_are_errors(benchmarks):
    module = benchmarks("_lossy_job")
    order = list(range(module.SAMPLES))
    module.check_samples(epoch(module, order))
    order[5] = 7
    with pytest.raises(module.LossError, match=r"lacks the samples \[5\] and has \[7\] more than once"):
        module.check_samples(epoch(module, order))
    with pytest.raises(module.LossError, match="step 29 has 31 samples"):
        module.check_samples(epoch(module, list(range(module.SAMPLES - 1))))


def test_weights_of_other_samples_are_an_error(benchmarks, tmp_path):
    module, torch = benchmarks("_lossy_job"), pytest.importorskip("torch")
    steps = epoch(module, list(range(module.SAMPLES)))
    weights = module.alone(steps)
    noted = module.Life(0, 0, 1, 0.0, [{"start": 0, "world": 1, "generation": 0, "rank": 0, "time": 0.0}])
    for number, step in enumerate(steps):
        more = {"epoch": 0, "generation": 0, "rank": 0, "time": 0.0}
        noted.notes.append({"step": number, "samples": step.samples[0], **more})

    class Ended:
        folder, lives, workers = tmp_path, {"one": noted}, module.WORKERS

    for slot in range(module.WORKERS):
        torch.save({"weights": weights, "steps": len(steps)}, tmp_path / f"end-{slot}.pt")
    assert module.account(Ended)[1:] == (0, 0.0)
    noted.notes[1]["samples"], noted.notes[2]["samples"] = noted.notes[2]["samples"], noted.notes[1]["samples"]
    with pytest.raises(module.LossError, match="weights differ"):
        module.account(Ended)
    torch.save({"weights": module.alone(steps[:1]), "steps": len(steps)}, tmp_path / "end-2.pt")
    with pytest.raises(module.LossError, match="different weights"):
        module.account(Ended)


def test_the_soak_gives_its_cores_and_its_longest_life(benchmarks):
    module = benchmarks("soak")
    soak = module.Soak(None, random.Random(0), 1.0)
    begin = soak.cores[0][0]
    soak.cores += [(begin + 10.0, 1.0), (begin + 20.0, 0.5)]
    assert soak.cores_between(begin, begin + 40.0) == pytest.approx((10 * 1.44 + 10 * 1.0 + 20 * 0.5) / 40)
    assert soak.cores_between(begin + 15.0, begin + 25.0) == pytest.approx(0.75)
    soak.census = {
        1: [(float(at), 100.0 + at, 5, 3) for at in range(0, 1000, 10)],
        2: [(0.0, 7.0, 1, 1), (20.0, 9.0, 1, 1)],
    }
    found = module.longest_life(soak)
    assert found["life_s"] == 990
    assert found["memory_after"] - found["memory_before"] == pytest.approx(480, abs=30)
    assert found["files_before"] == found["files_after"] == 5


def test_notes_of_another_job_are_refused(benchmarks, tmp_path):
    folder = benchmarks("_lossy_job").notes_folder(tmp_path / "new" / "notes")
    assert folder.is_dir()
    (folder / "notes-0-0-17.jsonl").touch()
    with pytest.raises(SystemExit, match="must be empty"):
        benchmarks("_lossy_job").notes_folder(folder)
