"""What is awaited crosses the link before what is delayed: the queue by hand, and what ranks really send."""

import numpy as np
import pytest
import torch

from lightning_hetero.comm.staleness.deadline_queue import TransferQueue
from lightning_hetero.simulate import ThinLink
from tests.comm.staleness.test_dense import INPUT, batch, by_hand, loss_of, start
from tests.helpers import run_ranks

Future = torch.futures.Future


class Link:
    """Keeps the order in which transfers set out."""

    def __init__(self):
        self.sent = []

    def transfer(self, name):
        def send():
            self.sent.append(name)
            future = Future()
            future.set_result(name)
            return future

        return send


def test_delayed_ones_wait_for_all_fresh_ones_of_their_step_and_keep_their_order():
    link, queue, buffer = Link(), TransferQueue(), torch.zeros(1)
    first, second, later = Future(), Future(), Future()
    queue.begin_step()
    queue.before(first)
    queue.before(second)
    a, b = (queue.add(buffer, link.transfer(name)) for name in "ab")
    second.set_result(None)
    assert link.sent == []
    queue.begin_step()
    queue.before(later)
    c = queue.add(buffer, link.transfer("c"))
    later.set_result(None)
    assert link.sent == [], "a transfer of the next step has overtaken"
    first.set_result(None)
    assert link.sent == ["a", "b", "c"]
    assert [future.wait() for future in (a, b, c)] == ["a", "b", "c"]
    queue.begin_step()
    queue.add(buffer, link.transfer("d"))
    assert link.sent[-1] == "d", "there is nothing to wait for"
    queue.before(Future())
    queue.begin_step()
    queue.add(buffer, link.transfer("e"))
    assert link.sent[-1] == "e", "what another step awaits is waited for, and never forgotten"


def test_what_cannot_be_sent_is_the_error_of_who_waits_for_it():
    queue, first = TransferQueue(), Future()
    queue.before(first)

    def fails():
        raise RuntimeError("no link")

    done = queue.add(torch.zeros(1), fails)
    first.set_result(None)
    with pytest.raises(RuntimeError, match="no link"):
        done.wait()


STEPS = 6


def _traced(rank, running):
    """Gradients of the steps, and the way of each transfer, on a link that a step keeps busy for about 0.1 s."""
    model, staleness = start(2)
    if not running:
        staleness.queue.running = False
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    given = []
    with ThinLink(2e4, world_size=2, shared=True):
        for step in range(STEPS):
            if step == 2:
                staleness.make_stale(INPUT)
            optimizer.zero_grad()
            loss_of(model, batch(rank, step)).backward()
            given.append(torch.cat([p.grad.flatten() for p in model.parameters()]).numpy().copy())
            optimizer.step()
        staleness.drain()
    return np.stack(given), staleness.trace()


@pytest.mark.alone
@pytest.mark.parametrize("running", [True, False], ids=["priority", "none"])
def test_the_order_of_transfers_follows_the_plan_on_all_ranks(running):
    results = run_ranks(_traced, 2, running)
    expected, _ = by_hand({2: INPUT}, 2, STEPS)
    for given, _ in results:
        np.testing.assert_allclose(given, expected, rtol=1e-12, atol=1e-15)
    orders = [[(step, bucket) for step, bucket, *_ in spans] for _, spans in results]
    assert orders[0] == orders[1]
    overtaking = 0
    for _, spans in results:
        for step in range(3, STEPS + 1):  # the log counts from 1
            own = [span for span in spans if span[0] == step]
            fresh, delayed = [span for span in own if span[1] < 3], [span for span in own if span[1] >= 3]
            assert len(fresh) == 3
            assert [span[1] for span in delayed] == [3, 4]
            overtaking += min(span[3] for span in delayed) < max(span[4] for span in fresh)
    assert (overtaking == 0) if running else (overtaking > 0), "delayed sums crossed the link together with fresh ones"
