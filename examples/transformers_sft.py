"""Fine-tuning with TRL's SFTTrainer on unequal workers: ``hetero_trainer(SFTTrainer)``, nothing else.

Start it with ``lightning-hetero launch --cpu --num_processes 2 examples/transformers_sft.py``. An option before its
name, such as ``--hetero_local_batch_sizes 21,11``, fixes the split; without it, the split follows the measured times.
"""

import random
import tempfile

import torch
from _model import report_plans, slow_second_worker
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from lightning_hetero.transformers import hetero_trainer

WORDS = [f"word{number}" for number in range(400)]


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word, so that nothing has to be downloaded."""
    special = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    made = Tokenizer(models.WordLevel({**special, **{word: 3 + i for i, word in enumerate(WORDS)}}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def texts(number: int = 1280) -> Dataset:
    """Sentences of 16 to 24 random words."""
    generator = random.Random(0)
    return Dataset.from_list(
        [{"text": " ".join(generator.choices(WORDS, k=generator.randint(16, 24)))} for _ in range(number)]
    )


if __name__ == "__main__":
    disable_progress_bars()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS) + 3,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
    )
    arguments = SFTConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=16,  # on average
        num_train_epochs=2,
        learning_rate=1e-3,
        max_length=32,
        gradient_checkpointing=False,
        logging_steps=40,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = hetero_trainer(SFTTrainer)(
        model=LlamaForCausalLM(config), args=arguments, train_dataset=texts(), processing_class=tokenizer()
    )
    with slow_second_worker(trainer.args.process_index):
        trainer.train()
    if trainer.is_world_process_zero():
        report_plans(trainer.accelerator.plan_history)
    trainer.accelerator.end_training()
