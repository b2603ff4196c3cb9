"""Rules of the prose: docstrings begin as PEP 257 asks, and one concept has one word everywhere."""

import ast
import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_hetero"
FILES = sorted(PACKAGE.rglob("*.py"))
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted({*(ROOT / "docs").glob("*.md")} - {ROOT / "docs" / "modules.md"}),  # which is made of docstrings
]


QUESTIONS = {"What", "Where", "Which", "Whether", "Who", "Why", "How", "When"}
NOT_VERBS = {
    *(
        "A",
        "After",
        "All",
        "An",
        "Around",
        "As",
        "At",
        "By",
        "Density",
        "Each",
        "Error",
        "Every",
        "Extra",
        "For",
        "From",
    ),
    *("Greatest", "In", "It", "Its", "Largest", "Latency", "Least", "Mean", "Next", "No", "Nothing", "Of", "On", "One"),
    *("Queue", "Rank", "Some", "Something", "State", "Text", "That", "The", "This", "Those", "Time", "Total", "Type"),
    *("Until", "With", "Cell", "Content", "Exit", "Smoothed", "Squared", "Training"),
}

# What is said instead, and what is not said. Words between backticks are code and may be anything.
WORDS = {
    "deferred update, flush": r"owe[sd]?|owing|debts?|paid|pays? (?:it|them|what|for|ahead|out|back)",
    "sync round": r"(?:an?|the|each|every|last|next|one|first|newest|earlier|later|of|at|from) looks?(?![- ]ahead)"
    r"|comparisons? of the ranks",
    "in flight": r"under way",
    "low-bandwidth link": r"thin(?:ner)? (?:links?|networks?)",
    "noise, timing jitter": r"scatters?",
    "oscillation, back and forth": r"to and fro",
    "straggler": r"slow workers?",
    "predicted": r"foretold",
    "gradually": r"by and by",
    "layer, package": r"rooms|houses?",
}
BANNED = {word: re.compile(rf"\b(?:{pattern})\b", re.I) for word, pattern in WORDS.items()}


@cache
def tree_of(path):
    return ast.parse(path.read_text())


def documented(path):
    """All that may have a docstring, with it."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node, text


def is_property(node):
    return any(
        "property" in ast.unparse(decorator) or "setter" in ast.unparse(decorator) for decorator in node.decorator_list
    )


def wrong_beginning(node, text):
    """Whether the first word is a question's, or that of a function no verb in the imperative."""
    word = re.match(r"[\w']*", text)[0]
    if word in QUESTIONS:
        return True
    if isinstance(node, ast.Module | ast.ClassDef) or is_property(node):
        return False
    return word in NOT_VERBS or not word or (word.endswith("s") and not word.endswith("ss"))


def spoken(path):
    """Prose of a file: docstrings and comments, or a page without its code; each with its line."""
    if path.suffix == ".md":
        text = re.sub(r"^```.*?^```$", lambda m: "\n" * m[0].count("\n"), path.read_text(), flags=re.M | re.S)
        yield from enumerate(re.sub(r"`[^`]*`", lambda m: "\n" * m[0].count("\n"), text).splitlines(), 1)
        return
    for node, text in documented(path):
        line = 1 if isinstance(node, ast.Module) else node.lineno
        lines = (re.sub(r"^\s*\w+: ", "", part) for part in text.splitlines())  # names of arguments are code
        prose = "\n".join(part for part in lines if not part.strip().startswith((">>>", "...")))
        yield line, re.sub(r"``.*?``|:\w+:`.*?`", "", prose, flags=re.S)
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], re.sub(r"`.*?`", "", token.string)


def test_docstrings_begin_with_what_it_is_or_does():
    found = [
        f"{path.relative_to(ROOT)}: {getattr(node, 'name', 'module')}: {text.splitlines()[0]}"
        for path in FILES
        for node, text in documented(path)
        if wrong_beginning(node, text)
    ]
    assert not found, 'a verb in the imperative ("Return ..."); a noun phrase for modules, classes and properties'


def test_one_concept_has_one_word():
    found = [
        f"{path.relative_to(ROOT)}:{line} {match[0]!r}: say {word}"
        for path in (*FILES, *PAGES)
        for line, text in spoken(path)
        for word, pattern in BANNED.items()
        for match in pattern.finditer(text)
    ]
    assert not found


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ('"""What ranks tell each other."""', True),
        ('"""Message of the ranks."""', False),
        ('class C:\n    """Whether it is."""', True),
        ('class C:\n    """Averages of buckets."""', False),
        ('def f():\n    """Returns nothing."""', True),
        ('def f():\n    """The sum."""', True),
        ('def f():\n    """Return the sum."""', False),
        ('def f():\n    """Compress a bucket."""', False),
        ('class C:\n    @property\n    def p(self):\n        """The sum."""', False),
        ('class C:\n    @property\n    def p(self):\n        """Where it is."""', True),
    ],
)
def test_a_beginning_is_wrong(source, wrong):
    nodes = [node for node in ast.walk(ast.parse(source)) if not isinstance(node, ast.Module) or source.startswith('"')]
    texts = [(node, ast.get_docstring(node)) for node in nodes if hasattr(node, "body")]
    assert any(text and wrong_beginning(node, text) for node, text in texts) == wrong
