"""``lightning-hetero launch``: Accelerate's launcher for config files with a ``hetero_config`` section.

Accelerate refuses keys that it does not know. So the launcher removes the section and hands it to the workers as
environment variables; everything else, including all options, goes to ``accelerate launch`` unchanged.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import yaml
from accelerate.commands.config.config_args import default_config_file
from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from lightning_hetero.accelerate.plugin import (
    NAMES,
    PREFIX,
    SECTION,
    as_environment,
    check_variables,
    names_function,
    parsed,
    with_density,
)
from lightning_hetero.accelerate.yaml_file import read_yaml
from lightning_hetero.cli._parser import UserError
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.policies import NAMED
from lightning_hetero.frontend.log import log

__all__ = ["HelpFormatter", "add_options", "base_parser", "devices", "hetero_environment", "read_config", "run"]

HELP = {
    "policy": f"{', '.join(NAMED[:-1])} or {NAMED[-1]}",
    "loss_reduction": "mean or sum",
    "local_batch_sizes": "a fixed split such as 24,12,16",
    "min_local_batch_size": "fewest samples of a worker",
    "max_local_batch_sizes": "most samples of a worker, one number or one per worker",
    "local_batch_multiple": "number of which each worker's samples of a step are a multiple",
    "weight_fn": "module:function that counts what the mean loss of a batch is a mean of",
    "cost_fn": "auto, tokens (lengths of token lists), or module:function that gives the cost of a sample",
    "batch_sampler": "what a batch of your own batch sampler is: per_rank or global",
    "slice_fn": "module:function(batch, start, stop) that returns rows of a batch (batch_size=None)",
    "concat_fn": "module:function(parts) that puts parts of batches together (batch_size=None)",
    "replan": "auto, epoch, or a number of steps",
    "hysteresis": "least predicted gain for which the split changes, 0 to 1",
    "change_cost": "seconds that a change of the split costs, by default measured",
    "hierarchy": "clusters of workers that a low-bandwidth link joins: nodes, env, auto or [[0, 1], [2]]",
    "sparse_optimizer": "true lets SGD or AdamW update only the blocks that block_topk sends",
    "compression": "how gradients are compressed: block_topk, powersgd, fp16, bf16 or auto",
    "density": "share of the gradient that block_topk sends, 0 to 1",
    "on_nonfinite": "what to do about a gradient that is not finite: ignore, skip or raise",
    "max_total_batch_size": "greatest total batch; with it the total moves by goodput",
    "min_total_batch_size": "least total batch",
    "lr_scaling": "how the learning rate follows the total: auto, adascale, sqrt, linear, none or module:function",
    "noise_scale": "true measures the gradient noise scale",
    "report": "true records the run and logs a summary at its end; or a folder for the record; false for neither",
    "shard": "whose samples a stream (IterableDataset) has: mine, whole or claim",
}
GROUP = "Unequal workers"
OTHER_TRAININGS = ("tpu", "tpu_use_cluster", "use_deepspeed", "use_fsdp", "use_megatron_lm")
"""Accelerate's flags for other kinds of training, for which HeteroAccelerator raises its own error."""
NO_ENTRY_POINT = (
    "TORCH_DEVICE_BACKEND_AUTOLOAD is not 1: torch does not call lightning-hetero, and Accelerator() stays a plain one "
    "in a script that imports nothing of ours. Unset the variable, or begin the script with `import lightning_hetero`."
)


class HelpFormatter(argparse.HelpFormatter):
    """Formatter that shows every option once, with underscores; Accelerate's hides options by ``sys.argv``."""

    def add_argument(self, action: argparse.Action) -> None:
        """Show an option without its variants with hyphens, which work, too."""
        action.option_strings = [text for text in action.option_strings if "-" not in text[2:]]
        super().add_argument(action)


def base_parser() -> argparse.ArgumentParser:
    """Return the parser of ``accelerate launch``; of two options for one value, the first one's default counts."""
    parser: argparse.ArgumentParser = launch_command_parser()
    actions = reversed(parser._actions)  # argparse has no public list of them
    parser.set_defaults(**{one.dest: one.default for one in actions})
    return parser


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--hetero_<setting>`` for each setting to Accelerate's options."""
    parser.formatter_class = HelpFormatter
    group = parser.add_argument_group(GROUP, "Settings of HeteroPlugin; they go before those of the file.")
    for name in NAMES:
        both = dict.fromkeys((f"--hetero_{name}", f"--hetero-{name.replace('_', '-')}"))
        group.add_argument(*both, dest=f"hetero_{name}", default=None, metavar="VALUE", help=HELP[name])


def run(options: argparse.Namespace) -> int:
    """Start a script on all workers of this machine.

    Returns:
        0, or the exit code of a script that fails; 1 if it is one of several workers.

    Raises:
        UserError: if a setting is wrong, or the workers would train alone.
    """
    given = vars(options)
    flags = {name: given[f"hetero_{name}"] for name in NAMES if given[f"hetero_{name}"] is not None}
    try:
        config, section = read_config(options.config_file or _default_config())
        environment = hetero_environment(section, flags, os.environ)
        _check_machines(options, config or {})
        _check_devices(options, config or {}, devices())
    except (TypeError, ValueError) as error:
        raise UserError(str(error)) from error
    os.environ.update(environment)
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        log.warning(NO_ENTRY_POINT)
    _start_cpu_workers(options, config)
    with _config_file(config) as path:
        options.config_file = path
        return _launched(options)


def _launched(options: Namespace) -> int:
    """Start the workers and return an exit code; a script that fails has said why.

    Raises:
        UserError: if Accelerate refuses the options.
    """
    try:
        launch_command(options)
    except subprocess.CalledProcessError as error:
        sys.stderr.write(f"lightning-hetero launch: the script ended with exit code {error.returncode}.\n")
        return error.returncode if error.returncode > 0 else 1
    except ChildFailedError as error:
        sys.stderr.write(f"lightning-hetero launch: {error}\n")
        return 1
    except SignalException as error:
        sys.stderr.write(f"lightning-hetero launch: ended by {error.sigval.name}\n")
        return 128 + error.sigval
    except (ConnectionError, ValueError) as error:  # of Accelerate's checks: scripts run in other processes
        raise UserError(str(error)) from error
    return 0


def _default_config() -> str | None:
    return default_config_file if os.path.isfile(default_config_file) else None


def read_config(path: str | None) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Return the content of a config file without our section, and the section.

    Raises:
        ValueError: if the file cannot be read, or is not a mapping.
    """
    if path is None:
        return None, {}
    try:
        config = read_yaml(path)
    except ValueError as error:
        raise ValueError(f"--config_file {path} cannot be read: {error}. Give a YAML file.") from error
    if not isinstance(config, dict):
        raise ValueError(f"--config_file {path} has no settings. Write one with `lightning-hetero config`.")
    section = config.pop(SECTION, None) or {}
    if not isinstance(section, dict):
        raise ValueError(f"{SECTION} in {path} is {section!r}; it must be a table of settings.")
    return config or None, section


def hetero_environment(
    section: Mapping[str, Any], flags: Mapping[str, str], environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the workers' variables: a flag takes precedence over an exported variable, and that over the file.

    Raises:
        TypeError: if a setting is unknown or has the wrong type.
        ValueError: if a value is out of range; the message names the flag, the variable or the section.

    Example:
        >>> hetero_environment({"policy": "pid"}, {"replan": "epoch"}, {})["ACCELERATE_HETERO_REPLAN"]
        'epoch'
    """
    empty = [f"--hetero_{name}" for name, text in flags.items() if not text.strip()]
    if empty:
        raise ValueError(f"{empty[0]} has no value. Give one, or leave the option out.")
    variables = as_environment(section)
    exported = {name: environment[name] for name in variables if name in environment}
    variables.update(exported)
    variables.update({PREFIX + name.upper(): value for name, value in flags.items()})
    sources, settings = {}, {}
    check_variables(environment)
    for name in NAMES:
        variable = PREFIX + name.upper()
        text = variables.get(variable, environment.get(variable))
        if text is None or names_function(name, text):  # the workers can import what the launcher cannot
            continue
        settings[name] = parsed(name, text)
        from_environment = f"{variable}={text}" if variable in environment else f"{SECTION}.{name}={text}"
        sources[name] = f"--hetero_{name} {text}" if name in flags else from_environment
    try:
        HeteroConfig(**with_density({name: value for name, value in settings.items() if value is not None}))
    except (TypeError, ValueError) as error:
        named = [source for name, source in sources.items() if name in str(error)]
        named = named or [source for name, source in sources.items() if name == "compression"]
        raise type(error)(f"{', '.join(named)}: {error}") from error
    return variables


def devices() -> int:
    """Count the accelerators that torch sees on this machine.

    Example:
        >>> devices() >= 0
        True
    """
    accelerator = getattr(torch, "accelerator", torch.cuda)  # since torch 2.6
    return int(accelerator.device_count())


def _check_machines(args: Namespace, config: Mapping[str, Any]) -> None:
    """Check the numbers of workers and machines, and that a machine of several knows its place.

    Raises:
        ValueError: if they do not fit.
    """
    for name in ("num_processes", "num_machines"):
        number = getattr(args, name)
        if number is not None and number < 1:
            raise ValueError(f"--{name} {number} is out of range; give an integer >= 1.")
    machines = int(args.num_machines or config.get("num_machines") or 1)
    needed = ("machine_rank", "main_process_ip")
    missing = [f"--{name}" for name in needed if getattr(args, name) is None and config.get(name) is None]
    if machines > 1 and missing and not _other_training(args, config):
        raise ValueError(f"num_machines={machines} needs {' and '.join(missing)}, as options or in the config file.")


def _other_training(args: Namespace, config: Mapping[str, Any]) -> bool:
    """Return whether Accelerate starts something else than processes that average gradients."""
    other = config.get("distributed_type") not in (None, "NO", "MULTI_CPU", "MULTI_GPU")
    return other or bool(config.get("mpirun_config")) or any(getattr(args, name, False) for name in OTHER_TRAININGS)


def _workers(args: Namespace, config: Mapping[str, Any]) -> int:
    return int(args.num_processes or config.get("num_processes") or 1)


def _on_cpu(args: Namespace, config: Mapping[str, Any]) -> bool:
    exported = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on", "y", "t")
    return bool(args.cpu or exported or config.get("use_cpu") or config.get("distributed_type") == "MULTI_CPU")


def _check_devices(args: Namespace, config: Mapping[str, Any], found: int) -> None:
    """Check that several workers will train together; Accelerate would silently let each of them train alone.

    Raises:
        ValueError: if they would train alone.
    """
    workers = _workers(args, config)
    if _other_training(args, config) or workers == 1 or _on_cpu(args, config):
        return
    if found == 0:
        raise ValueError(
            f"num_processes={workers}, and torch sees no GPU on this machine: each process would train alone, all of "
            "them on the same samples. To train on CPUs, give --cpu or write use_cpu: true into the config file."
        )
    if config.get("distributed_type") == "NO" and not args.multi_gpu:
        raise ValueError(
            f"num_processes={workers} and distributed_type: NO, with which Accelerate starts one process. Write "
            "distributed_type: MULTI_GPU into the config file or give --multi_gpu, or set num_processes: 1."
        )


def _start_cpu_workers(args: Namespace, config: dict[str, Any] | None) -> None:
    """Start several CPU workers by torchrun; Accelerate would silently start a single process."""
    given = config or {}
    if not _on_cpu(args, given) or _workers(args, given) == 1 or given.get("mpirun_config"):
        return
    os.environ["ACCELERATE_USE_CPU"] = "true"
    args.cpu, args.multi_gpu = False, True
    if config is not None:
        config.update(use_cpu=False, distributed_type="MULTI_GPU")


@contextlib.contextmanager
def _config_file(config: dict[str, Any] | None) -> Iterator[str | None]:
    """Write the rest of the config to a file for Accelerate."""
    if config is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "config.yaml")
        with open(path, "w", encoding="utf-8") as file:
            yaml.safe_dump(config, file)
        yield path
