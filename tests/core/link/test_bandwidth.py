"""The paper's rule by idle time; the estimate itself is tested with the delays."""

import numpy as np
import pytest

from lightning_hetero.core.link.bandwidth import BandwidthSettings, LinkEstimate
from lightning_hetero.core.link.message_link import MessageLink
from lightning_hetero.core.link.message_size import MessageSize

SIZE = MessageSize(1_000_000, 2, parts=(), listed=0, marked=0, marked_from=2.0, align=1)  # 1e6 * density


@pytest.mark.parametrize("truth", [2e5, 5e7])
def test_the_idle_rule_finds_the_rate_from_either_side(truth):
    """Workers idle for as long as the message takes beyond what was believed, of a step that computes for 0.1 s."""
    link, believed = LinkEstimate(3e6), []
    for _ in range(200):
        num_bytes = 0.1 * link.rate  # what is believed to fit into the step
        waiting = max(num_bytes / truth - 0.1, 0.0)
        link = link.observe_idle(waiting / (0.1 + waiting))
        believed.append(link.rate)
    assert 0.7 * truth < np.median(believed[100:]) < 1.1 * truth
    assert max(believed[100:]) < 1.2 * truth


def test_the_idle_rule_moves_up_slowly_and_down_quickly():
    link, idle = LinkEstimate(100.0), BandwidthSettings().idle_share
    assert link.observe_idle(idle).rate < link.rate < link.observe_idle(0.99 * idle).rate
    assert link.observe_idle(float("nan")) == link
    assert LinkEstimate().observe_idle(0.5).rate is None


def test_the_slowest_worker_counts():
    link = MessageLink(0.1, SIZE, tuple(map(LinkEstimate, (3e6, 1e6, 2e6))))
    assert link.slowest == 1
    assert link.transfer(0.5) == pytest.approx(0.5 / BandwidthSettings().planned_share)
    assert MessageLink(0.1, SIZE, (LinkEstimate(1.0), LinkEstimate())).rates == ()
