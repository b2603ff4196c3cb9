"""Row of the evidence page: what a paper reports, and what we found with which command."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"

HOW = ("emulated devices", "simulated", "measured on CPU", "needs a GPU")
VERDICTS = ("holds", "holds in part", "does not hold", "open")


@dataclass(frozen=True)
class Paper:
    """A paper.

    Args:
        letter: that equations are cited by.
        name: short name.
        citation: authors, title, place and year.
    """

    letter: str
    name: str
    citation: str


@dataclass(frozen=True)
class Row:
    """One headline, figure or table of a paper's evaluation.

    Args:
        where: its place in the paper, as ``"Fig. 9"``, ``"Table 3"``, ``"sec. 5.2"``.
        reported: what the paper reports, and on what hardware and workload.
        how: how we checked it, one of :data:`HOW`.
        verdict: one of :data:`VERDICTS`; ``"open"`` goes with ``"needs a GPU"``.
        command: what produces our figure, from the root of the repository; empty if it is open.
        result: file in ``benchmarks/results`` that the command writes; empty if it is open.
        ours: makes our figure, one or two sentences, of the contents of that file; or says why it is open.
        note: what a reader has to know to compare both: a contradiction, a difference of set-up.
    """

    where: str
    reported: str
    how: str
    verdict: str
    ours: Callable[[Any], str]
    command: str = ""
    result: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        if self.how not in HOW or self.verdict not in VERDICTS:
            raise ValueError(f"{self.where}: how={self.how!r} is one of {HOW}, verdict={self.verdict!r} of {VERDICTS}.")
        if (self.verdict == "open") != (self.how == "needs a GPU") or (self.verdict == "open") == bool(self.command):
            raise ValueError(f"{self.where}: a row is either open and needs a GPU, or has a command and a result.")
        if bool(self.command) != bool(self.result):
            raise ValueError(f"{self.where}: give the command and the result that it writes, or neither.")

    def found(self) -> str:
        """Return our figure, from the committed result."""
        return self.ours(json.loads((RESULTS / self.result).read_text()) if self.result else None)
