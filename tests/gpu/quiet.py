"""Steps on a GPU that nobody notices: nothing allocated, nothing waited for, and memory that stays flat."""

import os

import torch

from tests.gpu.common import GPU
from tests.gpu.outcome import require

SIZES = (25_000_000, 2_359_296, 589_824, 2048, 700, 1)


def _steps(figures):
    """Block top-k with a sparse optimizer: new segments, waits for events, and host time of a step."""
    import time

    import torch.distributed as dist

    from tests.comm.compressors.block_steps import OPTIMIZERS, BlockSteps

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29533", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("nccl", device_id=GPU)
    waits, wait = [], torch.cuda.Event.synchronize

    def counted(event):
        begin = time.perf_counter()
        wait(event)
        waits.append(time.perf_counter() - begin)

    torch.cuda.Event.synchronize = counted
    for name in OPTIMIZERS:
        step = BlockSteps(SIZES, 0.01, "bfloat16", name, GPU)
        for _ in range(10):
            step()
        torch.cuda.synchronize()
        before, reserved = torch.cuda.memory_stats()["segment.all.allocated"], torch.cuda.memory_reserved()
        waits.clear()
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(20):
            step()
            time.sleep(0.005)  # the device has time to be done, as in a training
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        figures[f"{name}: new segments"] = torch.cuda.memory_stats()["segment.all.allocated"] - before
        figures[f"{name}: reserved MiB more"] = (torch.cuda.memory_reserved() - reserved) / 2**20
        figures[f"{name}: longest wait us"] = 1e6 * max(waits, default=0.0)
        require(figures[f"{name}: new segments"] == 0, f"steps of {name} allocate", figures)
        require(figures[f"{name}: longest wait us"] <= 50, f"steps of {name} wait for the device", figures)
        del step
        torch.cuda.empty_cache()
    dist.destroy_process_group()


def _norms(figures):
    """Norms as Adam scales them, on the streams that callbacks take turns on."""
    from lightning_hetero.optim import AdamPreconditioner

    weight = torch.nn.Parameter(torch.randn(38_597_376, device=GPU))  # the embedding of GPT-2
    adam = torch.optim.Adam([weight])
    weight.grad = torch.randn_like(weight)
    adam.step()
    scale, streams = AdamPreconditioner([adam]), [torch.cuda.Stream(GPU) for _ in range(32)]
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved()
    for turn in range(64):
        stream = streams[turn % 32]
        stream.wait_stream(torch.cuda.current_stream(GPU))
        with torch.cuda.stream(stream):
            scale.squares(weight, weight.grad)
    torch.cuda.synchronize()
    figures["reserved MiB more after 64 steps of Adam's norms"] = (torch.cuda.memory_reserved() - reserved) / 2**20
    require(torch.cuda.memory_reserved() - reserved < 2**30, "norms keep memory on every stream", figures)


def gpu():
    figures = {}
    _steps(figures)
    _norms(figures)
    return figures
