"""Run one of Accelerate's example scripts as it is, on small local data and a tiny model, for accelerate_examples.py.

What the scripts would download comes from here: data sets, pictures, a tokenizer, models of random weights without
dropout, a metric, and stand-ins for the packages timm, torchvision and schedulefree. Learning rates are constant, since
warm-ups are counted in steps of one process. With ``REFERENCE=W`` the training loader's batch is ``W`` times as large:
one process then takes the total batch of ``W`` processes. Loaders that shuffle get a generator, since one process and
several draw the seed of theirs from different random numbers.
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


def _pictures():
    """Stand-ins for torchvision's transforms and timm's models, and a folder of pictures."""
    import numpy as np
    import torch
    import torchmetrics  # noqa: F401 - looks for the real torchvision, once
    from PIL import Image

    def to_tensor(picture):
        return torch.from_numpy(np.asarray(picture, dtype=np.float64) / 255).permute(2, 0, 1)

    class Network(torch.nn.Module):
        def __init__(self, num_classes):
            super().__init__()
            self.body, self.head = torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(4, num_classes)
            self.default_cfg = {"mean": (0.5, 0.5, 0.5), "std": (0.2, 0.2, 0.2)}

        def get_classifier(self):
            return self.head

        def forward(self, x):
            return self.head(self.body(x).tanh().mean((2, 3)))

    vision, transforms, timm = (types.ModuleType(name) for name in ("torchvision", "torchvision.transforms", "timm"))
    transforms.Compose = lambda steps: lambda x: [x := step(x) for step in steps][-1]
    transforms.RandomResizedCrop = transforms.Resize = lambda *args, **kwargs: lambda picture: picture
    transforms.ToTensor = lambda: to_tensor
    timm.create_model = lambda *args, num_classes, **kwargs: _made(Network, num_classes)()
    sys.modules.update({"torchvision": vision, "torchvision.transforms": transforms, "timm": timm})
    folder = Path(os.environ["PICTURES"])
    if not folder.exists():
        folder.mkdir()
        draw = np.random.default_rng(0)
        for i in range(175):
            label = i % 3
            Image.fromarray((draw.integers(0, 128, (8, 8, 3)) + 40 * label).astype("uint8")).save(
                folder / f"kind{label}_{i}.jpg"
            )


def _schedule_free():
    """A stand-in for the package: AdamW with the two modes that its optimizers have."""
    import accelerate.utils
    import torch

    class AdamWScheduleFree(torch.optim.AdamW):
        def __init__(self, parameters, lr, warmup_steps):
            super().__init__(parameters, lr=lr)

        def train(self):
            self.stepping = True

        def eval(self):
            self.stepping = False

        def step(self, closure=None):
            if not self.stepping:
                raise RuntimeError("step() in evaluation mode")
            return super().step(closure)

    package = types.ModuleType("schedulefree")
    package.AdamWScheduleFree = AdamWScheduleFree
    sys.modules["schedulefree"] = package
    accelerate.utils.is_schedulefree_available = lambda: True


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
    torch.optim.lr_scheduler.OneCycleLR = lambda optimizer, **kwargs: transformers.get_constant_schedule(optimizer)
    _schedule_free()
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
    if "cv" in Path(script).stem:
        _pictures()
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
    if os.environ.get("RANK", "0") == "0":
        weights = [value for p in MODELS[-1].parameters() for value in p.detach().flatten().tolist()]
        Path(result).write_text(json.dumps(weights))
