"""Error that ends the process of a custom loop, which tells nobody that it fails."""

import functools
import sys
from typing import Any

from lightning_hetero.comm.failures.failure import is_ordinary

__all__ = ["ProcessEnd"]

SYSTEM: Any = sys
"""The module, of which a function is replaced for a while."""


class ProcessEnd:
    """End of a run that begins now: without an error, by one that is being handled, or by one that ends the process.

    Python keeps an uncaught exception in ``sys.last_value`` before functions of ``atexit`` run, whatever
    ``sys.excepthook`` is. It does not keep a ``SystemExit``, so ``sys.exit`` is replaced until :meth:`close`; one that
    is raised without it is not seen.

    Example:
        >>> end = ProcessEnd()
        >>> end.error is None
        True
        >>> try:
        ...     raise ArithmeticError("boom")
        ... except ArithmeticError:
        ...     end.error
        ArithmeticError('boom')
        >>> end.close()
    """

    def __init__(self) -> None:
        self._earlier = _handled(), _uncaught()
        self._exit: BaseException | None = None
        self._original = original = sys.exit

        @functools.wraps(original)
        def noted(status: Any = None) -> None:
            self._exit = _handled() or SystemExit(status)
            original(status)

        self._noted = SYSTEM.exit = noted

    def go_on(self) -> None:
        """Note that the run goes on: somebody has caught a ``SystemExit``."""
        self._exit = None

    def close(self) -> None:
        """Put ``sys.exit`` back, unless somebody else has replaced it as well."""
        if sys.exit is self._noted:
            SYSTEM.exit = self._original

    @property
    def error(self) -> BaseException | None:
        """Error that ends the run, ``None`` if there is none."""
        for one in (_handled(), self._exit, _uncaught()):
            if one is not None and not any(one is earlier for earlier in self._earlier) and not is_ordinary(one):
                return one
        return None


def _handled() -> BaseException | None:
    """Return the exception of the ``except`` or ``finally`` block that runs."""
    return sys.exc_info()[1]


def _uncaught() -> BaseException | None:
    """Return the exception that has reached the top of the interpreter last."""
    found: BaseException | None = getattr(sys, "last_value", None)
    return found
