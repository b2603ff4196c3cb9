"""What a run tells its user: on one rank, each thing once, with a warning where something is lost."""

import logging

from lightning_hetero.comm.agreement.notices import Notices
from lightning_hetero.core.no_effect import NoEffect


def lines(caplog):
    return [(record.levelno, record.getMessage()) for record in caplog.records]


def test_each_thing_is_said_once_in_the_order_of_its_coming(caplog):
    caplog.set_level(logging.INFO, "lightning_hetero")
    notices = Notices(speaks=True)
    for text in ("one", "two", "one", "three", "two"):
        notices.say(text)
    assert lines(caplog) == [(logging.INFO, text) for text in ("one", "two", "three")]
    assert notices.said == ["one", "two", "three"]


def test_a_loss_is_a_warning(caplog):
    caplog.set_level(logging.INFO, "lightning_hetero")
    notices = Notices(speaks=True)
    notices.say("it is slower", loses=True)
    notices.say("it is as fast")
    assert lines(caplog) == [(logging.WARNING, "it is slower"), (logging.INFO, "it is as fast")]


def test_other_ranks_are_silent(caplog):
    caplog.set_level(logging.INFO, "lightning_hetero")
    notices = Notices(speaks=False)
    notices.say("one", loses=True)
    notices.tell([NoEffect(("replan=5",), "the split is fixed", "Leave it out")])
    assert lines(caplog) == []
    assert notices.said == []


def test_text_is_no_format(caplog):
    Notices(speaks=True).say("100 %s of 5 %", loses=True)
    assert caplog.messages == ["100 %s of 5 %"]


def test_settings_of_one_reason_are_one_line_and_lose_what_they_lose(caplog):
    caplog.set_level(logging.INFO, "lightning_hetero")
    notices = Notices(speaks=True)
    found = [
        NoEffect(("a=1",), "there is one worker", "Start more"),
        NoEffect(("b=2",), "sums are dense", "Compress", loses=True),
        NoEffect(("c=3",), "there is one worker", "Start more"),
    ]
    for _ in range(2):
        notices.tell(iter(found))
    assert lines(caplog) == [
        (logging.INFO, "a=1, c=3 have no effect: there is one worker. Start more."),
        (logging.WARNING, "b=2 has no effect: sums are dense. Compress."),
    ]
