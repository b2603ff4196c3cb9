"""What others read of an engine before its first step, and what a checkpoint gives back."""

import numpy as np
import torch

from lightning_hetero.comm.timing.clock import HostClock
from lightning_hetero.comm.timing.step_timer import StepTimer
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.batching.plan import BatchPlan, PlanEntry
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.data import PermutationStream
from lightning_hetero.engine import HeteroEngine


def engine_of_one():
    return HeteroEngine(HeteroConfig(), rank=0, world_size=1, device=torch.device("cpu"))


def test_an_engine_stands_where_its_data_begins():
    stream = PermutationStream(40, shuffle=False, seed=0)
    engine = engine_of_one()
    engine.shard(stream, batch_size=4, epoch=3)
    assert engine.position == (3, 0)
    engine = engine_of_one()
    engine.resume_at(2, 5)
    assert engine.position == (2, 5)
    engine.shard(stream, batch_size=4, epoch=1)
    assert engine.position == engine.sampler.start == (2, 5)


def test_stale_sums_are_saved_again_where_no_model_and_no_data_has_come():
    engine, held = engine_of_one(), {"delayed": ["w"], "sums": {"w": torch.ones(2)}}
    engine.load_state_dict({"staleness": held})
    assert engine.state_dict() == {"staleness": held}


def test_the_time_of_writing_a_checkpoint_is_no_part_of_a_step(monkeypatch):
    """Neither by the clock nor by the processor's, of which a quota would be thought used up."""
    now, spent = [0.0], [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    engine = engine_of_one()
    engine.observer = StepTimer(HostClock(), cores=0.5, processor_time=lambda: spent[0])
    engine.shard(PermutationStream(80, shuffle=False, seed=0), batch_size=2)
    for step in range(8):
        engine.begin_step(0, step)
        now[0], spent[0] = now[0] + 1.0, spent[0] + 0.5
        with engine.backward():
            engine.observer.bucket_done(engine.observer.bucket_ready())
            now[0], spent[0] = now[0] + 1.0, spent[0] + 0.5
        engine.end_step()
        if step == 5:
            engine.state_dict()
            now[0], spent[0] = now[0] + 100.0, spent[0] + 100.0
    rows = engine.observer.take()
    rows = rows[~np.isnan(rows[:, 0])]
    step_times = rows[:, 1 + StepObservations.FIELDS.index("step_time")]
    np.testing.assert_array_equal(np.isnan(step_times), rows[:, 0] == 7)
    assert np.nanmax(step_times) == np.nanmin(step_times) == 2.0
    assert len(np.unique(rows[:, 2:5], axis=0)) == 1, "computing times are the same in all steps"


def test_shares_are_those_of_the_newest_plan():
    """The next epoch's evaluation is split by them, whatever runs until then."""
    engine = engine_of_one()
    assert engine.current_shares() == (1.0,)
    for step, sizes in ((0, (4, 4)), (9, (6, 2))):
        engine.data.plans.append(PlanEntry(0, step, BatchPlan(8, sizes)))
    assert engine.plan.local_batch_sizes == (4, 4)
    assert engine.current_shares() == (0.75, 0.25)
