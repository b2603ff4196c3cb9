"""What a check can end with besides its figures."""


class NotHere(Exception):  # noqa: N818 - no error
    """A check cannot be made here; says why."""


class MissedError(AssertionError):
    """A check does not show what it must; holds what was measured all the same."""

    def __init__(self, message, figures):
        super().__init__(message)
        self.figures = figures


def require(holds, message, figures):
    """Fail with the figures at hand unless a condition holds."""
    if not holds:
        raise MissedError(message, figures)
