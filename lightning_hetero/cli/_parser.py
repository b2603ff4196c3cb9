"""Parser of the command line, by jsonargparse: short errors, suggestions, and sub-commands that load when named."""

import argparse
import importlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple, NoReturn, TypeVar

import jsonargparse

from lightning_hetero import __version__
from lightning_hetero.simulate.devices.names import closest

__all__ = ["Command", "Parser", "UserError", "build_parser", "joined_negatives", "option"]

T = TypeVar("T")


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


class Parser(jsonargparse.ArgumentParser):
    """Parser whose errors are a line of usage, the error, and how to get help; options are never abbreviated."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.update(formatter_class=argparse.HelpFormatter, allow_abbrev=False)
        super().__init__(*args, **kwargs)
        self._commands: Mapping[str, Parser] = {}
        self._negative_values = False

    def add_commands(self, parsers: "Mapping[str, Parser]", commands: Mapping[str, Command]) -> None:
        """Add parsers as sub-commands, whose options are the values of their names."""
        what: dict[str, Any] = {"title": "commands", "metavar": "COMMAND", "description": None}
        group = self.add_subcommands(dest="command", prog=self.prog, **what)
        self._commands = parsers
        for name, parser in parsers.items():
            group.add_subcommand(name, parser, help=commands[name].what)
            parser.prog = f"{self.prog} {name}"

    def accept_negative_values(self) -> None:
        """Hand ``-1Gbit`` to the option before it, whose error says more than that an option is unknown."""
        self._negative_values = True

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        """Parse as jsonargparse does; the first argument is the list of arguments."""
        if self._negative_values and args:
            args = (joined_negatives(args[0]), *args[1:])
        return super().parse_args(*args, **{**kwargs, "env": False})  # by the environment, values would skip the checks

    def validate(self, namespace: Any, *args: Any, **kwargs: Any) -> None:
        """Check that no positional argument is missing; each that was given has been checked when it was read."""
        command = namespace.get("command")
        if command in self._commands:
            self._commands[command].validate(namespace[command])
            return
        single = [one for one in self._actions if not one.option_strings and one.nargs is None]
        missing = [str(one.metavar or one.dest) for one in single if namespace.get(one.dest) is None]
        if missing:
            self.error(f"the following arguments are required: {', '.join(missing)}")

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """End the program with exit code 2."""
        head, _, joined = message.partition(": ")
        if head.lower() == "unrecognized arguments":
            self.unknown(last_of(self.args, joined))
        self.exit(2, f"{self.format_usage()}{self.prog}: error: {message}\nOptions: {self.prog} --help\n")

    def unknown(self, arguments: Sequence[str]) -> NoReturn:
        """End the program because of arguments that nothing takes, with the nearest option for the first."""
        first = next((text for text in arguments if text.startswith("-")), arguments[0])
        name = first.split("=")[0]
        if not name.startswith("-"):
            self.error(f"unexpected argument {first!r}.")
        known = reversed(self._option_string_actions)  # the first counts, and --a_b stands before --a-b
        options = [text for text in known if text.startswith("--")]
        longer = sorted(text for text in options if text.startswith(name))
        meant = f" Did you mean {' or '.join(longer)}?" if len(longer) in (1, 2, 3) else closest(name, options)
        self.error(f"unknown option {name}.{meant}")


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
    program = "lightning-hetero"
    parser = Parser(program, usage="%(prog)s COMMAND [options]", description=what, epilog=hint)
    parser.add_argument("-V", "--version", action="version", version=__version__, help="show the version and end")
    modules = {name: command.load() for name, command in commands.items() if name in loaded}
    parsers = {}
    for name, command in commands.items():
        inherits = name in modules and command.extends
        parsers[name] = Parser(
            usage=f"{program} {name} {command.usage}",
            description=f"{command.what[:1].upper()}{command.what[1:]}.",
            parents=[modules[name].base_parser()] if inherits else [],
            add_help=not inherits,
        )
    parser.add_commands(parsers, commands)
    for name, module in modules.items():
        module.add_options(parsers[name])
    return parser, parsers


def option(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return a parser whose error is shown with the option's name."""

    def _parsed(text: str) -> T:
        try:
            return parse(text)
        except (TypeError, ValueError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return _parsed


def last_of(arguments: Sequence[str], joined: str) -> list[str]:
    """Return the arguments that make up a text in which some of the last ones stand with a space between them.

    Example:
        >>> last_of(["run 1", "--png", "my run", "run"], "my run run")
        ['my run', 'run']
    """
    found: list[str] = []
    rest = f" {joined}"
    for text in reversed(arguments):
        if rest.endswith(f" {text}"):
            found.insert(0, text)
            rest = rest[: -len(text) - 1]
    return found


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
