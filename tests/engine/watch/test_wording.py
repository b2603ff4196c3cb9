"""Log lines on stragglers name the worker, its device, the phase, the step and the cost."""

import pytest

from lightning_hetero.core.stragglers.detector import LINK, Straggler
from lightning_hetero.core.stragglers.round_times import PHASES
from lightning_hetero.engine.watch.wording import describe_straggler


@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_has_its_words(phase):
    words = "loader" if phase == "data" else phase
    text = describe_straggler(Straggler(1, phase, 0, 0.0123, 0.1), (2, 7), "V100")
    assert text.startswith("rank 1 (V100) has made all others wait since epoch 2 step 7: ")
    assert words in text
    assert text.endswith("costs 12.3 ms of each step")
    lasting = describe_straggler(Straggler(1, phase, 0, 0.0123, 0.1, lasting=True), (2, 7))
    assert "slower than all others" in lasting
    assert words in lasting


@pytest.mark.parametrize(
    ("relieved", "words"),
    [
        ("split", "smaller share"),
        ("recovered", "has recovered"),
        ("others", "others are slower"),
        ("slower", "slower still"),
        ("run ended", "ended"),
    ],
)
def test_every_end_has_its_words(relieved, words):
    text = describe_straggler(Straggler(1, "data", 0, 0.0, 0.1, lost=1.234, relieved=relieved), (2, 7))
    assert "rank 1 no longer makes the others wait as of epoch 2 step 7" in text
    assert words in text
    assert text.endswith("it has cost 1.23 s")


def test_the_link_is_no_rank():
    assert describe_straggler(Straggler(LINK, "link", 0, 0.05, 0.05), (0, 1)) == (
        "the link has been slower since epoch 0 step 1: this costs 50 ms of each step"
    )
    assert describe_straggler(Straggler(LINK, "link", 0, 0.0, 0.05, lost=2.0, relieved="recovered"), (0, 9)) == (
        "the link is no longer slower as of epoch 0 step 9: it has recovered; it has cost 2 s"
    )


def test_a_begin_that_was_not_timed_is_said_to_be_one():
    begin = Straggler(1, "data", 0, 0.05, 0.1, earlier=True)
    assert "since epoch 0 step 40 or earlier: " in describe_straggler(begin, (0, 40))
    end = Straggler(1, "data", 0, 0.05, 0.1, lost=2.0, relieved="recovered", earlier=True)
    assert describe_straggler(end, (0, 99)).endswith("it has cost at least 2 s")
    link = Straggler(LINK, "link", 0, 0.05, 0.05, earlier=True)
    assert "since epoch 0 step 1 or earlier: this costs" in describe_straggler(link, (0, 1))


def test_only_a_lasting_straggler_is_slower_than_all_others():
    texts = [describe_straggler(Straggler(2, "data", 0, 0.05, 0.06, lasting), (0, 40)) for lasting in (False, True)]
    assert ["slower than all others" in text for text in texts] == [False, True]
