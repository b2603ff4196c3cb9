"""Words around names and numbers."""

import pytest

from lightning_hetero.simulate.planning.wording import check_name, columns, counted, labels, percent, with_article


@pytest.mark.parametrize("name", ["A100", "H100", "RTX 4090", "M40", "L4", "old card", "iGPU", "8 cores", "8xA100"])
def test_an_comes_before_a_vowel(name):
    assert with_article(name) == f"an {name}"


@pytest.mark.parametrize(
    "name", ["V100", "T4", "P4000", "GTX 1080", "12 cores", "server", "Server", "2080 Ti", "x", ""]
)
def test_a_comes_before_a_consonant(name):
    assert with_article(name) == f"a {name}"


def test_one_is_singular():
    assert [counted(number, "step") for number in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]


def test_a_percentage_has_few_characters():
    assert max(len(percent(10.0**power)) for power in range(-300, 300)) < 11


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[31m", "a\u2028b", "\ud800", "a\tb", "a\x00", "", "  ", None, 3])
def test_a_name_that_would_break_a_line_is_refused(name):
    with pytest.raises(ValueError, match="the name"):
        check_name(name)


def test_a_name_of_any_language_is_taken():
    assert [check_name(name) for name in ("größe", "日本", "🚀")] == ["größe", "日本", "🚀"]
    assert [columns(name) for name in ("größe", "日本", "🚀", "gro\u0308ße")] == [5, 4, 2, 5]


def test_equal_workers_have_one_label():
    assert labels([("a", 1), ("a", 1)]) == ["a", "a"]
    assert labels([("a", 2), ("a", 1), ("b", 1)]) == ["a #1", "a #2", "b"]
