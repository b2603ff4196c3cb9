"""Reports of recorded runs: a page, a picture, a trace, and the comparison of two runs.

The names below are imported on first use: a comparison needs neither Matplotlib nor Jinja.
"""

from typing import TYPE_CHECKING

from lightning_hetero.lazy_exports import lazy_exports

if TYPE_CHECKING:  # the names of _EXPORTS, for type checkers
    from lightning_hetero.core.report.analysis import RunFigures as RunFigures
    from lightning_hetero.core.report.analysis import WorkerFigures as WorkerFigures
    from lightning_hetero.core.report.json_lines import RecordError as RecordError
    from lightning_hetero.core.report.records import RoundRecord as RoundRecord
    from lightning_hetero.core.report.records import RunHeader as RunHeader
    from lightning_hetero.core.report.run_record import RunRecord as RunRecord
    from lightning_hetero.report.compare import Comparison as Comparison
    from lightning_hetero.report.compare import compare_runs as compare_runs
    from lightning_hetero.report.page import write_picture as write_picture
    from lightning_hetero.report.page import write_report as write_report
    from lightning_hetero.report.run_file import find_record as find_record
    from lightning_hetero.report.run_file import read_run as read_run
    from lightning_hetero.report.trace import trace_events as trace_events

_EXPORTS = {
    "Comparison": "lightning_hetero.report.compare",
    "RecordError": "lightning_hetero.core.report.json_lines",
    "RoundRecord": "lightning_hetero.core.report.records",
    "RunFigures": "lightning_hetero.core.report.analysis",
    "RunHeader": "lightning_hetero.core.report.records",
    "RunRecord": "lightning_hetero.core.report.run_record",
    "WorkerFigures": "lightning_hetero.core.report.analysis",
    "compare_runs": "lightning_hetero.report.compare",
    "find_record": "lightning_hetero.report.run_file",
    "read_run": "lightning_hetero.report.run_file",
    "trace_events": "lightning_hetero.report.trace",
    "write_picture": "lightning_hetero.report.page",
    "write_report": "lightning_hetero.report.page",
}
"""Module of each public name."""

__all__ = [*_EXPORTS]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
