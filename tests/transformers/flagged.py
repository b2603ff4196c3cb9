"""Run one of Transformers' own scripts offline: its tokenizers and models are tiny and random."""

import runpy
import sys

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from tests.transformers.runs import llama


def tokenizer(*args, **kwargs):
    """Words by their letters."""
    letters = {letter: number + 3 for number, letter in enumerate(" abcdefghijklmnopqrstuvwxyz.,")}
    words = models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2, **letters}, unk_token="<unk>")
    made = Tokenizer(words)
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


if __name__ == "__main__":
    torch.set_num_threads(1)
    AutoTokenizer.from_pretrained = tokenizer
    AutoModelForCausalLM.from_pretrained = lambda *args, **kwargs: llama(longest=128)
    script, sys.argv = sys.argv[1], sys.argv[1:]
    runpy.run_path(script, run_name="__main__")
