"""Whether compressed messages come a step later, from look to look."""

from lightning_hetero.core.link.late_choice import LOOKS, LateChoice


def looked(choice, now, gain, rate, times):
    """The choice after so many looks at such a link, and whether messages come late."""
    for _ in range(times):
        choice, now = choice.look(now, fresh=1.0, late=1.0 - gain, rate=rate)
    return choice, now


def test_messages_that_are_awaited_again_do_not_go_late_on_the_same_link():
    choice, late = looked(LateChoice(), False, 0.2, 1e6, LOOKS)
    choice, late = looked(choice, late, 0.0, 9e6, 1)
    assert not late
    for rate, turns in ((9e6, False), (9e6 * 1.4, False), (9e6 / 1.4, False), (1e6, True)):
        assert looked(choice, late, 0.2, rate, 2 * LOOKS)[1] == turns


def test_a_look_that_speaks_against_a_delay_begins_the_count_anew():
    choice, late = looked(LateChoice(), False, 0.2, 1e6, LOOKS - 1)
    choice, late = looked(choice, late, 0.04, 1e6, 1)
    assert not looked(choice, late, 0.2, 1e6, LOOKS - 1)[1]
    assert looked(choice, late, 0.2, 1e6, LOOKS)[1]
