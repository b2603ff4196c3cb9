"""What a long training and many trainings leave in a process: memory, files, threads, groups, keys and hooks.

Trains once in each mode, on two ranks, and counts at a tenth of the steps and at the end; sync rounds come every 20
steps. ``--fits`` trains so many times in one process instead, one and the same model, and counts after the second and
the last training. ``--device cuda`` trains on the first GPU, which both ranks share over gloo.

Each row holds what was added in between, by the rank that added most: resident memory (``rss_kib``), file descriptors,
threads, process groups, keys in the job's store, hooks (of the model, its parameters and all optimizers), objects of
Python, and bytes of tensors: of those that Python knows, or with a GPU, all that is allocated there. Of a training, it
is the least within two sync rounds that counts, as what lives in the middle of one comes and goes; after trainings, the
least within a second, in which sockets are closed from the other end.
"""

import argparse
import gc
import os
import threading
import time
from multiprocessing import get_context
from pathlib import Path

import _modes
import psutil
import torch
import torch.distributed as dist
from hardware import write_table
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

HERE = Path(__file__).parent
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")


def hooks_of(model):
    """Number of hooks of a model, of its parameters, and of all optimizers."""
    found = len(_global_optimizer_pre_hooks) + len(_global_optimizer_post_hooks)
    found += sum(len(getattr(part, name)) for part in model.modules() for name in HOOKS)
    for p in model.parameters():
        found += len(p._backward_hooks or ()) + len(getattr(p, "_post_accumulate_grad_hooks", None) or ())
    return found


def tensor_bytes(device):
    """Bytes of all tensors: what is allocated on the GPU, or the storages of the tensors that Python knows."""
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    storages = {}
    for found in gc.get_objects():
        if isinstance(found, torch.Tensor):
            storage = found.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def census(model, device="cpu"):
    """What this process has, by kind."""
    gc.collect()
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "groups": len(dist.distributed_c10d._world.pg_map),
        "keys": dist.distributed_c10d._get_default_store().num_keys() if dist.is_initialized() else 0,
        "hooks": hooks_of(model),
        "objects": len(gc.get_objects()),
        "tensor_bytes": tensor_bytes(device),
        "rss_kib": psutil.Process().memory_info().rss // 1024,
    }


def least(counts):
    """The least of several counts, by kind."""
    return {kind: min(count[kind] for count in counts) for kind in counts[0]}


def settled(model, device):
    """What this process has when a second has passed, at the least."""
    counts = []
    for _ in range(10):
        counts.append(census(model, device))
        time.sleep(0.1)
    return least(counts)


class Watch:
    """Counts after the steps of a training; of each mark, the least within the two sync rounds that end there.

    Args:
        marks: numbers of steps.
        device: device of the training.
    """

    def __init__(self, marks, device="cpu"):
        self.device, self.marks = device, marks
        self.taken = {}

    def __call__(self, number, model):
        for mark in self.marks:
            if mark - 2 * _modes.ROUND < number <= mark:
                found = census(model, self.device)
                self.taken[mark] = least([self.taken.get(mark, found), found])

    @property
    def counts(self):
        """What was counted for each mark."""
        return [self.taken[mark] for mark in self.marks]


def long_training(mode, steps, device="cpu"):
    """What a training of so many steps has after its first tenth, and at its end."""
    gc.collect()
    gc.freeze()  # what was there before is not counted each time
    watch = Watch((steps // 10, steps - 1), device)
    _modes.train(mode, steps, watch, device=device)
    return watch.counts


def many_trainings(mode, fits, steps, device="cpu"):
    """What there is after the second training, and after the last."""
    taken, models = [], []

    def after_step(number, model):
        models[:] = [model]

    for fit in range(fits):
        _modes.train(mode, steps, after_step, *models, device=device)
        if fit in (1, fits - 1):
            taken.append(settled(models[0], device))
    return taken


def _rank(pipe, rank, port, function, arguments):
    os.environ.update(ACCELERATE_USE_CPU="true" if arguments[-1] == "cpu" else "false")
    _modes.settle(rank, port)
    _modes.quiet()
    began = time.perf_counter()
    found = function(*arguments)
    pipe.send((found, time.perf_counter() - began))
    pipe.recv()  # the store is rank 0's
    os._exit(0)


def on_two_ranks(port, function, *arguments):
    """What both ranks return, and the seconds that they took; the last argument is the device."""
    context = get_context("spawn" if arguments[-1] == "cuda" else "fork")
    pipes, ranks = zip(*(context.Pipe() for _ in range(2)), strict=True), []
    ours, theirs = pipes
    for rank in range(2):
        ranks.append(context.Process(target=_rank, args=(theirs[rank], rank, port, function, arguments)))
        ranks[-1].start()
        theirs[rank].close()
    found = [pipe.recv() for pipe in ours]
    for pipe in ours:
        pipe.send("all are done")
    for rank in ranks:
        rank.join()
    return [counts for counts, _ in found], max(seconds for _, seconds in found)


def added(counts):
    """The most that a rank has added, by kind."""
    return {name: max(last[name] - first[name] for first, last in counts) for name in counts[0][0]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000, help="of one training; with --fits, 40 of each")
    parser.add_argument("--fits", type=int, default=0, help="trainings in one process")
    parser.add_argument("--modes", nargs="+", default=list(_modes.MODES), choices=_modes.MODES, metavar="MODE")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out")
    args = parser.parse_args()
    given = (many_trainings, args.fits, 40) if args.fits else (long_training, args.steps)
    steps = given[-1]
    rows = []
    for number, mode in enumerate(args.modes):
        counts, seconds = on_two_ranks(29900 + number, given[0], mode, *given[1:], args.device)
        rows.append({"mode": mode, "trainings": args.fits or 1, "steps": steps, **added(counts), "seconds": seconds})
    out = args.out or str(HERE / "results" / ("leaks_fits.json" if args.fits else "leaks.json"))
    write_table(rows, out, "what many trainings leave" if args.fits else "what a long training leaves")


if __name__ == "__main__":
    assert threading.active_count() == 1, "ranks are forked"
    main()
