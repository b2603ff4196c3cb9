"""``lightning-hetero config``: ask for the settings, write them into an Accelerate config file as ``hetero_config``."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import yaml

from lightning_hetero.accelerate.plugin import SECTION, HeteroPlugin, parsed
from lightning_hetero.config import POLICIES

__all__ = ["QUESTIONS", "ask_settings", "main"]

QUESTIONS: tuple[tuple[str, str, str], ...] = (
    ("policy", f"Who splits the batch ({', '.join(POLICIES)}, or none for a fixed split)", "perf_model"),
    ("local_batch_sizes", "Fixed split, one size per worker such as 24,12,16 (none: the policy splits)", "none"),
    ("max_local_batch_sizes", "Most samples of a worker, one number or one per worker (none: no limit)", "none"),
    ("loss_reduction", "Is the loss a mean over the samples or their sum (mean, sum)", "mean"),
    ("replan", "When is the split reconsidered (auto, epoch, or a number of steps)", "auto"),
    ("hysteresis", "Least predicted gain for which the split changes, as a share of the step time", "0.03"),
)
"""Setting, question, and the answer that an empty line gives."""

BASE: tuple[tuple[str, str, str], ...] = (
    ("num_processes", "Number of workers on all machines", "2"),
    ("num_machines", "Number of machines", "1"),
    ("use_cpu", "Train on CPUs (true, false)", "false"),
    ("mixed_precision", "Mixed precision (no, fp16, bf16)", "no"),
)


def main(argv: Sequence[str]) -> int:
    """Ask on the terminal and write the file; what the file holds besides our section stays as it is."""
    parser = argparse.ArgumentParser(prog="lightning-hetero config", description="Write an Accelerate config file.")
    parser.add_argument("--config_file", default="hetero_config.yaml", help="file to write, or to add the section to")
    path = parser.parse_args(list(argv)).config_file
    try:
        config = _existing(path) if os.path.isfile(path) else _base(_read_line)
        config[SECTION] = ask_settings(_read_line)
    except EOFError:
        sys.stderr.write("lightning-hetero config: the answers ended early; nothing was written.\n")
        return 2
    except ValueError as error:
        parser.error(str(error))
    with open(path, "w", encoding="utf-8") as file:
        yaml.safe_dump(config, file, sort_keys=False)
    sys.stdout.write(f"wrote {path}; start with: lightning-hetero launch --config_file {path} script.py\n")
    return 0


def ask_settings(read: Callable[[str], str]) -> dict[str, Any]:
    """Settings that differ from the defaults; a wrong answer is explained and asked for again.

    Args:
        read: shows a question and returns the answer.

    Example:
        >>> answers = iter(["pid", "", "", "", "", ""])
        >>> ask_settings(lambda question: next(answers))
        {'policy': 'pid'}
    """
    settings: dict[str, Any] = {}
    for name, question, default in QUESTIONS:
        others = {**settings, "policy": None} if name == "local_batch_sizes" else settings
        value = _asked(read, name, question, default, others)
        if value is None or str(value) == default:
            continue
        if name == "local_batch_sizes":
            settings.pop("policy", None)  # a fixed split leaves nothing to decide
        settings[name] = value
    return settings


def _asked(read: Callable[[str], str], name: str, question: str, default: str, others: dict[str, Any]) -> Any:
    while True:
        value = parsed(name, read(f"{question} [{default}]: ").strip() or default)
        try:
            HeteroPlugin(**{k: v for k, v in {**others, name: value}.items() if v is not None})
        except (TypeError, ValueError) as error:
            sys.stderr.write(f"{error}\n")
            continue
        return value


def _base(read: Callable[[str], str]) -> dict[str, Any]:
    """What Accelerate itself needs to know, of a file that does not exist yet."""
    config: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE"}
    for name, question, default in BASE:
        config[name] = yaml.safe_load(read(f"{question} [{default}]: ").strip() or default)
    config["mixed_precision"] = "no" if config["mixed_precision"] is False else config["mixed_precision"]
    config["distributed_type"] = "MULTI_CPU" if config["use_cpu"] else "MULTI_GPU"
    return config


def _existing(path: str) -> dict[str, Any]:
    with open(path, encoding="utf-8") as file:
        config = yaml.safe_load(file) or {}
    if not isinstance(config, dict):
        raise ValueError(f"--config_file {path} is no Accelerate config file. Give another name.")
    return config


def _read_line(question: str) -> str:
    sys.stdout.write(question)
    sys.stdout.flush()
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line
