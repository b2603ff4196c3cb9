"""Settings without effect, as the user is told of them."""

from lightning_hetero.core.no_effect import NoEffect, merged


def test_one_setting_has_and_several_have():
    one, two = NoEffect(("a=1",), "so it is", "Leave it"), NoEffect(("a=1", "b=2"), "so it is", "Leave them")
    assert str(one) == "a=1 has no effect: so it is. Leave it."
    assert str(two) == "a=1, b=2 have no effect: so it is. Leave them."


def test_settings_of_one_reason_are_told_together_and_in_their_order():
    alone, other = ("there is one worker", "Start more"), ("the split is fixed", "Leave it out")
    found = [NoEffect(("a=1",), *alone), NoEffect(("b=2",), *other), NoEffect(("c=3",), *alone)]
    assert merged(found) == [NoEffect(("a=1", "c=3"), *alone), NoEffect(("b=2",), *other)]


def test_what_loses_something_is_told_apart():
    reason = ("there is one worker", "Start more")
    found = [NoEffect(("a=1",), *reason, loses=True), NoEffect(("b=2",), *reason)]
    assert [(one.settings, one.loses) for one in merged(found)] == [(("a=1",), True), (("b=2",), False)]


def test_a_reason_with_no_setting_is_not_told():
    assert merged([NoEffect((), "there is one worker", "Start more")]) == []
