"""``lightning-hetero completion``: the script with which a shell completes commands, options and files, by shtab."""

import argparse
import sys
from collections.abc import Mapping

from lightning_hetero.cli._parser import Command, Parser, build_parser

__all__ = ["SHELLS", "add_options", "completed", "run"]

SHELLS = ("bash", "zsh", "tcsh")
FILES = ("a", "b", "cluster", "config_file", "output", "picture", "png", "record", "script", "trace", "training_script")
"""Options and arguments after which a shell offers files."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the argument of ``completion``."""
    where = "~/.local/share/bash-completion/completions/lightning-hetero"
    parser.epilog = f"For bash: lightning-hetero completion bash > {where}, and open a new shell."
    parser.add_argument("shell", choices=SHELLS, help="shell that the script is for")


def run(options: argparse.Namespace) -> int:
    """Write the script."""
    import shtab

    from lightning_hetero.cli import COMMANDS

    sys.stdout.write(shtab.complete(completed(COMMANDS), options.shell) + "\n")
    return 0


def completed(commands: Mapping[str, Command]) -> Parser:
    """Return the program's parser with the options of every command whose packages are installed."""
    import shtab

    parser, parsers = build_parser(commands, [name for name in commands if _loads(commands[name])])
    for command in parsers.values():
        for action in command._actions:  # argparse has no public list of them
            if action.dest in FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    return parser


def _loads(command: Command) -> bool:
    try:
        command.load()
    except ModuleNotFoundError:
        return False
    return True
