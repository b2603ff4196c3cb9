"""A link that stalls for seconds: training goes on and says so; neither messages nor split follow what is over."""

import re

import numpy as np

from tests.callbacks.test_time_to_accuracy import BATCH, FAT, run

STALL = 20


def test_five_seconds_of_silence_change_neither_messages_nor_split():
    """Densities and split are free to move, and stand where they are best before."""
    results = run({STALL: 7.2e3, STALL + 1: FAT}, max_steps=60)
    moments = np.diff(results[0]["moments"])
    assert moments.max() > 4.5, "nothing has stalled"
    assert np.sort(moments)[-2] < 1.0
    before, after = results[0]["sizes"][STALL], results[0]["sizes"][-1]
    assert after == before, "the stall was taken for the link"
    assert len(set(results[0]["densities"])) == 1
    for result in results:
        assert {len(indices) for *_, indices in result["seen"][STALL:]} == {BATCH}, "the stall was taken for a worker"
    (warning,) = [text for level, text in results[0]["said"] if level == "WARNING"]
    found = re.match(r"communication-bound: a step waits .* longest ([\d.]+) s\)", warning)
    assert 4.9 < float(found[1]) < 5.2, "not what 36 kB take at 7.2 kB/s"
    assert [text for _, text in results[0]["said"] if text.startswith("no longer communication-bound: ")]
    assert not [text for _, text in results[1]["said"] if "communication-bound" in text], "a rank other than 0 speaks"
