"""Lines of a run's record: from the classes of :mod:`~lightning_hetero.core.report.records` to JSON and back."""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any

from lightning_hetero.core.report.records import (
    VERSION,
    ChangeRecord,
    EndRecord,
    GainRecord,
    Record,
    RoundRecord,
    RunHeader,
    Sizes,
    StragglerRecord,
    WorkerRecord,
)

__all__ = ["RecordError", "as_line", "begins_run", "from_line"]

_KINDS: dict[str, Any] = {
    cls.kind: cls for cls in (RunHeader, RoundRecord, ChangeRecord, GainRecord, StragglerRecord, EndRecord)
}


class RecordError(ValueError):
    """Error of a file, or a line of it, that is no record of a run that this version can read.

    Example:
        >>> from_line("no record")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        lightning_hetero.core.report.json_lines.RecordError: a line of the record is no JSON: Expecting ...
    """


def as_line(record: Record) -> str:
    """Return a record as one line of JSON; what has its default value is left out.

    Numbers have six digits, and times since the run began milliseconds.

    Example:
        >>> as_line(GainRecord(12.0, 0, 40, 0.2731234567, 0.241)).strip()
        '{"kind":"gain","time":12.0,"epoch":0,"step":40,"before":0.273123,"after":0.241}'
    """
    values = asdict(record) if isinstance(record, RunHeader) else vars(record)
    kept = {one.name: values[one.name] for one in fields(record) if not _is_default(one, values[one.name])}
    kept = {"kind": record.kind, **({"version": VERSION} if record.kind == "run" else {}), **kept}
    plain = _rounded(kept)
    if isinstance(plain.get("time"), float):
        plain["time"] = round(float(kept["time"]), 3)
    return json.dumps(plain, separators=(",", ":"), allow_nan=False, ensure_ascii=False) + "\n"


def _is_default(one: Any, value: Any) -> bool:
    if one.default is MISSING and one.default_factory is MISSING:
        return False
    return value == one.default or (isinstance(value, float) and not math.isfinite(value)) or value in ((), {})


def _rounded(value: Any) -> Any:
    """Return plain JSON values; a number that is not finite becomes ``null``."""
    if isinstance(value, Mapping):
        return {str(key): _rounded(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return [_rounded(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def from_line(line: str) -> Record | None:
    """Return the record of a line, ``None`` if its kind is unknown.

    Raises:
        RecordError: if the line is not a JSON object with the fields of its kind, or the schema is a newer one.

    Example:
        >>> from_line('{"kind":"gain","time":12.0,"epoch":0,"step":40,"before":0.27,"after":0.24}').after
        0.24
    """
    try:
        values = json.loads(line)
    except ValueError as error:
        raise RecordError(f"a line of the record is no JSON: {error}.") from None
    except RecursionError:
        raise RecordError("a line of the record is nested too deeply.") from None
    if not isinstance(values, dict):
        raise RecordError(f"a line of the record is a {type(values).__name__}; it must be a JSON object.")
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        return None
    if kind == "run":
        _check_version(values.get("version"))
    cls = _KINDS[kind]
    known = {one.name: one for one in fields(cls)}
    try:
        return cls(**{name: _typed(known[name].type, value) for name, value in values.items() if name in known})  # type: ignore[no-any-return]
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise RecordError(f"a line of kind {kind!r} is damaged: {error}.") from None


_RUN = re.compile(r'"kind"\s*:\s*"run"')


def begins_run(line: str) -> bool:
    """Return whether a line is the header of a run, be it damaged or of a newer schema.

    Example:
        >>> begins_run('{"kind":"run","version":9}'), begins_run('{"kind":"run","vers'), begins_run('{"kind":"end"}')
        (True, True, False)
    """
    if not _RUN.search(line):
        return False
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return True
    return isinstance(values, dict) and values.get("kind") == "run"


def _check_version(version: Any) -> None:
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise RecordError(f"version={version!r} is no version of the record's schema; it must be an integer >= 1.")
    if version > VERSION:
        raise RecordError(
            f"the record has version {version} of the schema, and this version of lightning-hetero reads up to "
            f"{VERSION}. Update lightning-hetero."
        )


def _typed(annotation: Any, value: Any) -> Any:
    """Return a JSON value as the type of its field."""
    convert = _CONVERSIONS.get(annotation)
    return _numbers(value) if convert is None else convert(value)


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is no integer")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _worker(value: Mapping[str, Any]) -> WorkerRecord:
    known = {one.name: one for one in fields(WorkerRecord)}
    given = {name: one for name, one in value.items() if name in known}
    most = given.pop("max_local", None)
    typed = {name: _typed(known[name].type, one) for name, one in given.items()}
    return WorkerRecord(**typed, max_local=None if most is None else _integer(most))


def _number(value: Any) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    return float(value)


def _numbers(value: Any) -> Any:
    """Return nested lists of numbers as tuples."""
    if isinstance(value, list):
        return tuple(_numbers(one) for one in value)
    return _number(value)


_CONVERSIONS: dict[Any, Callable[[Any], Any]] = {
    float: _number,
    int: _integer,
    str: _text,
    bool: bool,
    Sizes: lambda value: tuple(_integer(one) for one in value),
    tuple[str, ...]: lambda value: tuple(_text(one) for one in value),
    tuple[WorkerRecord, ...]: lambda value: tuple(_worker(one) for one in value),
    Mapping[str, str]: lambda value: {str(key): str(one) for key, one in value.items()},
}
"""Conversion of a JSON value by the type of its field; all others are nested lists of numbers."""
