"""Write the tables of ``run-record.md``: each kind of line with its fields, from the classes and their docstrings.

make map
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

HERE = Path(__file__).parent
PAGE = HERE / "run-record.md"
sys.path.insert(0, str(HERE.parent))

from lightning_hetero.core.report import field_types, records  # noqa: E402

KINDS = (
    *(records.RunHeader, records.WorkerRecord, records.RoundRecord, records.ChangeRecord, records.GainRecord),
    *(records.StragglerRecord, records.EndRecord),
)
ALWAYS = ("version",)
"""Fields that have a default in Python but not in a file, which is no record without them."""
TYPES = {float: "number", int: "integer", str: "text", bool: "true or false", Mapping: "object of texts"}


def meanings(cls: type) -> dict[str, str]:
    """Return what the docstring of a class says of each field."""
    text = (cls.__doc__ or "").partition("Args:\n")[2].partition("\n\n    Example:")[0]
    parts = re.findall(r"^        (\w+): (.*?)(?=^        \w+: |\Z)", text, re.M | re.S)
    return {name: as_markdown(meaning) for name, meaning in parts}


def as_markdown(text: str) -> str:
    """Return a docstring's text as Markdown in one line."""
    plain = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text)
    return " ".join(plain.replace("``", "`").replace("|", "\\|").split())


def type_of(annotation: Any) -> str:
    """Return the JSON type of a field, with the values that it allows."""
    kind, parts = get_origin(annotation), get_args(annotation)
    if kind is Annotated:
        limits = [limit_of(one) for one in parts[1:]]
        return type_of(parts[0]) + "".join(limits)
    if annotation is records.WorkerRecord:
        return "worker"
    if type(None) in parts:
        return f"{type_of(parts[0])}, or null"
    if kind is tuple:
        word, _, rest = type_of(parts[0]).partition(" ")
        return f"list of {word}{'' if word.endswith('s') else 's'}{' ' * bool(rest)}{rest}"
    return TYPES[kind or annotation]


def limit_of(limit: Any) -> str:
    """Return the range of a number; all else that limits a value is said in the field's meaning."""
    if not isinstance(limit, field_types.Range) or limit.low == -limit.high:
        return ""
    return f" >= {limit.low}" if limit.high > 1 else f" from {limit.low} to {limit.high}"


def default_of(one: Any) -> str:
    """Return the value of a field that is left out."""
    needed = one.default is MISSING and one.default_factory is MISSING
    if needed or one.name in ALWAYS:
        return "always there"
    value = one.default_factory() if one.default is MISSING else one.default
    if value is None:
        return "no bound"
    if value != value:
        return "not known"
    return "empty" if value in ((), {}, "") else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def section(cls: Any) -> str:
    """Return the section of a kind of line."""
    known = meanings(cls)
    kind = f"`{cls.kind}`" if hasattr(cls, "kind") else "a worker"
    summary = as_markdown((cls.__doc__ or "").partition("\n\n    Args")[0])
    rows = [f"| `{one.name}` | {type_of(one.type)} | {default_of(one)} | {known[one.name]} |" for one in fields(cls)]
    return "\n".join(
        (f"## {kind}", "", summary, "", "| field | type | if left out | meaning |", "|---|---|---|---|", *rows)
    )


def sampled() -> str:
    """Return the list of the values of a sampled step."""
    names = ", ".join(f"`{name}`" for name in records.RoundRecord.SAMPLED)
    return f"The values of a sampled step are, in this order: {names}, and then the end of each bucket."


def page(text: str) -> str:
    """Return the page with the tables of now, behind what stands before the first of them."""
    head = re.sub(r"^This page is about version \d+", f"This page is about version {records.VERSION}", text, flags=re.M)
    parts = [section(cls) for cls in KINDS]
    place = KINDS.index(records.RoundRecord)
    parts[place] += f"\n\n{sampled()}"
    return head[: head.index("\n## `run`") + 1] + "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
