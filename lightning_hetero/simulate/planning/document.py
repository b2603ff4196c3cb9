"""YAML or JSON whose errors name the line, what is allowed, and the nearest allowed name."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from lightning_hetero.core.keywords import closest

__all__ = ["DocumentError", "Entry", "can_be_read", "read_document"]

T = TypeVar("T")

MERGE = "tag:yaml.org,2002:merge"
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class DocumentError(ValueError):
    """Error of a file; the message begins with its name and line."""


@dataclass(frozen=True)
class Entry:
    """A value of a file, with its place.

    Args:
        node: the parsed value.
        file: name of the file.
        where: name of the value, such as ``workers[2].q``.
    """

    node: yaml.Node
    file: str
    where: str

    def error(self, message: str) -> DocumentError:
        """Return an error at the line of this value."""
        place = f"{self.where}: " if self.where else ""
        return DocumentError(f"{self.file}:{self.node.start_mark.line + 1}: {place}{message}")

    @property
    def is_mapping(self) -> bool:
        """``True`` if it has keys."""
        return isinstance(self.node, yaml.MappingNode)

    @property
    def is_list(self) -> bool:
        """``True`` if it has elements."""
        return isinstance(self.node, yaml.SequenceNode)

    @property
    def is_null(self) -> bool:
        """``True`` if it is empty."""
        return self.node.tag == "tag:yaml.org,2002:null"

    def text(self) -> str:
        """Return the scalar as it is written.

        Raises:
            DocumentError: if it is no scalar.
        """
        if not isinstance(self.node, yaml.ScalarNode):
            raise self.error("give one value here, not a list or a mapping.")
        return str(self.node.value)

    def parsed(self, parse: Callable[[str], T]) -> T:
        """Return what a function makes of the scalar.

        Raises:
            DocumentError: with the function's message, if it raises a ``ValueError`` or ``TypeError``.
        """
        text = self.text()
        try:
            return parse(text)
        except (TypeError, ValueError) as error:
            raise self.error(str(error)) from None

    def elements(self) -> Iterator["Entry"]:
        """Yield the elements of a list.

        Raises:
            DocumentError: if it is no list.
        """
        if not isinstance(self.node, yaml.SequenceNode):
            raise self.error("give a list here, one element a line, each after a hyphen.")
        for i, node in enumerate(self.node.value):
            yield Entry(node, self.file, f"{self.where}[{i}]")

    def plain(self) -> Any:
        """Return plain values as JSON writes them; text that is no JSON stays text.

        Raises:
            RecursionError: if a list or mapping contains itself.
        """
        if self.is_mapping:
            return {str(key.value): Entry(value, self.file, self.where).plain() for key, value in self.pairs()}
        if self.is_list:
            return [each.plain() for each in self.elements()]
        if not self.node.style:  # not in quotes
            with suppress(ValueError):
                return json.loads(self.text())
        return self.text()

    def keys(self) -> list[str]:
        """Return the keys of a mapping, as they are written."""
        return [str(key.value) for key, _ in self.pairs()] if self.is_mapping else []

    def pairs(self, inside: tuple[int, ...] = ()) -> list[tuple[yaml.Node, yaml.Node]]:
        """Return keys and values of a mapping, those that ``<<`` merges into it last and only where they are new.

        Args:
            inside: mappings that this one is being merged into.

        Raises:
            DocumentError: if something other than a mapping is merged, or a mapping into itself.
        """
        own = [pair for pair in self.node.value if pair[0].tag != MERGE]
        names = {str(key.value) for key, _ in own}
        for key, value in self.node.value:
            for node in (value.value if isinstance(value, yaml.SequenceNode) else [value]) if key.tag == MERGE else ():
                if not isinstance(node, yaml.MappingNode) or id(node) in (*inside, id(self.node)):
                    here = Entry(key, self.file, self.where)
                    raise here.error("'<<' merges another mapping, such as '<<: *name', or a list of them; give one.")
                new = [
                    pair
                    for pair in Entry(node, self.file, self.where).pairs((*inside, id(self.node)))
                    if str(pair[0].value) not in names
                ]
                own += new
                names |= {str(key.value) for key, _ in new}
        return own

    def fields(self, allowed: Sequence[str], needed: Sequence[str] = ()) -> dict[str, "Entry"]:
        """Return the values of a mapping by key; empty ones are left out.

        Args:
            allowed: keys that may be there.
            needed: keys that have to be there.

        Raises:
            DocumentError: if it is no mapping, or a key is unknown, given twice, or missing.
        """
        if not isinstance(self.node, yaml.MappingNode):
            raise self.error(f"give a mapping here, with keys among {', '.join(allowed)}.")
        found: dict[str, Entry] = {}
        for key, value in self.pairs():
            name = str(key.value)
            here = Entry(key, self.file, self.where)
            if not isinstance(key, yaml.ScalarNode):
                raise here.error(f"a list or a mapping is no key. Allowed are {', '.join(allowed)}.")
            if name not in allowed:
                raise here.error(f"unknown key {name!r}.{closest(name, allowed)} Allowed are {', '.join(allowed)}.")
            if name in found:
                raise here.error(f"{name!r} is given twice; give it once.")
            found[name] = Entry(value, self.file, f"{self.where}.{name}" if self.where else name)
        missing = [name for name in needed if name not in found or found[name].is_null]
        if missing:
            raise self.error(f"{missing[0]!r} is missing; needed are {', '.join(needed)}.")
        return {name: entry for name, entry in found.items() if not entry.is_null}


def can_be_read(path: str) -> bool:
    """Return whether a path is that of a file or a pipe."""
    return os.path.exists(path) and not os.path.isdir(path)


def read_document(path: str | Path) -> Entry:
    """Read a YAML or JSON file; nothing in it is executed.

    Raises:
        DocumentError: if it cannot be read, or is empty or no YAML.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise DocumentError(f"{path}: {reason}. Give a YAML or JSON file.") from None
    if str(path).endswith(".json"):
        text = text.replace("\t", " ")  # which JSON indents with and YAML does not
    try:
        node = yaml.compose(text, Loader=LOADER)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise DocumentError(f"{path}:{line}: {error.problem or error.context}: this is no YAML or JSON.") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise DocumentError(f"{path}: this is no YAML or JSON: {str(error).splitlines()[0]}") from None
    if node is None:
        raise DocumentError(f"{path}:1: the file is empty; give `workers:` and `total_batch_size:` at least.")
    return Entry(node, str(path), "")
