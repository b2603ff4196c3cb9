"""The command ``lightning-hetero``: a table of subcommands, each in its own module, which is imported when it runs."""

import errno
import importlib
import os
import sys
from collections.abc import Sequence

from lightning_hetero import __version__

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "config": ("configure", "accelerate", "ask for the settings and write an Accelerate config file with them"),
    "launch": ("launch", "accelerate", "start a script as `accelerate launch` does, with a `hetero_config`"),
    "plan": ("plan", "demo", "say how fast a cluster would train, and what a worker, the link or a price changes"),
    "profile": ("profile", "demo", "time this device for a script, so that `plan` can be asked about it"),
    "profile-convergence": (
        "profile_convergence",
        "demo",
        "measure what compression, stale gradients and batch sizes cost in loss",
    ),
    "simulate": ("simulate", "demo", "simulate how the split of a cluster develops over the steps of a training"),
}
"""Name of each subcommand -> module here with ``main(argv) -> exit code``, extra that it needs, and what it does."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        argv: arguments without the program's name; those of the process by default.

    Returns:
        The exit code: 2 for wrong arguments or a package that is not installed, else that of the subcommand, 0 if it
        succeeds.

    Example:
        >>> main(["--version"])
        0.2.0
        0
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else "--help"
    if name in ("--version", "-V"):
        sys.stdout.write(f"{__version__}\n")
        return 0
    if name in ("--help", "-h"):
        sys.stdout.write(_usage())
        return 0 if arguments else 2
    if name not in COMMANDS:
        sys.stderr.write(f"lightning-hetero: unknown command {name!r}. Commands are {', '.join(COMMANDS)}.\n")
        return 2
    module, extra, _ = COMMANDS[name]
    try:
        command = importlib.import_module(f"{__name__}.{module}")
    except ModuleNotFoundError as error:
        sys.stderr.write(
            f"lightning-hetero {name}: {error}. Install it with: pip install 'lightning-hetero[{extra}]'\n"
        )
        return 2
    try:
        code: int = command.main(arguments[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # who reads, as `head` does, has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.stderr.write(f"lightning-hetero {name}: {error.strerror}; free some space, or write to another place.\n")
        return 1
    return code


def _usage() -> str:
    lines = [f"  {name:21}{what}" for name, (_, _, what) in COMMANDS.items()]
    return "\n".join(["usage: lightning-hetero COMMAND [arguments]", "", *lines, ""])
