"""Dense all-reduces on a link that is slow, then not, and stalls once: what rank 0 logs of it, in counted time."""

import logging
import re
from types import SimpleNamespace

import numpy as np
import pytest

from lightning_hetero.comm.gradients.ddp_hook import HookState
from lightning_hetero.comm.gradients.sharded_groups import ReduceScatterMean
from lightning_hetero.comm.link.diagnosis import LinkDiagnosis
from lightning_hetero.config import HeteroConfig
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
    said = [(level, text) for level, text in said if "even sizes" not in text]  # no summary
    return [(level, text) for level, text in said if "network" in text or "communication-bound" in text]


@pytest.mark.parametrize("front_end", loops.FRONT_ENDS)
def test_rank_0_says_when_the_network_is_thin_and_when_it_stalls(front_end):
    """After sync rounds at 8, 16, 24 and 32 of 38 steps."""
    said, other = run_ranks(_run, 2, front_end, {})
    assert other == [], "a rank other than 0 speaks"
    thin, over, stalled, over_again = said
    assert thin[0] == "WARNING"
    assert re.match(
        r"communication-bound: a step waits for the network for 20 s \(median 20 s, longest 20 s\) and computes for "
        r"0\.[12]\d* s; a worker sends 0\.0004 MB in it, at about 0\.00016 Mbit/s\. To wait less, send less "
        r"\(compression=",
        thin[1],
    )
    assert "hierarchy" not in thin[1], "advice that two workers have no use for"
    assert stalled[0] == "WARNING"
    assert re.search(r"for the network for 3\.\d+ s \(median 0\.0001\d* s, longest 20 s\)", stalled[1])
    assert "To wait less" not in stalled[1], "advice for every step where one was long"
    for level, text in (over, over_again):
        assert level == "INFO"
        assert text.startswith("no longer communication-bound: a step waits for the network for 0.0001")


def test_of_compressed_gradients_it_is_the_messages_that_count():
    """About half of the blocks, in bfloat16, in place of 400 bytes."""
    thin = run_ranks(_run, 2, "lightning", {"compression": "block_topk(density=0.5)"})[0][0]
    found = re.match(r"communication-bound: a step waits .* a worker sends ([\d.e-]+) MB in it", thin[1])
    assert 0 < float(found[1]) < 0.0004
    assert "send less (a lower density;" in thin[1], "advice to do what is done"


def test_a_thin_link_that_decides_on_delays_is_said_once():
    """With ``staleness=1`` the rule of the delays says it, which knows transfers; a stall is no matter of delays."""
    said, other = run_ranks(_run, 2, "lightning", {"staleness": 1})
    assert other == []
    bound = [text for level, text in said if level == "WARNING"]
    assert [text.partition(":")[0] for text in bound] == ["staleness", "staleness", "communication-bound"]
    assert "longest 20 s" in bound[-1]


# one rank alone


@pytest.fixture
def said():
    lines, handler, logger = [], logging.Handler(), logging.getLogger("lightning_hetero")
    handler.emit = lambda record: lines.append((record.levelname, record.getMessage()))
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def diagnosis(workers, config):
    """Of a rank that has summed 4 MB in each of ten steps."""
    hook = HookState(SimpleNamespace(synced_steps=10), workers)
    hook.num_bytes = 40_000_000
    return LinkDiagnosis(config, 0, hook)


def observed(workers, wait):
    """Eight steps that wait for the network for so long."""
    ones = np.ones((8, workers))
    return StepObservations(8 * ones, 0.01 * ones, 0.01 * ones, ones, 0 * ones, wait * ones, ones)


def test_a_sharded_model_is_not_told_to_compress(said):
    """FSDP sends gradients itself, so that there is neither compression nor a hierarchy."""
    sharded = diagnosis(4, HeteroConfig())
    sharded.hook.use(ReduceScatterMean(4))
    sharded.observe(observed(4, 36.0), accumulation=1)
    ((level, text),) = said
    assert level == "WARNING"
    assert "reshard_after_forward=False" in text
    assert "compression=" not in text
    assert "hierarchy" not in text


def test_a_controller_of_the_density_speaks_of_a_thin_link_itself(said):
    diagnosis(2, HeteroConfig()).observe(observed(2, 36.0), accumulation=1, controlled=True)
    assert said == []


def test_bytes_are_those_of_a_step_since_the_last_sync_round(said):
    """Layers that were unfrozen in between make steps larger; what was sent before does not count."""
    watch = diagnosis(2, HeteroConfig())
    watch.observe(observed(2, 0.0), accumulation=1)
    assert said == []
    watch.hook.num_bytes += 10 * 8_000_000
    watch.hook.observer.synced_steps += 10
    watch.observe(observed(2, 36.0), accumulation=1)
    assert "a worker sends 8 MB in it" in said[0][1]


@pytest.mark.parametrize(
    ("workers", "config", "advised"),
    [(2, {}, False), (3, {}, True), (3, {"hierarchy": [[0, 1], [2]]}, False)],
)
def test_clusters_are_advised_where_there_may_be_some_and_are_none(said, workers, config, advised):
    ones = np.ones((8, workers))
    seen = StepObservations(8 * ones, 0.01 * ones, 0.01 * ones, ones, 0 * ones, 36 * ones, ones)
    diagnosis(workers, HeteroConfig(**config)).observe(seen, accumulation=1)
    ((level, text),) = said
    assert level == "WARNING"
    assert 'compression="block_topk' in text
    assert ('hierarchy="auto"' in text) is advised


def test_of_clusters_it_is_their_messages_that_cross_the_link(said):
    """Each of two clusters sends the 4 MB of a step once; four workers by themselves would send 6 MB."""
    watch = diagnosis(4, HeteroConfig())
    watch.hook.topology = SimpleNamespace(size=2)
    watch.observe(observed(4, 36.0), accumulation=1)
    assert "a worker sends 4 MB in it" in said[0][1]
