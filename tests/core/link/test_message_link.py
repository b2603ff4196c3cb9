"""Messages on a link, and observations without them."""

import numpy as np
import pytest

from lightning_hetero.core.link.bandwidth import LinkEstimate
from lightning_hetero.core.link.message_link import MessageLink, without_messages
from lightning_hetero.core.link.message_size import MessageSize
from lightning_hetero.core.observations import StepObservations

SIZE = MessageSize(1_000_000, 2, parts=(), listed=0, marked=0, marked_from=2.0, align=1)  # 1e6 * density


def test_steps_that_hide_their_messages_say_nothing_of_waiting():
    """Else a step that is as long as its messages would look shorter than its own computing."""
    rows = np.full((4, 2), 0.1)
    seen = StepObservations(rows, rows, rows, rows, rows, rows, 2 * rows)
    for stale, sync, step in [(False, 0.04, 0.14), (True, 0.0, np.nan)]:
        bare = without_messages(seen, MessageLink(0.1, SIZE, (), seconds=0.06, stale=stale))
        np.testing.assert_allclose(bare.last_sync, sync)
        np.testing.assert_allclose(bare.step_time, step)
        np.testing.assert_array_equal(bare.compute, seen.compute)


def test_a_link_at_its_best_takes_as_long_for_present_messages():
    """By its standard error latency may be all that they take; then the link is fifty times as fast as they look."""
    link = MessageLink(0.01, SIZE, (LinkEstimate(2e6),) * 2, seconds=0.01, latency=0.005)
    assert link.at_best().transfer(0.01) == pytest.approx(0.005 + 0.005 / 0.9)
    for error, sending in ((0.001, 0.004), (0.004, 0.001), (0.1, 0.0002)):
        best = MessageLink(0.01, SIZE, (LinkEstimate(2e6),) * 2, 0.01, latency=0.005, latency_error=error).at_best()
        assert best.rates == pytest.approx((1e4 / sending,))
        assert best.latency == pytest.approx(0.01 - sending)


def test_nothing_is_hoped_for_before_messages_were_seen():
    link = MessageLink(0.01, SIZE, (LinkEstimate(2e6),) * 2, latency_error=1.0)
    assert link.at_best() is link
