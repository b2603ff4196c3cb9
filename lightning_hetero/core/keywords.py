"""Names of keyword arguments and settings: a misspelt one is refused at construction, with the nearest that exist."""

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

__all__ = ["check_names", "checked_keywords", "closest"]

Target = TypeVar("Target", bound=Callable[..., Any])

MANY = 60
"""Names from which on an error with a suggestion does not list them all."""
TIE = 0.05
"""Difference of similarity up to which a second name is suggested as well."""


def closest(name: object, allowed: Iterable[str], *, prefix: str = "") -> str:
    """Return a sentence with the nearest of the allowed names, empty if none is near.

    Args:
        name: as it was given; capitals, spaces, quotes, hyphens and underscores do not count.
        allowed: names that exist.
        prefix: what all names begin with, the given one as well, so that it makes none of them near.

    Example:
        >>> closest("A10", ["A100", "T4"])
        ' Did you mean A100?'
    """
    plain = {_plain(each.removeprefix(prefix)): each for each in allowed}
    given = _plain(str(name).removeprefix(prefix))
    near = difflib.get_close_matches(given, list(plain), n=2)
    similar = [difflib.SequenceMatcher(None, found, given).ratio() for found in near]
    meant = [plain[found] for found, ratio in zip(near, similar, strict=True) if ratio >= similar[0] - TIE]
    return f" Did you mean {' or '.join(meant)}?" if meant else ""


def _plain(name: str) -> str:
    return re.sub(r"[\s'_-]+", "", name).lower()


def check_names(
    where: str, given: Iterable[str], allowed: Sequence[str], *, kind: str = "argument", hint: str = ""
) -> None:
    """Check the names of keyword arguments or settings.

    Args:
        where: object that takes them, for the error.
        given: names that were given.
        allowed: names that exist.
        kind: word for such a name, for the error.
        hint: further sentence of the error.

    Raises:
        TypeError: if a name does not exist; the error suggests the nearest one that does.

    Example:
        >>> check_names("HeteroPlugin", ["polcy"], ["policy", "replan"])
        Traceback (most recent call last):
        TypeError: HeteroPlugin has no argument polcy. Did you mean policy? Allowed are policy, replan.
    """
    for name in given:
        if name not in allowed:
            meant, also = closest(name, allowed), f" {hint}" if hint else ""
            listed = f"Allowed are {', '.join(allowed)}." if allowed else "It takes none."
            if meant and len(allowed) > MANY:
                listed = f"help({where}) lists all {len(allowed)}."
            raise TypeError(f"{where} has no {kind} {name}.{meant}{also} {listed}")


def checked_keywords(target: Target) -> Target:
    """Let a class or a function refuse a misspelt keyword with the nearest name that it has.

    Python itself refuses such a keyword, but suggests nothing. A target that takes any keyword (``**kwargs``) cannot be
    checked like this: it calls :func:`check_names` with the names that it knows.

    Args:
        target: function, or class with an ``__init__`` of its own.

    Returns:
        The same class, or a function that looks the same.

    Raises:
        TypeError: if the target takes any keyword.

    Example:
        >>> @checked_keywords
        ... def split(total, policy="pid"):
        ...     return total
        >>> split(64, polcy="even")
        Traceback (most recent call last):
        TypeError: split has no argument polcy. Did you mean policy? Allowed are total, policy.
    """
    if not isinstance(target, type):
        return cast(Target, _checked(target, 0))
    setattr(target, "__init__", _checked(vars(target)["__init__"], 1))  # noqa: B010  # mypy refuses the assignment
    return target


def _checked(call: Callable[..., Any], bound: int) -> Callable[..., Any]:
    """Return the call with errors that suggest a name; its first ``bound`` parameters (``self``) are no keywords."""
    parameters = list(inspect.signature(call).parameters.values())[bound:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        raise TypeError(f"{call.__qualname__} takes any keyword. Let it call check_names with those that it knows.")
    allowed = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]

    @functools.wraps(call)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except TypeError:
            where = type(args[0]).__name__ if bound else call.__name__
            misspelt = _refusal(where, kwargs, allowed)
            if misspelt is None:
                raise
            raise misspelt from None

    return checked


def _refusal(where: str, given: Iterable[str], allowed: Sequence[str]) -> TypeError | None:
    """Return the error of :func:`check_names`, ``None`` if all names exist."""
    try:
        check_names(where, given, allowed)
    except TypeError as error:
        return error
    return None
