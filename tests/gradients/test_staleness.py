"""What is stale follows the measured link, the same on all ranks; what is awaited crosses it first; what comes next."""

import logging
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.collectives import async_ops
from lightning_hetero.comm.gradients.stale_averager import StaleAverager
from lightning_hetero.comm.staleness.deadline_queue import TransferQueue
from lightning_hetero.comm.staleness.dense import DenseStaleAverager
from lightning_hetero.comm.timing.clock import HostClock
from lightning_hetero.core.compression.objective import DensityChoice
from lightning_hetero.core.link.bandwidth import sum_bytes
from tests.gradients.runs import INPUT, Run, Way, flat
from tests.helpers import collected
from tests.ranks import run_ranks
from tests.timing.clocks import Hand

Future = torch.futures.Future
BYTES, READY = 4000.0, (0.1, 0.2, 0.3, 0.4)
"""Bytes of each of four buckets, and seconds until each is ready; a step computes for the last."""


class Bucket:
    """What DDP hands over."""

    def __init__(self, number, parameter):
        self.parameter, self.flat = parameter, torch.zeros(parameter.numel())
        self.index, self.is_last = (lambda: number), (lambda: number == len(READY) - 1)

    def buffer(self):
        return self.flat

    def parameters(self):
        return [self.parameter]


class Sum:
    """A sum that is there at a moment; who waits for it, or asks to be called, gets there then."""

    def __init__(self, clock, moment, value):
        self.clock, self.moment, self.value = clock, moment, value

    def wait(self):
        self.clock.now = max(self.clock.now, self.moment)
        return self.value

    def then(self, callback):
        before, done = self.clock.now, Future()
        done.set_result(self.wait())
        value, self.clock.now = callback(done), before
        return Sum(self.clock, self.moment, value)


class Link:
    """Two ranks that see the same, whose sums take ``seconds`` each on a link that carries one at a time."""

    def __init__(self, rank=0, limit=1, **given):
        self.clock, self.free, self.seconds = Hand(), 0.0, 0.0
        weights = {f"p{i}": nn.Parameter(torch.zeros(1000)) for i in range(len(READY))}
        way = SimpleNamespace(size=2, all_reduce=self.carry)
        ways = {"topology": way, "synchronous": way}
        self.averager = DenseStaleAverager(limit, weights, world_size=2, clock=self.clock, **ways, **given)
        self.buckets = [Bucket(i, p) for i, p in enumerate(weights.values())]
        self.control = SimpleNamespace(rank=rank, decide=lambda decision: decision())

    def carry(self, buffer):
        self.free = max(self.free, self.clock.now) + self.seconds
        return Sum(self.clock, self.free, [buffer])

    def steps(self, number, seconds):
        for _ in range(number):
            self.seconds, begin = seconds, self.clock.now
            waits = []
            for bucket, ready in zip(self.buckets, READY, strict=True):
                self.clock.now = max(self.clock.now, begin + ready)
                waits.append(self.averager.average(bucket))
            for one in waits:
                one.wait()

    def round(self, number, seconds):
        self.steps(number, seconds)
        packed = self.averager.pack()
        self.averager.unpack(np.stack([packed] * 2), self.control)
        return self.averager.stale_share


def test_a_slow_link_makes_buckets_stale_and_a_fast_one_awaits_them_again(caplog):
    """The rate is that of what was sent in the seconds in which the link was busy; rank 0 says what changes."""
    caplog.set_level(logging.INFO, "lightning_hetero")
    link, other = Link(), Link(rank=1)
    assert link.averager.metrics() == {"hetero/delayed_share": 0.0}
    assert link.round(1, 0.3) == 0.0, "one step alone is not measured"
    assert link.averager.choice is None
    shares = [link.round(4, 0.3) for _ in range(3)]
    other.round(4, 0.3)
    assert shares[-1] > 0
    assert shares[0] == other.round(4, 0.3), "the same measurements are the same decision"
    assert {record.levelno for record in caplog.records} == {logging.WARNING}, "the link is the bound"
    assert len(caplog.messages) <= 2
    assert f"{round(4 * shares[-1])} of 4" in caplog.messages[-1]
    seen = link.averager.metrics()
    assert seen["hetero/bandwidth"] == pytest.approx(sum_bytes(BYTES, 2) / 0.3, rel=0.01)
    assert seen["hetero/transfer_time"] >= 1.2
    for _ in range(40):
        share = link.round(4, 1e-3)
    assert share == 0.0
    assert caplog.records[-1].levelno == logging.INFO
    assert not link.averager.choice.communication_bound


def test_where_a_controller_decides_or_nothing_may_be_stale_nothing_is_packed():
    link, never = Link(), Link(limit=0)
    for one in (link, never):
        one.steps(4, 0.3)
    assert never.averager.pack().size == 0
    assert never.averager.metrics() == {}
    link.averager.control_externally(True)
    assert link.averager.pack().size == 0
    never.averager.unpack(np.zeros((2, 0)), SimpleNamespace(decide=None))
    link.averager.control_externally(False)
    assert link.averager.pack().size > 0
    following = Link().averager
    link.averager.control_externally(True)
    link.averager.keep_own()
    link.averager.make_all_stale()
    following.follow(link.averager)
    assert (following.externally_controlled, following.keeps_own, following.stale_share) == (True, True, 1.0)


def test_sums_of_a_checkpoint_have_to_fit_what_is_trained(caplog):
    weights = {"w": torch.zeros(8)}
    given = {"world_size": 2, "clock": HostClock()}
    state = {"delayed": ["gone", "w"], "sums": {"w": torch.ones(8), "gone": torch.ones(3)}, "rate": 7.0}
    for limit in (0, 1):
        averager = DenseStaleAverager(limit, weights, restored=state, **given)
        assert averager.stale_share == limit, "its sums are owed with and without staleness"
        assert {name: value.tolist() for name, value in averager.state_dict()["sums"].items()} == {"w": [1.0] * 8}
        assert "gone" in caplog.text
        averager.load_state_dict({})
        assert (averager.stale_share, averager.drain()) == (0.0, {}), "they belong to steps that are undone"
    for number in (3, 9):
        with pytest.raises(ValueError, match=r"\bw\b"):
            DenseStaleAverager(1, weights, restored={"sums": {"w": torch.ones(number)}}, **given)


# earliest deadline first


def test_stale_sums_wait_for_all_synchronous_ones_of_their_step_and_keep_their_order():
    sent, queue, buffer = [], TransferQueue(), torch.zeros(1)

    def transfer(name):
        def send():
            sent.append(name)
            future = Future()
            future.set_result(name)
            return future

        return send

    first, second, later = Future(), Future(), Future()
    queue.begin_step()
    queue.before(first)
    queue.before(second)
    stale = [queue.add(buffer, transfer(name)) for name in "ab"]
    second.set_result(None)
    queue.begin_step()
    queue.before(later)
    stale.append(queue.add(buffer, transfer("c")))
    later.set_result(None)
    assert sent == [], "the first one is still under way, and a transfer of the next step may not overtake"
    first.set_result(None)
    assert sent == ["a", "b", "c"]
    assert [future.wait() for future in stale] == ["a", "b", "c"]
    queue.before(Future())
    TransferQueue(running=False).add(buffer, transfer("at once"))
    queue.begin_step()
    failed = queue.add(buffer, lambda: 1 / 0)
    queue.add(buffer, transfer("d"))
    assert sent[3:] == ["at once", "d"], "there is nothing to wait for"
    with pytest.raises((ZeroDivisionError, RuntimeError), match="division"):
        failed.wait()


def _crossing(rank, priority):
    """Which transfers began while a synchronous sum was still under way, on a link that a test lets through by hand."""
    run, order, go = Run(rank, Way(stale={2: INPUT}, priority=priority)), [], threading.Event()
    plain = async_ops.async_all_reduce

    def slow(buffer, group=None):
        order.append(("begin", buffer.numel()))
        done, slowed = plain(buffer, group), Future()

        def over(future):
            go.wait(0.02)
            order.append(("end", buffer.numel()))
            slowed.set_result(future.value())

        done.then(over)
        return slowed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_ops, "async_all_reduce", slow)
        for step in range(6):
            run.step(step)
        run.late.drain()
    trace = [(step, bucket) for step, bucket, *_ in run.late.trace()]
    run.close()
    return order, trace


def test_the_order_of_transfers_is_by_deadline_on_all_ranks():
    """The input's gradients come last, and would share the link with those that the step waits for."""
    results = run_ranks(_crossing, 2, True)
    assert results[0][1] == results[1][1], "transfers of a step set out in one order"
    for order, _ in results:
        begun = [i for i, event in enumerate(order) if event == ("begin", 54)]
        assert len(begun) == 5
        for size in (8, 72):
            over = [i for i, event in enumerate(order) if event == ("end", size)]
            assert all(late > end for late, end in zip(begun[-3:], over[-3:], strict=True))


# what the optimizer will get


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_a_part_is_extrapolated_by_its_share_and_no_more_than_by_the_number_of_parts(parts, seed):
    for share in np.random.default_rng(seed).uniform(0.01, 1.0, 50):
        assert StaleAverager.extrapolation_factor(share, parts) == pytest.approx(min(1 / share, parts))
    assert StaleAverager.extrapolation_factor(0.0, parts) == parts


def _predicted(rank, ways):
    """Predictions of the next sums, as full tensors; once more after all ranks have seen the sums themselves."""
    found = {}
    for name, way in ways.items():
        run, rows = Run(rank, way), []
        run.late.keep_own()
        for step in range(4):
            run.step(step, bad=name == "blocks" and step == 3 and rank == 1)
            predictions = []
            for look in (False, True):
                if look:
                    waited, left_out = run.late.wait_in_flight()
                    owed = run.owed()
                sums = run.late.predicted_sums([run.share], run.share)
                parts = None if sums is None else []
                for p in run.parameters.values() if sums is not None else ():
                    places, values = sums.get(p, (None, None))
                    full = torch.zeros(p.numel(), dtype=p.dtype)
                    if values is not None:
                        full[slice(None) if places is None else places] = values
                    parts.append(full)
                predictions.append(parts and flat(parts, run.parameters.values()))
            total = sum(float(one.sum()) for one, _ in waited)
            rows.append((*predictions, owed, total, left_out))
        found[name] = rows, run.seen["own"]
        run.close()
    return found


def test_sums_are_foretold_from_the_own_part_and_known_after_a_checkpoint():
    ways = {
        "dense": Way(stale={1: True}),
        "in part": Way(stale={1: INPUT}),
        "blocks": Way("block_topk(density=1.0, block=8, value_dtype='float32', warmup_steps=0)", stale={1: True}),
        "never": Way(stale={}),
    }
    for rank, found in enumerate(run_ranks(_predicted, 2, ways)):
        for name, (rows, own) in found.items():
            for step, (first, known, owed, total, left_out) in enumerate(rows):
                if step == 0 or name == "never":
                    assert first is None, "nothing is stale"
                    continue
                bad = name == "blocks" and step == 3
                assert left_out == bad
                expected = own[step] * min(1 / (0.75, 0.25)[rank], 2)
                if name == "in part":
                    expected = expected * (owed != 0)
                    assert owed.any()
                np.testing.assert_allclose(first, expected * (not (bad and rank == 1)), rtol=1e-5, atol=1e-7)
                np.testing.assert_allclose(known, owed, rtol=1e-6, atol=1e-9)
                if name != "blocks":
                    assert total == pytest.approx(owed.sum())


def _controlled(rank):
    """What a controller's choices change: messages that are stale, and what is said of it."""
    run, lines = Run(rank, Way("block_topk(density=0.4, block=8, warmup_steps=0)", stale={})), collected()
    logging.getLogger("lightning_hetero").setLevel(logging.INFO)
    found = []
    for density, stale, least in (
        *((0.4, None, 0.1), (0.2, None, 0.1), (0.2, True, 0.1), (0.2, True, 0.1)),
        *((0.2, None, 2.0), (0.2, None, 2.0), (0.2, False, 0.1)),
    ):
        lines.clear()
        run.compression.apply_choice(DensityChoice(density, 10, 1.0, 1.0, 0.5, least), stale)
        run.backward(0)
        blocks = run.compression.blocks
        found.append((blocks.density, run.late.stale_share, run.late.externally_controlled, len(lines)))
    run.compression.apply_choice(None, True)
    found.append(run.late.stale_share)
    link = run.compression.link()
    found.append((link.density, link.stale, link.may_be_stale, link.latency > 0))
    successor = run.late.for_dense_sums(None)
    found.append((type(successor).__name__, successor.for_dense_sums(None) is successor, successor.keeps_own))
    run.late.keep_own()
    found.append(run.late.for_dense_sums(None).keeps_own)
    run.close()
    return found


def test_a_controllers_choices_reach_messages_and_rank_0_says_what_changes():
    for rank, found in enumerate(run_ranks(_controlled, 2)):
        says = [0, 1, 1, 0, 1, 0, 1] if rank == 0 else [0] * 7
        stale = [0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0]
        controlled = [False] * 2 + [True] * 5
        expected = list(zip([0.4] + [0.2] * 6, stale, controlled, says, strict=True))
        assert found[:7] == expected
        assert found[7:] == [0.0, (0.2, False, True, True), ("DenseStaleAverager", True, False), True]


def _dense_step_between(rank):
    """Steps of stale messages that count as measurements of the link, around one that is sent densely."""
    run = Run(rank, Way("block_topk(density=0.4, block=8, warmup_steps=0, dense_every=4)", stale={0: True}))
    for step in range(8):
        run.step(step)
    control = ControlPlane(rank, 2)
    rows = control.gather(run.late.pack()).reshape(2, -1, 3)
    dist.barrier()
    run.close()
    control.close()
    return rows[rank][np.isfinite(rows[rank][:, 0]), 0].tolist()


def test_the_step_after_a_dense_one_is_no_measurement_of_the_link():
    """It would be counted from the end of a step whose messages the timer has not seen. Here 0 and 4 are dense."""
    for steps in run_ranks(_dense_step_between, 2):
        assert steps == [3.0, 4.0, 7.0, 8.0]
