"""Requirements on a trainer's arguments: what cannot be uneven is refused by its name, with the way out."""

from typing import Any

from lightning_hetero.accelerate import HeteroPlugin

__all__ = ["check_trainer", "inexact_loss"]

MIXED = ("ORPOTrainer", "CPOTrainer")
"""Trainers of TRL whose loss adds a mean over tokens to a mean over pairs."""
PLAIN = "unequal batches are for plain data parallelism"


def check_trainer(args: Any, model: Any, plugin: HeteroPlugin) -> None:
    """Check that the arguments of a trainer go with unequal batches.

    Args:
        args: arguments of the trainer.
        model: its model, ``None`` if it is made later.
        plugin: settings of unequal workers.

    Raises:
        ValueError: if one does not; the message names it and says what to do.

    Example:
        >>> from lightning_hetero.transformers import HeteroTrainingArguments
        >>> check_trainer(HeteroTrainingArguments(output_dir="out"), None, HeteroPlugin())
    """
    loaders, sizes = args.accelerator_config, plugin.local_batch_sizes
    away = "Leave it out, or set ACCELERATE_USE_HETERO=false for equal batches"
    refused = {
        f"deepspeed={args.deepspeed!r}: {PLAIN}. {away}": bool(args.deepspeed),
        f"fsdp={args.fsdp!r}: {PLAIN}. {away}": bool(args.fsdp),
        f"parallelism_config={args.parallelism_config}: {PLAIN}. {away}": args.parallelism_config is not None,
        f"the model was loaded with tensor parallelism, and {PLAIN}. Load it without tp_plan": (
            (getattr(model, "tp_size", None) or 1) > 1
        ),
        "accelerator_config dispatch_batches=True hands out equal slices of each batch. Leave it out": (
            getattr(loaders, "dispatch_batches", None) is True
        ),
        "accelerator_config split_batches=True makes per_device_train_batch_size the total, while here it is the "
        "average of the workers. Leave it out, and divide the total by the number of workers": (
            getattr(loaders, "split_batches", None) is True
        ),
        f"num_generations={getattr(args, 'num_generations', None)}: trainers that generate what they train on, as GRPO "
        "and RLOO, compare rewards over equal batches. Use TRL's own class, without settings of unequal workers and "
        "with ACCELERATE_USE_HETERO=false": args.world_size > 1 and getattr(args, "num_generations", None) is not None,
        f"max_total_batch_size={plugin.max_total_batch_size}: Trainer fixes the number of steps, and the learning "
        "rates of all of them, before the first one, and a total that moves would change it. Leave it out": (
            plugin.max_total_batch_size is not None
        ),
        f"auto_find_batch_size=True lowers per_device_train_batch_size, and local_batch_sizes={sizes} fixes what each "
        "worker gets. Give one of them": args.auto_find_batch_size and sizes is not None,
    }
    for message, holds in refused.items():
        if holds:
            raise ValueError(f"{message}.")


def inexact_loss(trainer: Any) -> str | None:
    """Return what to know of a trainer's loss that may differ from that of one process; ``None`` if nothing is known.

    Args:
        trainer: a trainer without a ``weight_fn``.

    Example:
        >>> class Own:
        ...     def compute_loss(self, model, inputs): ...
        >>> inexact_loss(Own())[:26]
        'Own.compute_loss is yours:'
    """
    makers = [cls for cls in type(trainer).__mro__ if "compute_loss" in vars(cls)]
    if any(cls.__name__ in MIXED for cls in makers):
        return (
            f"the loss of {type(trainer).__name__} adds a mean over tokens to a mean over pairs, and has one weight, "
            "that of the pairs: where texts differ in length, gradients are nearly, but not exactly, those of one "
            "process. ACCELERATE_USE_HETERO=false gives equal batches."
        )
    found = {f"{cls.__name__}.compute_loss": cls for cls in makers[:1]}
    found["compute_loss_func"] = getattr(trainer, "compute_loss_func", None) or object
    theirs = ("transformers", "trl", "functools", "builtins")  # TRL sets a function of its own, as of loss_type="dft"
    name = next((n for n, made in found.items() if str(made.__module__).partition(".")[0] not in theirs), None)
    if name is None:
        return None
    return (
        f"{name} is yours: what it divides by num_items_in_batch, and a mean over the labels of the batch, are exact. "
        "A loss that is a mean over something else, as with class weights, needs hetero_weight_fn, which returns "
        "what it is divided by: lambda batch: w[batch['labels']].sum()."
    )
