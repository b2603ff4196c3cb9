"""Speed on a GPU: kernels against a copy, launches for the tensors of real models, and what a step costs over DDP."""

import os
import sys
import time
from pathlib import Path

import torch

from tests.gpu.common import GPU, ranks
from tests.gpu.outcome import require

SHARE, OVERHEAD = 0.8, 0.01
ELEMENTS = (88_000_000, 1_000_000_000)
PAIRS, STEPS = 10, 60


def resnet50():
    """Elements of each parameter of ResNet-50 (161 of them)."""
    sizes, channels = [64 * 3 * 49, 64, 64], 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            sizes += [channels * width, width, width, 9 * width * width, width, width]
            sizes += [4 * width * width, 4 * width, 4 * width]
            if block == 0:
                sizes += [4 * channels * width, 4 * width, 4 * width]
            channels = 4 * width
    return [*sizes, 2048 * 1000, 1000]


def gpt2():
    """Elements of each parameter of GPT-2 (148 of them)."""
    d = 768
    layer = [d, d, 3 * d * d, 3 * d, d * d, d, d, d, 4 * d * d, 4 * d, 4 * d * d, d]
    return [50257 * d, 1024 * d, *(layer * 12), d, d]


def kernels(figures):
    """Compression of gradients against a copy of as much memory."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
    from kernels import Model, compress_candidates, timed

    for n in ELEMENTS:
        model = Model(n, 0.01, torch.float32, "bfloat16", 25_000_000)
        candidates = compress_candidates(model)
        names = {"copy": "copy", "encode": "ours, K1 to K3 with the header", "renew": "renew"}
        seconds = timed({name: candidates[name] for name in names.values()}, 10)
        bandwidth = 8 * model.layout.numel / seconds["copy"]
        share = model.layout.numel * 12.75 / seconds[names["encode"]] / bandwidth
        figures |= {f"{n:.3g} elements: share of copy": share, f"{n:.3g} elements: ms": 1e3 * seconds[names["encode"]]}
        del model, candidates
        torch.cuda.empty_cache()


def launches(figures):
    """Host and device time of a step of block top-k with a sparse optimizer, for the tensors of real models."""
    import torch.distributed as dist

    from tests.comm.compressors.block_steps import BlockSteps

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29534", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("nccl", device_id=GPU)
    for name, sizes in (("ResNet-50", resnet50()), ("GPT-2", gpt2())):
        step, host = BlockSteps(sizes, 0.01, "bfloat16", "SparseSGD", GPU), []
        for turn in range(25):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            step()
            if turn >= 5:
                host.append(time.perf_counter() - begin)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(20):
            step()
        end.record()
        torch.cuda.synchronize()
        figures[f"{name}: tensors"] = len(sizes)
        figures[f"{name}: host ms of a step"] = 1e3 * sorted(host)[10]
        figures[f"{name}: device ms of a step"] = begin.elapsed_time(end) / 20
        del step
        torch.cuda.empty_cache()
    dist.destroy_process_group()


def _trainings(rank):
    """Seconds of a step under plain DDP and under ours, in turns."""
    import lightning as L
    from lightning.pytorch.strategies import DDPStrategy
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_hetero import HeteroDDPStrategy
    from tests.helpers import trainer_of

    class Language(L.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(4096, 512)
            layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
            self.body, self.head = nn.TransformerEncoder(layer, 6), nn.Linear(512, 4096)
            self.count, self.begin, self.seconds = 0, 0.0, 0.0

        def training_step(self, batch, batch_idx):
            (tokens,) = batch
            logits = self.head(self.body(self.embed(tokens)))
            return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

        def on_train_batch_end(self, *args):
            self.count += 1
            if self.count in (15, STEPS - 1):
                torch.cuda.synchronize()
                now = time.perf_counter()
                self.begin, self.seconds = now, (now - self.begin) / (STEPS - 16)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    data = TensorDataset(torch.randint(4096, (16 * STEPS, 256)))
    found = {"ddp": [], "hetero_ddp": []}
    for _ in range(PAIRS):
        for name in found:
            kind = DDPStrategy if name == "ddp" else HeteroDDPStrategy
            module = Language()
            trainer = trainer_of(kind(process_group_backend="nccl"), 1, accelerator="gpu", max_epochs=1)
            trainer.fit(module, DataLoader(data, 16, pin_memory=True))
            found[name].append(module.seconds)
    return found


def gpu():
    figures = {}
    kernels(figures)
    launches(figures)
    (found,) = ranks(_trainings, 1, timeout=110)
    ratios = sorted(ours / plain for plain, ours in zip(found["ddp"], found["hetero_ddp"], strict=True))
    middle = (ratios[PAIRS // 2 - 1] + ratios[PAIRS // 2]) / 2
    figures |= {"ms of a step of DDP": 1e3 * sorted(found["ddp"])[PAIRS // 2], "ours over DDP": middle, "pairs": ratios}
    share = figures["8.8e+07 elements: share of copy"]
    require(share >= SHARE, f"compression reaches {share:.2f} of the copy bandwidth, wanted {SHARE}", figures)
    require(middle <= 1 + OVERHEAD, f"a step costs {100 * (middle - 1):.1f} % over DDP, wanted 1 %", figures)
    return figures
