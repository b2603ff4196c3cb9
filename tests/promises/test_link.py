"""What is measured of the link, and what rank 0 says of it: in counted time."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest
from torch import nn

from lightning_hetero.comm.gradients.ddp_hook import HookState
from lightning_hetero.comm.gradients.sharded_groups import ReduceScatterMean
from lightning_hetero.comm.link.diagnosis import LinkDiagnosis
from lightning_hetero.comm.link.link_state import LinkState
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.link.message_size import MessageSize
from lightning_hetero.core.observations import StepObservations
from tests import loops
from tests.counted import CountedTime
from tests.ranks import run_ranks

FAT, THIN = 50e6, 20.0
"""Bytes per second; 400 bytes of gradients take 20 s at the lower rate."""
SLOW, STALL, COMPUTE = 8, 22, 0.02


def _run(rank, front_end):
    counted, said, handler, steps = CountedTime(rank, THIN), [], logging.Handler(), iter(range(1, 100))
    handler.emit = lambda record: said.append((record.levelname, record.getMessage()))
    logging.getLogger("lightning_hetero").addHandler(handler)

    def loss(output, x, y):
        step = next(steps)
        counted.rate = THIN if step <= SLOW or step == STALL else FAT
        counted.spend(COMPUTE * (1 + 9 * rank))  # rank 1 is slow: that is no network
        return nn.functional.mse_loss(output, y)

    settings = {"local_batch_sizes": (2, 2), "replan": 8}
    loops.FRONT_ENDS[front_end](rank, settings, 2, world_size=2, loss=loss)
    said = [(level, text) for level, text in said if "even sizes" not in text]  # no summary
    return [(level, text) for level, text in said if "network" in text or "communication-bound" in text]


@pytest.mark.parametrize("front_end", loops.FRONT_ENDS)
def test_rank_0_says_when_the_network_is_thin_and_when_it_stalls(front_end):
    """After sync rounds at 8, 16, 24 and 32 of 38 steps."""
    said, other = run_ranks(_run, 2, front_end)
    assert other == [], "a rank other than 0 speaks"
    assert [level for level, _ in said] == ["WARNING", "INFO", "WARNING", "INFO"]
    thin, _, stalled, _ = (text for _, text in said)
    for words in ("20 s", "0.0004 MB", "0.00016 Mbit/s", "compression="):
        assert words in thin
    assert "20 s" in stalled
    assert "compression=" not in stalled, "advice for every step where one was long"


@pytest.mark.parametrize(
    ("workers", "config", "case", "words", "not_said"),
    [
        (2, {}, "", ('compression="block_topk', "4 MB"), "hierarchy"),
        (3, {}, "", ('hierarchy="auto"',), "nothing"),
        # FSDP sends gradients itself, so that there is neither compression nor a hierarchy
        (4, {}, "sharded", ("reshard_after_forward=False",), "compression="),
        # each of two clusters sends the 4 MB of a step once; four workers by themselves would send 6 MB
        (4, {}, "clusters", ("sends 4 MB",), "sends 6 MB"),
        # layers that were unfrozen in between; what was sent before does not count
        (2, {}, "second round", ("sends 8 MB",), "nothing"),
        (2, {}, "controlled", None, ""),  # the controller of the density says it
        (2, {}, "rank 1", None, ""),
        (2, {"staleness": 1}, "", None, ""),
    ],
)
def test_advice_is_what_helps_and_is_not_done_yet(caplog, workers, config, case, words, not_said):
    """Ten steps of 4 MB, which wait for the network for 36 s."""
    caplog.set_level(logging.INFO, "lightning_hetero")
    hook = HookState(SimpleNamespace(synced_steps=10), workers)
    hook.num_bytes = 40_000_000
    watch, ones = LinkDiagnosis(HeteroConfig(**config), int(case == "rank 1"), hook), np.ones((8, workers))

    def observe(wait):
        seen = StepObservations(8 * ones, 0.01 * ones, 0.01 * ones, ones, 0 * ones, wait * ones, ones)
        watch.observe(seen, accumulation=1, controlled=case == "controlled")

    if case == "sharded":
        hook.use(ReduceScatterMean(4))
    if case == "clusters":
        hook.topology = SimpleNamespace(size=2)
    if case == "second round":
        observe(0.0)
        hook.num_bytes += 10 * 8_000_000
        hook.observer.synced_steps += 10
    observe(36.0)
    if words is None:
        assert caplog.messages == []
        return
    ((level, text),) = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert level == "WARNING"
    assert all(one in text for one in words)
    assert not_said not in text


# estimates

SIZE = MessageSize(1000, 2, parts=(32,), listed=80, marked=125)


def seen(num_bytes, *seconds):
    """Messages of one step in the tables of two ranks: step, bytes, and what each rank's message took for it."""
    return np.array([[1.0, num_bytes, *seconds]] * 2)


def test_the_slowest_rank_is_the_rate_of_the_link_and_a_round_without_messages_keeps_it():
    watch = LinkState(2)
    watch.begin(0.001)
    assert watch.metrics([0, 1]) == {}
    link = watch.link(0.1, SIZE, stale=True)
    assert (link.rates, link.seconds, link.latency, link.stale) == ((), None, 0.001, True)
    watch.see_probe(1_000_000, 0.501)
    assert watch.link(0.1, SIZE, stale=False).rates == pytest.approx((2e6, 2e6))
    watch.begin(0.0)
    watch.see(seen(1e6, 0.5, 0.25))
    rates = {"hetero/bandwidth": 2e6, "hetero/bandwidth/rank0": 2e6, "hetero/bandwidth/rank3": 4e6}
    assert watch.metrics([0, 3]) == pytest.approx({**rates, "hetero/transfer_time": 0.5})
    watch.see(np.zeros((2, 0)))
    assert watch.metrics([0, 3]) == pytest.approx(rates)
