"""Parser of the command line: short errors, suggestions for typos, and sub-commands whose modules load when named."""

import argparse
import importlib
import re
from collections.abc import Collection, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

from lightning_hetero import __version__
from lightning_hetero.simulate.devices.names import closest

__all__ = ["Command", "Parser", "UserError", "build_parser", "joined_negatives"]


class Command(NamedTuple):
    """Sub-command of the program.

    Attributes:
        module: module in this package with ``add_options(parser)`` and ``run(options) -> exit code``.
        usage: what follows the command's name, for the line of usage.
        what: what it does, for the list of commands.
        extra: extra that installs what the module imports.
        extends: whether it takes over the options of the parser that ``base_parser()`` of the module returns.
    """

    module: str
    usage: str
    what: str
    extra: str = ""
    extends: bool = False

    def load(self) -> ModuleType:
        """Import the module."""
        return importlib.import_module(f"{__package__}.{self.module}")


class UserError(Exception):
    """Error of what the user typed; the message says what is wrong and what to do."""


class Parser(argparse.ArgumentParser):
    """Parser whose errors are a line of usage, the error, and how to get help."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._negative_values = False

    def accept_negative_values(self) -> None:
        """Hand ``-1Gbit`` to the option before it, whose error says more than that an option is unknown."""
        self._negative_values = True

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does."""
        if self._negative_values and args is not None:
            args = joined_negatives(args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """End the program with exit code 2."""
        self.exit(2, f"{self.format_usage()}{self.prog}: error: {message}\nOptions: {self.prog} --help\n")

    def unknown(self, arguments: Sequence[str]) -> NoReturn:
        """End the program because of arguments that nothing takes, with the nearest option for the first."""
        first = next((text for text in arguments if text.startswith("-")), arguments[0])
        name = first.split("=")[0]
        if not name.startswith("-"):
            self.error(f"unexpected argument {first!r}.")
        known = reversed(self._option_string_actions)  # the first counts, and --a_b stands before --a-b
        options = [text for text in known if text.startswith("--")]
        self.error(f"unknown option {name}.{closest(name, options)}")


def build_parser(commands: Mapping[str, Command], loaded: Collection[str]) -> tuple[Parser, dict[str, Parser]]:
    """Return the program's parser, and those of its commands.

    Args:
        commands: the commands by name.
        loaded: those whose modules are imported for their options; the others have none.

    Raises:
        ModuleNotFoundError: if a package that a module imports is not installed.
    """
    what = "Data-parallel training on unequal workers: start it, plan it, measure it, and find out what is wrong."
    hint = "lightning-hetero COMMAND --help lists the options of a command."
    parser = Parser("lightning-hetero", usage="%(prog)s COMMAND [options]", description=what, epilog=hint)
    parser.add_argument("-V", "--version", action="version", version=__version__, help="show the version and end")
    group = parser.add_subparsers(title="commands", metavar="COMMAND", prog="lightning-hetero")
    parsers = {}
    for name, command in commands.items():
        module = command.load() if name in loaded else None
        parents = [module.base_parser()] if module and command.extends else []
        parsers[name] = group.add_parser(
            name,
            help=command.what,
            usage=f"lightning-hetero {name} {command.usage}",
            description=f"{command.what[:1].upper()}{command.what[1:]}.",
            parents=parents,
            add_help=not command.extends,
            allow_abbrev=not command.extends,
        )
        if module:
            module.add_options(parsers[name])
    return parser, parsers


def joined_negatives(argv: Sequence[str]) -> list[str]:
    """Return the arguments with a negative number as part of the option before it, so that its parser is asked.

    Example:
        >>> joined_negatives(["A", "--link", "-1Gbit", "--json"])
        ['A', '--link=-1Gbit', '--json']
    """
    found: list[str] = []
    for text in argv:
        if found and re.fullmatch(r"--\w[\w-]*", found[-1]) and re.match(r"-\.?(?:\d|inf)", text):
            found[-1] += f"={text}"
        else:
            found.append(text)
    return found
