"""First failure of a job: which rank failed, and why."""

import json
import re
import traceback
from dataclasses import asdict, dataclass

import torch.distributed as dist

__all__ = ["Failure", "is_ordinary", "of_connection"]

ORDINARY = (StopIteration, StopAsyncIteration, GeneratorExit)
"""Exceptions by which loops end."""
CONNECTION = re.compile(
    r"gloo|nccl|process ?group|\bstore\b|socket|broken pipe|connection|time(d |-)?out|all_?reduce|all_?gather",
    re.IGNORECASE,
)
"""What torch's errors of collectives say; most of them are plain ``RuntimeError``."""


@dataclass(frozen=True)
class Failure:
    """Failure of a rank that comes before those of the others, which only follow from it.

    Args:
        rank: rank that failed, ``None`` for the launcher.
        what: reason, in a line.
        trace: end of the traceback, if there is one.
        lost: whether the rank is silent, so that the others end at once.

    Example:
        >>> failure = Failure(1, "ZeroDivisionError: division by zero")
        >>> str(failure)
        'rank 1 failed first: ZeroDivisionError: division by zero'
        >>> Failure.from_json(failure.to_json()) == failure
        True
    """

    rank: int | None
    what: str
    trace: str = ""
    lost: bool = False

    @classmethod
    def of(cls, rank: int, error: BaseException) -> "Failure":
        """Return the failure of a rank by an exception.

        Example:
            >>> Failure.of(2, ArithmeticError("boom")).what
            'ArithmeticError: boom'
        """
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__, limit=-3))
        return cls(rank, f"{type(error).__name__}: {error}"[:1000], trace[-4000:])

    @property
    def name(self) -> str:
        """The rank in words."""
        return "the launcher" if self.rank is None else f"rank {self.rank}"

    def __str__(self) -> str:
        """Say it in a line, for the errors of other ranks."""
        return f"{self.name} failed first: {self.what}"

    def farewell(self, rank: int) -> str:
        """Return what a rank says when it ends because of this failure."""
        if rank == self.rank:
            return (
                f"rank {rank} ends: the other ranks have ended without it, because it was lost to them ({self.what})."
            )
        how = f"{self.name} is lost ({self.what})" if self.lost else str(self)
        return (
            f"rank {rank} ends the training, which cannot go on: {how}. Look at the log of that rank and at its host, "
            "and start again from the last checkpoint."
        )

    def to_json(self) -> str:
        """Return the failure as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Failure":
        """Read what :meth:`to_json` has written."""
        return cls(**json.loads(text))


def of_connection(error: BaseException | None) -> bool:
    """Return whether an exception, or one that led to it, is that of a collective: another rank may have caused it.

    Example:
        >>> of_connection(RuntimeError("Connection closed by peer")), of_connection(RuntimeError("mat1 and mat2"))
        (True, False)
    """
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if isinstance(error, dist.DistError | ConnectionError):
            return True
        if isinstance(error, RuntimeError) and CONNECTION.search(str(error)):
            return True
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False


def is_ordinary(error: BaseException) -> bool:
    """Return whether an exception is a way to end without a failure.

    Example:
        >>> is_ordinary(SystemExit(0)), is_ordinary(SystemExit(1))
        (True, False)
    """
    return isinstance(error, ORDINARY) or (isinstance(error, SystemExit) and error.code in (None, 0))
