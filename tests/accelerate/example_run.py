"""Run one of Accelerate's example scripts as it is, on small local data and a tiny model; used by ``examples.py``.

What the scripts would download comes from here: data sets, a tokenizer, models of random weights without dropout, a
metric. Learning rates are constant, since warm-ups are counted in steps of one process. With ``REFERENCE=W`` the
training loader's batch is ``W`` times as large: one process then takes the total batch of ``W`` processes. Loaders that
shuffle get a generator, since one process and several draw the seed of theirs from different random numbers.
"""

import json
import os
import random
import runpy
import sys
import types
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

WORDS = [f"w{i}" for i in range(40)]
MODELS = []


def _tokenizer():
    import tokenizers
    import transformers

    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", eos_token="[PAD]", unk_token="[UNK]", model_max_length=48
    )


def _sentences(number, seed):
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(3, 12))) for _ in range(number)]


def load_dataset(name, *args, **kwargs):
    """Pairs of sentences with a label, or lines of text."""
    from datasets import Dataset, DatasetDict

    def part(number, seed):
        if "wikitext" in name:
            return Dataset.from_dict({"text": _sentences(number, seed)})
        first, second, draw = _sentences(number, seed), _sentences(number, seed + 1), random.Random(seed)
        labels = [draw.randint(0, 1) for _ in range(number)]
        columns = {"sentence1": first, "sentence2": second, "label": labels, "idx": list(range(number))}
        return Dataset.from_dict(columns)

    rows = 600 if "wikitext" in name else 100
    return DatasetDict({"train": part(rows, 1), "validation": part(37, 3), "test": part(21, 5)})


class Accuracy:
    """A metric as ``evaluate.load`` gives it."""

    def __init__(self):
        self.right, self.seen = 0, 0

    def add_batch(self, predictions, references):
        self.right += int((predictions == references).sum())
        self.seen += len(references)

    def compute(self, predictions=None, references=None):
        if predictions is not None:
            self.add_batch(predictions, references)
        value = {"accuracy": self.right / max(self.seen, 1)}
        self.right = self.seen = 0
        return value


def _made(cls, config):
    def from_pretrained(*args, **kwargs):
        import torch

        with torch.random.fork_rng():
            torch.manual_seed(7)
            MODELS.append(cls(config).double())
        return MODELS[-1]

    return from_pretrained


def _stub():
    import datasets
    import torch
    import transformers

    datasets.load_dataset = load_dataset
    metric = types.ModuleType("evaluate")
    metric.load = lambda *args, **kwargs: Accuracy()
    sys.modules["evaluate"] = metric
    size = {"vocab_size": 42, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = transformers.BertConfig(
        **size,
        intermediate_size=24,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    llama = transformers.LlamaConfig(**size, intermediate_size=24, max_position_embeddings=64, pad_token_id=0)
    transformers.AutoTokenizer.from_pretrained = lambda *args, **kwargs: _tokenizer()
    transformers.AutoModelForSequenceClassification.from_pretrained = _made(
        transformers.BertForSequenceClassification, bert
    )
    transformers.AutoModelForCausalLM.from_pretrained = _made(transformers.LlamaForCausalLM, llama)
    constant = transformers.optimization.get_constant_schedule
    transformers.optimization.get_linear_schedule_with_warmup = lambda optimizer, *args, **kwargs: constant(optimizer)
    before, times = torch.utils.data.DataLoader.__init__, int(os.environ.get("REFERENCE", "1"))

    def larger(self, dataset, batch_size=1, shuffle=None, *args, **kwargs):
        if shuffle:
            batch_size *= times
            kwargs.setdefault("generator", torch.Generator().manual_seed(5))
        before(self, dataset, batch_size, shuffle, *args, **kwargs)

    torch.utils.data.DataLoader.__init__ = larger
    torch.set_num_threads(1)


if __name__ == "__main__":
    script, result = sys.argv[1], sys.argv[2]
    sys.argv = [script, *sys.argv[3:]]
    _stub()
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
    if os.environ.get("RANK", "0") == "0":
        weights = [value for p in MODELS[-1].parameters() for value in p.detach().flatten().tolist()]
        Path(result).write_text(json.dumps(weights))
