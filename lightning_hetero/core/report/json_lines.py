"""Lines of a run's record: from the classes of :mod:`~lightning_hetero.core.report.records` to JSON and back."""

import json
import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from typing import Annotated, Any, get_args, get_origin

from lightning_hetero.core.report.field_types import shown
from lightning_hetero.core.report.records import (
    VERSION,
    ChangeRecord,
    EndRecord,
    GainRecord,
    Record,
    RoundRecord,
    RunHeader,
    StragglerRecord,
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

    Numbers have six digits, and times since the run began milliseconds. The last field is the checksum of the others.

    Example:
        >>> as_line(GainRecord(12.0, 0, 40, 0.2731234567, 0.241)).strip()
        '{"kind":"gain","time":12.0,"epoch":0,"step":40,"before":0.273123,"after":0.241,"crc":"79dfec4d"}'
    """
    values = asdict(record) if isinstance(record, RunHeader) else vars(record)
    kept = {one.name: values[one.name] for one in fields(record) if not _is_default(one, values[one.name])}
    kept = {"kind": record.kind, **({"version": VERSION} if record.kind == "run" else {}), **kept}
    plain = _rounded(kept)
    if isinstance(plain.get("time"), float):
        plain["time"] = round(float(kept["time"]), 3)
    text = json.dumps(plain, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return f'{text[:-1]},"crc":"{_crc(text)}"}}\n'


_CRC = re.compile(r',"crc":"([0-9a-f]{8})"}\s*$')


def _crc(text: str) -> str:
    """Return the checksum of a line as it is in a file, where what no encoding has is ``?``."""
    return f"{zlib.crc32(text.encode(errors='replace')):08x}"


def _check_crc(line: str) -> None:
    """Check a line by its checksum; lines of earlier versions have none.

    Raises:
        RecordError: if it has changed since it was written.
    """
    found = _CRC.search(line)
    if found and found[1] != _crc(line[: found.start()] + "}"):
        raise RecordError("a line of the record has changed since it was written: its checksum is another one.")


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


def from_line(line: str, workers: int = 0) -> Record | None:
    """Return the record of a line, ``None`` if its kind is unknown.

    Args:
        line: the line.
        workers: number of workers, of which lists have one value each; 0 if it is not known.

    Raises:
        RecordError: if the line has changed since it was written, it is not a JSON object with the fields of its kind,
            a value is not of its field's type or out of its range, or the schema is a newer one.

    Example:
        >>> from_line('{"kind":"gain","time":12.0,"epoch":0,"step":40,"before":0.27,"after":0.24}').after
        0.24
        >>> from_line('{"kind":"gain","time":12.0,"epoch":0,"step":40,"before":-0.27,"after":0.24}')
        Traceback (most recent call last):
        lightning_hetero.core.report.json_lines.RecordError: damaged 'gain': before: -0.27 is below 0, the least ...
    """
    try:
        values = json.loads(line, parse_constant=_no_constant)
    except ValueError as error:
        raise RecordError(f"a line of the record is no JSON: {error}.") from None
    except RecursionError:
        raise RecordError("a line of the record is nested too deeply.") from None
    if not isinstance(values, dict):
        raise RecordError(f"a line of the record is a {type(values).__name__}; it must be a JSON object.")
    kind = values.get("kind")
    if kind == "run":
        _check_version(values.get("version"))
    _check_crc(line)
    if not isinstance(kind, str) or kind not in _KINDS:
        return None
    try:
        record: Record = _object(_KINDS[kind], values, "", workers)
    except _WrongError as error:
        raise RecordError(f"damaged {kind!r}: {error}.") from None
    if isinstance(record, RoundRecord) and record.timed and not record.count:
        raise RecordError(f"damaged 'round': count: 0 steps, of which {record.timed} are timed.")
    return record


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


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


class _WrongError(ValueError):
    """Error of a value, which names its field."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")


def _object(cls: Any, values: Any, name: str, workers: int) -> Any:
    """Return a JSON object as a record; fields that are not known are left out."""
    if not isinstance(values, dict):
        raise _WrongError(name, f"{shown(values)} is no object")
    given = {}
    for one in fields(cls):
        where = f"{name}.{one.name}" if name else one.name
        needed = one.default is MISSING and one.default_factory is MISSING
        if one.name in values and not (needed and values[one.name] is None):
            given[one.name] = _typed(one.type, values[one.name], where, workers)
        elif needed:
            raise _WrongError(where, "is missing" if one.name not in values else "is null")
    return cls(**given)


def _typed(annotation: Any, value: Any, name: str, workers: int) -> Any:
    """Return a JSON value as the type of its field, if it is among the values that this allows."""
    kind, parts = get_origin(annotation), get_args(annotation)
    if kind is Annotated:
        typed = _typed(parts[0], value, name, workers)
        for limit in parts[1:]:
            if why := limit.error(typed, workers):
                raise _WrongError(name, why)
        return typed
    if annotation is float:
        return _number(value, name)
    if is_dataclass(annotation):
        return _object(annotation, value, name, workers)
    if type(None) in parts:
        return None if value is None else _typed(parts[0], value, name, workers)
    plain, word = _JSON[kind or annotation]
    if type(value) is not plain:
        raise _WrongError(name, f"{shown(value)} is no {word}")
    if isinstance(value, list):
        return tuple(_typed(parts[0], one, f"{name}[{i}]", workers) for i, one in enumerate(value))
    if isinstance(value, dict):
        return {key: _typed(parts[1], one, f"{name}[{shown(key)}]", workers) for key, one in value.items()}
    return value


_JSON: dict[Any, tuple[type, str]] = {
    int: (int, "integer"),
    str: (str, "text"),
    bool: (bool, "true or false"),
    tuple: (list, "list"),
    Mapping: (dict, "object"),
}
"""Type of a JSON value by that of its field, and the word for it."""


def _number(value: Any, name: str) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _WrongError(name, f"{shown(value)} is no number")
    try:
        return float(value)
    except OverflowError:
        raise _WrongError(name, f"{shown(value)} is too large") from None
