"""Messages on a link, and observations without them."""

import numpy as np

from lightning_hetero.core.link.message_link import MessageLink, without_messages
from lightning_hetero.core.observations import StepObservations


def test_steps_that_hide_their_messages_say_nothing_of_waiting():
    """Else a step that is as long as its messages would look shorter than its own computing."""
    rows = np.full((4, 2), 0.1)
    seen = StepObservations(rows, rows, rows, rows, rows, rows, 2 * rows)
    for hidden, sync, step in [(False, 0.04, 0.14), (True, 0.0, np.nan)]:
        bare = without_messages(seen, MessageLink(0.1, float, (), seconds=0.06, hidden=hidden))
        np.testing.assert_allclose(bare.last_sync, sync)
        np.testing.assert_allclose(bare.step_time, step)
        np.testing.assert_array_equal(bare.compute, seen.compute)
