"""``lightning-hetero config``: asks for the settings and writes them to an Accelerate config as ``hetero_config``."""

import argparse
import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any

import yaml

from lightning_hetero.cli._parser import UserError
from lightning_hetero.core.compression.settings import COMPRESSORS, BlockTopK
from lightning_hetero.core.policies import DEFAULT, NAMED
from lightning_hetero.core.validation import check_choice
from lightning_hetero.core.whole_file import write_file
from lightning_hetero.simulate.planning.wording import counted

__all__ = ["QUESTIONS", "add_options", "ask_settings", "default_workers", "run"]

QUESTIONS: tuple[tuple[str, str, str], ...] = (
    ("policy", f"Who splits the batch ({', '.join(NAMED)}, or none for a fixed split)", DEFAULT),
    ("local_batch_sizes", "Fixed split, one size per worker such as 24,12,16 (none: the policy splits)", "none"),
    ("max_local_batch_sizes", "Most samples of a worker, one number or one per worker (none: no limit)", "none"),
    ("loss_reduction", "Is the loss a mean over the samples or their sum (mean, sum)", "mean"),
    ("replan", "When is the split reconsidered (auto, epoch, or a number of steps)", "auto"),
    ("hysteresis", "Least predicted gain for which the split changes, 0 to 1 (none: whatever pays)", "none"),
    ("compression", f"What is sent of gradients ({', '.join(COMPRESSORS)}, or none: all of them)", "none"),
    ("density", "Share of the gradient that block_topk sends, above 0 to 1", str(BlockTopK().density)),
)
"""Setting, question, and the answer that an empty line stands for; ``density`` is asked for ``block_topk`` only."""

PRECISIONS = ("no", "fp16", "bf16")


MOST_CPU_WORKERS = 4
"""Most workers that are proposed for a machine without GPUs; each is a process with a model of its own."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``config``."""
    what = "file to write, or to add the section to (default hetero_config.yaml)"
    parser.add_argument("--config_file", "--config-file", default="hetero_config.yaml", metavar="FILE", help=what)


def run(options: argparse.Namespace) -> int:
    """Ask on the terminal and write the file; all but our section of it stays as it is.

    Raises:
        UserError: if the file cannot be read or written; that is found before the first question.
    """
    from lightning_hetero.accelerate.plugin import SECTION  # loads torch

    path = options.config_file
    config = _existing(path)
    try:
        config = config or _base(_read_line)
        config[SECTION] = ask_settings(_read_line, config.get("num_processes"))
    except EOFError:
        sys.stderr.write("lightning-hetero config: the answers ended early; nothing was written.\n")
        return 2
    write_file(os.path.realpath(path), yaml.safe_dump(config, sort_keys=False).encode())
    sys.stdout.write(f"wrote {path}; start with: lightning-hetero launch --config_file {shlex.quote(path)} script.py\n")
    return 0


def ask_settings(read: Callable[[str], str], num_processes: int | None = None) -> dict[str, Any]:
    """Ask for the settings that differ from the defaults; explain a wrong answer and ask again.

    Args:
        read: shows a question and returns the answer.
        num_processes: number of workers, if it is known.

    Example:
        >>> answers = iter(["pid", "", "", "", "", "", ""])
        >>> ask_settings(lambda question: next(answers))
        {'policy': 'pid'}
    """
    from lightning_hetero.accelerate.plugin import HeteroPlugin, parsed  # loads torch

    settings: dict[str, Any] = {}
    for name, question, default in QUESTIONS:
        if name == "density" and settings.get("compression") != "block_topk":
            continue
        others = {**settings, "policy": None} if name == "local_batch_sizes" else settings

        def setting(text: str, name: str = name, others: dict[str, Any] = others) -> Any:
            value = parsed(name, text)
            plugin = HeteroPlugin(**{k: v for k, v in {**others, name: value}.items() if v is not None})
            if num_processes is not None:
                plugin.check_world_size(num_processes)
            return value

        value = _asked(read, question, default, setting)
        if value is None or str(value) == default:
            continue
        if name == "local_batch_sizes":
            settings.pop("policy", None)  # a fixed split leaves nothing to decide
        settings[name] = value
    return settings


def _asked(read: Callable[[str], str], question: str, default: str, check: Callable[[str], Any]) -> Any:
    """Return the value of an answer; while ``check`` raises, show the reason and ask again."""
    while True:
        try:
            return check(read(f"{question} [{default}]: ").strip() or default)
        except (TypeError, ValueError) as error:
            sys.stderr.write(f"{error}\n")


def default_workers(gpus: int, cores: float) -> tuple[int, str]:
    """Return the number of workers that a machine suggests, and what it has in words.

    Args:
        gpus: accelerators that torch sees.
        cores: cores that this process may use; they count where there is no accelerator.

    Example:
        >>> default_workers(2, 64.0), default_workers(0, 2.0), default_workers(0, 0.5), default_workers(0, 64.0)
        ((2, '2 GPUs'), (2, 'no GPU and 2 cores'), (1, 'no GPU and 0.5 cores'), (4, 'no GPU and 64 cores'))
    """
    if gpus:
        return gpus, counted(gpus, "GPU")
    shown = "1 core" if cores == 1.0 else f"{cores:.3g} cores"
    return max(1, min(int(cores), MOST_CPU_WORKERS)), f"no GPU and {shown}"


def _base(read: Callable[[str], str]) -> dict[str, Any]:
    """Ask for the settings that Accelerate itself needs in a new file."""
    from lightning_hetero.cli.launch import devices  # loads torch
    from lightning_hetero.hardware import cpu_share

    gpus = devices()
    default, here = default_workers(gpus, cpu_share())
    config: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE"}

    def ask(name: str, question: str, default: str, check: Callable[[str, str], Any]) -> None:
        config[name] = _asked(read, question, default, lambda text: check(name, text))

    ask("num_processes", f"Number of workers on all machines; this one has {here}", str(default), _whole(1))
    workers = config["num_processes"]
    ask("num_machines", "Number of machines", "1", _choice([n for n in range(1, workers + 1) if workers % n == 0]))
    if config["num_machines"] > 1:
        ask("machine_rank", "Rank of this machine, 0 for the main one", "0", _whole(0, config["num_machines"] - 1))
        ask("main_process_ip", "Address of the main machine", "", _address)
        ask("main_process_port", "Port of the main machine", "29500", _whole(1, 65535))
        config |= {"rdzv_backend": "static", "same_network": True}
    ask("use_cpu", f"Train on CPUs (true, false); torch sees {here}", str(not gpus).lower(), _choice([True, False]))
    ask("mixed_precision", f"Mixed precision ({', '.join(PRECISIONS)})", "no", _choice(PRECISIONS))
    config["distributed_type"] = "MULTI_CPU" if config["use_cpu"] else "MULTI_GPU"
    return config


def _choice(allowed: Sequence[Any]) -> Callable[[str, str], Any]:
    """Return a check for one of several values, as it is written in YAML."""
    written = {str(value).lower(): value for value in allowed}

    def check(name: str, text: str) -> Any:
        return written[check_choice(name, text.lower(), tuple(written))]

    return check


def _whole(low: int, high: int | None = None) -> Callable[[str, str], int]:
    """Return a check for an integer within bounds."""

    def check(name: str, text: str) -> int:
        if not text.lstrip("-").isdecimal() or int(text) < low or (high is not None and int(text) > high):
            bounds = f">= {low}" if high is None else f"from {low} to {high}"
            raise ValueError(f"{name}={text!r} is out of range; give an integer {bounds}.")
        return int(text)

    return check


def _address(name: str, text: str) -> str:
    if not text or any(character.isspace() for character in text):
        raise ValueError(f"{name}={text!r} is no address; give the host name or IP of the machine with rank 0.")
    return text


def _existing(path: str) -> dict[str, Any]:
    """Return what the file has, empty if there is none yet.

    Raises:
        UserError: if it cannot be read or written, or is no config file.
    """
    from lightning_hetero.accelerate.yaml_file import read_yaml  # loads torch

    if not path.strip():
        raise UserError(f"--config_file {path!r} is no name. Give that of a file in a folder of yours.")
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(path)
    except OSError as error:
        raise UserError(f"--config_file {path}: {error.strerror}. Give another name.") from error
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise UserError(f"--config_file {path}: the folder {folder} does not exist. Make it, or give another file.")
    if os.path.isdir(path) or not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise UserError(f"--config_file {path} cannot be written. Give the name of a file in a folder of yours.")
    if not os.path.exists(path):
        return {}
    try:
        config = read_yaml(path) or {}
    except ValueError as error:
        raise UserError(f"--config_file {path} cannot be read: {error}. Give a YAML file, or a new name.") from error
    if not isinstance(config, dict):
        raise UserError(f"--config_file {path} is no Accelerate config file. Give another name.")
    return config


def _read_line(question: str) -> str:
    sys.stdout.write(question)
    sys.stdout.flush()
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line
