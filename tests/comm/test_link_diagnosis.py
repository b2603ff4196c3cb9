"""Plain sums on a link that is thin, then not, and stalls once: what rank 0 says of it, in counted time."""

import logging
import re
from types import SimpleNamespace

import numpy as np
import pytest

from lightning_hetero.comm.agreement.sync_schedule import ExchangeSchedule
from lightning_hetero.comm.gradients.ddp_hook import HookState
from lightning_hetero.comm.link_diagnosis import NetworkWatch
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.link.diagnosis import LongWait
from lightning_hetero.core.observations import StepObservations
from tests import loops
from tests.counted import CountedTime
from tests.helpers import run_ranks

FAT, THIN = 50e6, 20.0
"""Bytes per second; 400 bytes of gradients take 20 s at the lower rate."""
SLOW, STALL, COMPUTE = 8, 22, 0.02


def _run(rank, front_end, settings):
    counted, said, handler, steps = CountedTime(rank, THIN), [], logging.Handler(), iter(range(1, 100))
    handler.emit = lambda record: said.append((record.levelname, record.getMessage()))
    logging.getLogger("lightning_hetero").addHandler(handler)

    def loss(output, x, y):
        step = next(steps)
        counted.rate = THIN if step <= SLOW or step == STALL else FAT
        counted.spend(COMPUTE * (1 + 9 * rank))  # rank 1 is slow: that is no network
        return loops.nn.functional.mse_loss(output, y)

    loops.LOSSES["counted"] = loss
    settings = {"local_batch_sizes": (2, 2), "replan": 8, **settings}
    loops.FRONT_ENDS[front_end](rank, settings, 2, world_size=2, loss="counted")
    return [(level, text) for level, text in said if "network" in text]


@pytest.mark.parametrize("front_end", loops.FRONT_ENDS)
def test_rank_0_says_when_the_network_is_thin_and_when_it_stalls(front_end):
    """After looks at 8, 16, 24 and 32 of 38 steps; before the first, which is minutes away, what it saw itself."""
    said, other = run_ranks(_run, 2, front_end, {})
    assert other == [], "a rank other than 0 speaks"
    early, thin, over, stalled, over_again = said
    assert early[0] == "INFO"
    found = re.match(
        r"step 2: perhaps network-bound: this worker computed for ([\d.]+) s and then waited for gradients for "
        r"([\d.]+) s",
        early[1],
    )
    assert float(found[1]) == pytest.approx(COMPUTE, rel=0.05)
    assert float(found[2]) == pytest.approx(20 + 9 * COMPUTE, rel=0.01)
    assert thin[0] == "WARNING"
    assert re.match(
        r"network-bound: a step waits for the network for 20 s and computes for 0\.[12]\d* s; a worker sends "
        r"0\.0004 MB in it, at about 0\.00016 Mbit/s\. To wait less, send less \(compression=",
        thin[1],
    )
    assert "hierarchy" not in thin[1], "advice that two workers have no use for"
    assert stalled[0] == "WARNING"
    assert (
        "the network stalled. The longest of 8 steps waited for it for 20 s, most of the others for 0.0001"
        in stalled[1]
    )
    for level, text in (over, over_again):
        assert level == "INFO"
        assert text.startswith("no longer network-bound: a step waits for the network for 0.0001")


def test_of_compressed_gradients_it_is_the_messages_that_count():
    """About half of the blocks, in bfloat16, in place of 400 bytes."""
    thin = run_ranks(_run, 2, "lightning", {"compression": "block_topk(density=0.5)"})[0][1]
    found = re.match(r"network-bound: a step waits .* a worker sends ([\d.e-]+) MB in it", thin[1])
    assert 0 < float(found[1]) < 0.0004
    assert "send less (a lower density;" in thin[1], "advice to do what is done"


def test_a_thin_link_that_decides_on_delays_is_said_once():
    """With ``staleness=1`` the rule of the delays says it, which knows transfers; a stall is no matter of delays."""
    said, other = run_ranks(_run, 2, "lightning", {"staleness": 1})
    assert other == []
    bound = [text for level, text in said if level == "WARNING"]
    assert [text.partition(":")[0] for text in bound] == ["staleness", "staleness", "network-bound"]
    assert "the network stalled" in bound[-1]


# one rank alone


@pytest.fixture
def said():
    lines, handler, logger = [], logging.Handler(), logging.getLogger("lightning_hetero")
    handler.emit = lambda record: lines.append((record.levelname, record.getMessage()))
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def watch(rank=0, workers=2, config=None):
    """Of a rank that has summed 4 MB in each of ten steps."""
    hook = HookState(SimpleNamespace(synced_steps=10), workers)
    hook.num_bytes = 40_000_000
    return NetworkWatch(HeteroConfig() if config is None else config, rank, hook, None)


def waited(seconds, step=10):
    return SimpleNamespace(long_wait=LongWait(seconds, 0.02, seconds), synced_steps=step)


def schedule(last, following):
    found = ExchangeSchedule("auto")
    found.done(last, following)
    return found


def test_a_long_wait_is_a_warning_once_workers_were_compared_and_comes_again_when_it_doubles(said):
    one = watch()
    for seconds in (36.0, 40.0, 71.0, 73.0):
        one.see_wait(waited(seconds), schedule(8, 40))
    one.see_wait(waited(200.0), None)
    assert [level for level, _ in said] == ["WARNING"] * 3
    assert "waited for gradients for 36 s, in which a worker sends 4 MB" in said[0][1]
    assert said[0][1].endswith("in 30 steps, a comparison of the workers will tell")
    assert said[2][1].endswith("or another worker fell behind"), "ranks that are not compared"


@pytest.mark.parametrize(("rank", "step"), [(1, 10), (0, 1)])
def test_neither_another_rank_nor_the_first_step_says_so(said, rank, step):
    watch(rank).see_wait(waited(36.0, step), None)
    assert said == []


@pytest.mark.parametrize(
    ("workers", "config", "advised"),
    [(2, {}, False), (3, {}, True), (3, {"hierarchy": [[0, 1], [2]]}, False)],
)
def test_clusters_are_advised_where_there_may_be_some_and_are_none(said, workers, config, advised):
    ones = np.ones((8, workers))
    seen = StepObservations(8 * ones, 0.01 * ones, 0.01 * ones, ones, 0 * ones, 36 * ones, ones)
    watch(workers=workers, config=HeteroConfig(**config)).look(seen, accumulation=1, watched=False)
    ((level, text),) = said
    assert level == "WARNING"
    assert 'compression="block_topk' in text
    assert ('hierarchy="auto"' in text) is advised
