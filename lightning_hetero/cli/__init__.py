"""The command ``lightning-hetero``: a table of sub-commands, each in its own module, which is imported when it runs."""

import errno
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_hetero import __version__
from lightning_hetero.cli._parser import Command, UserError, build_parser
from lightning_hetero.simulate.devices.names import closest

__all__ = ["COMMANDS", "main"]

SCRIPT = "[options] script [its arguments]"
CLUSTER = "[options] [CLUSTER]"
COMMANDS = {
    "compare": Command(
        "compare", "[options] A B", "compare two recorded runs, with an exit code for automated checks", "report"
    ),
    "completion": Command(
        "completion", "{bash,zsh,tcsh}", "write the script that completes this command", "completion"
    ),
    "config": Command(
        "configure", "[options]", "ask for the settings and write an Accelerate config file with them", "accelerate"
    ),
    "doctor": Command(
        "doctor", "[options]", "check versions, devices, memory and links, and say what slows a training down"
    ),
    "launch": Command(
        "launch",
        SCRIPT,
        "start a script as `accelerate launch` does, with a `hetero_config`",
        "accelerate",
        extends=True,
    ),
    "plan": Command(
        "plan", CLUSTER, "say how fast a cluster would train, and what a worker, the link or a price changes"
    ),
    "profile": Command("profile", SCRIPT, "time this device for a script, so that `plan` can be asked about it"),
    "profile-convergence": Command(
        "profile_convergence", SCRIPT, "measure what compression, stale gradients and batch sizes cost in loss", "demo"
    ),
    "report": Command(
        "report", "[options] RUN", "write a page about a recorded run: what was gained, and what limits it", "report"
    ),
    "simulate": Command(
        "simulate", CLUSTER, "simulate how the split of a cluster develops over the steps of a training"
    ),
}
"""Sub-commands by name; a new one is a line here and a module with ``add_options`` and ``run``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sub-command.

    Args:
        argv: arguments without the program's name; those of the process by default.

    Returns:
        The exit code of the sub-command, 0 if it succeeds; 2 for a package that is not installed.

    Raises:
        SystemExit: with exit code 2 for wrong arguments, and 0 for ``--help`` of a sub-command.

    Example:
        >>> main(["--version"])
        0.2.0
        0
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    _prepare_streams()
    name = arguments[0] if arguments else "--help"
    if name in COMMANDS:
        return _guarded(f"lightning-hetero {name}", lambda: _run(name, arguments))
    return _guarded("lightning-hetero", lambda: _answer(name, arguments))


def _answer(name: str, arguments: Sequence[str]) -> int:
    """Answer what comes without a sub-command."""
    parser, _ = build_parser(COMMANDS, ())
    if name in ("--version", "-V"):
        sys.stdout.write(f"{__version__}\n")
        return 0
    if name in ("--help", "-h"):
        sys.stdout.write(parser.format_help())
        return 0 if arguments else 2
    if name.startswith("-"):
        return parser.unknown([name])
    return parser.error(f"unknown command {name!r}.{closest(name, COMMANDS)} Commands are {', '.join(COMMANDS)}.")


def _run(name: str, arguments: Sequence[str]) -> int:
    """Parse the arguments of a sub-command and run it."""
    command = COMMANDS[name]
    try:
        parser, parsers = build_parser(COMMANDS, (name,))
        options = parser.parse_args(arguments)[name]
        code: int = command.load().run(options)
    except UserError as error:
        parsers[name].error(str(error))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("lightning_hetero"):
            raise
        extra = f"lightning-hetero[{command.extra}]" if command.extra else error.name
        sys.stderr.write(f"lightning-hetero {name}: {error}. Install it with: pip install '{extra}'\n")
        return 2
    return code


def _prepare_streams() -> None:
    """Let a stream that is closed be an empty one, and let a terminal show what it can of any text."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 - as long as the program
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def _guarded(program: str, run: Callable[[], int]) -> int:
    """Run and say in a line what the user or the machine is the cause of: an interrupt, a file, a full disk."""
    try:
        try:
            return run()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stderr.write(f"\n{program}: interrupted\n")
        return 130
    except BrokenPipeError:  # who reads, as `head` does, has read enough
        _discard_output()
        return 1
    except OSError as error:
        if error.errno == errno.ENOSPC:
            _discard_output()
            why = f"{error.strerror}; free some space, or write to another place."
        elif isinstance(error.filename, str):
            why = f"{error.filename}: {error.strerror}. Give a file that can be read or written."
        else:
            raise
        sys.stderr.write(f"{program}: {why}\n")
        return 1


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
