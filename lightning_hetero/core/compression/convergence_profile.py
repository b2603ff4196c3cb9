"""Convergence profile: the cost of compression, staleness and batch size in convergence (S Alg. 1).

``g(r, x)`` is the relative difference in the smoothed loss between a probe training at compression rate ``r`` and total
batch ``x`` and one with neither compression nor staleness. :mod:`lightning_hetero.core.compression.bayesian_search`
chooses the probes; the caller trains them.
"""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_hetero.core.checkpoint_state import CHECKSUMS, changed_since, with_checksums
from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.validation import check_int, check_number
from lightning_hetero.core.whole_file import write_file

__all__ = ["ConvergenceProfile"]

PROFILE_FORMAT = 1


@checked_keywords
@dataclass(frozen=True)
class ConvergenceProfile:
    """Probe trainings of one model, as a file that a controller loads.

    Args:
        min_total: least total batch that was tried.
        max_total: greatest total batch that was tried.
        baseline: smoothed loss of the probe without compression and staleness, above 0.
        points: ``(compression rate, total batch, relative extra loss)`` of each probe.

    Raises:
        TypeError: if a value has the wrong type.
        ValueError: if a value is out of range, or there is no point.

    Example:
        >>> profile = ConvergenceProfile(32, 512, 0.5, ((0.9, 64, 0.1),))
        >>> ConvergenceProfile.from_json(profile.to_json()) == profile
        True
    """

    min_total: int
    max_total: int
    baseline: float
    points: tuple[tuple[float, float, float], ...]

    def __post_init__(self) -> None:
        check_int("min_total", self.min_total, minimum=1)
        check_int("max_total", self.max_total, minimum=self.min_total)
        check_number("baseline", self.baseline, low=0.0, include_low=False)
        object.__setattr__(self, "points", tuple((float(r), float(x), float(y)) for r, x, y in self.points))
        if not self.points:
            raise ValueError("points is empty; a profile has one probe training at least.")
        for i, (rate, total, extra) in enumerate(self.points):
            check_number(f"points[{i}][0]", rate, low=0.0, high=1.0)
            check_number(f"points[{i}][1]", total, low=self.min_total, high=self.max_total)
            check_number(f"points[{i}][2]", extra, low=-math.inf)

    def to_json(self) -> str:
        """Return the profile as text."""
        return json.dumps(with_checksums({"format": PROFILE_FORMAT, **asdict(self)}), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "ConvergenceProfile":
        """Read the profile that :meth:`to_json` wrote.

        Raises:
            ValueError: if the text is not a profile, has changed since it was written, or has another format version.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
            version = fields["format"]
            known = {name: fields[name] for name in ("min_total", "max_total", "baseline", "points")}
            if version != PROFILE_FORMAT:
                raise ValueError(f"it has format {version!r}, but {PROFILE_FORMAT} is read")
            profile = cls(**known)
            if (changed := changed_since(fields)) is not None:
                raise ValueError(f"{changed} has changed since it was written; without {CHECKSUMS!r} it is read")
            return profile
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"this is no convergence profile ({error!r}). Make one by profiling.") from error

    def save(self, path: str | Path) -> None:
        """Write the profile to a file, whole or not at all."""
        write_file(path, f"{self.to_json()}\n".encode())

    @classmethod
    def load(cls, path: str | Path) -> "ConvergenceProfile":
        """Read the profile from a file.

        Raises:
            OSError: if the file cannot be read.
            ValueError: as for :meth:`from_json`; the message names the file.
        """
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
