"""Short runs of trainers on tiny random models, the same in one process and on unequal ranks."""

import os
import random
import tempfile
import warnings

import torch
import transformers
from torch import nn
from torch.utils.data import Dataset
from transformers import PrinterCallback, TrainingArguments

from lightning_hetero.transformers import hetero_arguments, hetero_trainer

VOCABULARY = 40
transformers.logging.set_verbosity_error()


class Rows(Dataset):
    """Samples that are kept as they are."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def texts(number=42, longest=12):
    """Texts of very different lengths, a part of whose tokens are no targets."""
    generator = random.Random(0)
    rows = []
    for _ in range(number):
        ids = [generator.randrange(3, VOCABULARY) for _ in range(generator.randint(3, longest))]
        masked = generator.randint(0, len(ids) - 2)
        rows.append({"input_ids": ids, "labels": [-100] * masked + ids[masked:]})
    return Rows(rows)


def padded(rows):
    """Pad texts to the longest one."""
    pad = nn.utils.rnn.pad_sequence
    ids, labels = ([torch.tensor(row[key]) for row in rows] for key in ("input_ids", "labels"))
    return {
        "input_ids": pad(ids, batch_first=True),
        "attention_mask": pad([torch.ones_like(one) for one in ids], batch_first=True),
        "labels": pad(labels, batch_first=True, padding_value=-100),
    }


def labelled(number=42):
    """Texts of one length, with a class each."""
    generator = random.Random(1)
    return Rows(
        [
            {"input_ids": [generator.randrange(3, VOCABULARY) for _ in range(6)], "labels": generator.randint(0, 2)}
            for _ in range(number)
        ]
    )


def llama(longest=32, **settings):
    """A causal language model."""
    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=longest, **small, **settings)
    return transformers.LlamaForCausalLM(config)


def bert(kind="SequenceClassification", labels=3):
    """A classifier."""
    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(vocab_size=VOCABULARY, num_labels=labels, **small, **off)
    return getattr(transformers, f"BertFor{kind}")(config)


def arguments(total, sizes, cls=TrainingArguments, **settings):
    """Arguments of a short run; in one process with the whole total batch."""
    world = int(os.environ["WORLD_SIZE"])  # of a rank's own process
    warnings.simplefilter("ignore")
    given = {
        "output_dir": settings.pop("output_dir", None) or tempfile.mkdtemp(),
        "use_cpu": True,
        "per_device_train_batch_size": total // world,
        "num_train_epochs": 1,
        "logging_steps": 1,
        "logging_strategy": "steps",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "learning_rate": 0.1,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1e9,
        "bf16": False,
        "seed": 3,
        "ddp_backend": "gloo" if world > 1 else None,
        **settings,
    }
    if world > 1:
        given["hetero_local_batch_sizes"] = sizes
        cls = hetero_arguments(cls)
    return cls(**given)


def trained(trainer, **how):
    """What a run has logged, and its weights in the end."""
    trainer.remove_callback(PrinterCallback)
    trainer.train(**how)
    history = trainer.state.log_history
    plans = getattr(trainer.accelerator, "plan_history", ())
    return {
        "losses": [one["loss"] for one in history if "loss" in one],
        "norms": [one["grad_norm"] for one in history if "grad_norm" in one],
        "train_loss": [one["train_loss"] for one in history if "train_loss" in one],
        "rates": [one["learning_rate"] for one in history if "learning_rate" in one],
        "weights": torch.cat([p.detach().double().flatten() for p in trainer.model.parameters()]).numpy(),
        "steps": trainer.state.global_step,
        "epoch": trainer.state.epoch,
        "plans": [tuple(entry.plan.local_batch_sizes) for entry in plans],
        "history": history,
    }


def of(cls):
    """The trainer class for this run: that of unequal workers, or in one process Transformers' own."""
    return hetero_trainer(cls) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else cls
