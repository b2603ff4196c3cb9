"""``lightning-hetero compare``: two recorded runs beside each other, with an exit code for automated checks."""

import argparse
import json
import math
import sys

from lightning_hetero.cli._parser import Parser, UserError
from lightning_hetero.core.report.json_lines import RecordError
from lightning_hetero.core.report.records import FILE_NAME
from lightning_hetero.core.rounded import rounded
from lightning_hetero.report.compare import compare_runs, compared_text
from lightning_hetero.report.run_file import find_record, read_run

__all__ = ["add_options", "parse_share", "run"]


def add_options(parser: Parser) -> None:
    """Add the options of ``compare``."""
    parser.accept_negative_values()
    add = parser.add_argument
    where = f"folder of its logger, or the {FILE_NAME} in it"
    add("a", metavar="A", help=f"run to compare with: {where}")
    add("b", metavar="B", help="run to compare")
    limit = "exit with code 1 if B trains fewer samples/s than A by more than this share"
    add("--max-regression", type=parse_share, metavar="5%", help=limit.replace("%", "%%"))
    add("--json", action="store_true", help="write JSON instead of a table")


def run(options: argparse.Namespace) -> int:
    """Compare two runs; return 1 if the second one is slower than the limit allows."""
    try:
        paths = [find_record(path) for path in (options.a, options.b)]
        found = compare_runs(*(read_run(path) for path in paths))
    except RecordError as error:
        raise UserError(str(error)) from error
    limit = options.max_regression
    if limit is not None and not math.isfinite(found.regression):
        raise UserError(
            "--max-regression needs steps that were timed in both runs; "
            f"A has {_rate(found.rate.a)}, B has {_rate(found.rate.b)}. Let both train until a sync round."
        )
    exceeds = limit is not None and found.exceeds(limit)
    if options.json:
        values = {**found.to_dict(), "max_regression": limit, "exceeded": exceeds}
        json.dump(values, sys.stdout, indent=2, allow_nan=False)
        sys.stdout.write("\n")
        return int(exceeds)
    sys.stdout.write(compared_text(found, (str(paths[0]), str(paths[1]))))
    if limit is not None:
        verdict = "more than" if exceeds else "within"
        sys.stdout.write(f"That is {verdict} the {100 * limit:.3g} % that --max-regression allows.\n")
    return int(exceeds)


def _rate(rate: float) -> str:
    return f"{rounded(rate, 4)} samples/s" if math.isfinite(rate) else "none"


def parse_share(text: str) -> float:
    """Return a share from text such as ``5%`` or ``0.05``.

    Example:
        >>> parse_share("5%"), parse_share("0.05")
        (0.05, 0.05)
    """
    try:
        value = float(text.strip().removesuffix("%")) / (100.0 if text.strip().endswith("%") else 1.0)
    except ValueError:
        value = math.nan
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is no share; give a percentage such as 5% or a number below 1.")
    return value
