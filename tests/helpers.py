"""Run a function on several ranks in processes of their own with a wall limit, and small models to train there."""

import faulthandler
import gc
import logging
import os
import random
import re
import signal
import socket
import sys
import time
import traceback
import warnings
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path

import lightning as L
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


def free_port():
    """A port below those that the kernel gives to connections, a rank's own attempts to reach this one among them.

    Processes that run tests beside each other have ports of their own.
    """
    ports, processes = random.SystemRandom(), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    first = 20_000 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = ports.randrange(first, 32_000, processes)
        with socket.socket() as s, suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def without_address(value):
    """A value as text for the name of a test: processes that share the tests must find the same names."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


class RankError(AssertionError):
    """A rank raised; ``errors`` holds ``(rank, type name, message)`` of all that did."""

    def __init__(self, errors, text):
        super().__init__(text)
        self.errors = errors


def _forget_accelerate():
    """A forked rank must not take the state of an ``Accelerator`` that a test has made before it."""
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState, PartialState

        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState._reset_state()
        GradientState._reset_state()


def _child(connection, fn, args, rank, world_size, port, env, filters):
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__)
    gc.freeze()  # trainers collect garbage when they end: not among all that the parent has imported
    torch.set_num_threads(1)
    for action, message, category, module, line in reversed(filters):
        patterns = [getattr(pattern, "pattern", pattern) or "" for pattern in (message, module)]
        warnings.filterwarnings(action, patterns[0], category, patterns[1], line)
    warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`, callbacks used to create the checkpoint")
    warnings.filterwarnings("ignore", "Using `DistributedSampler` with the dataloaders")
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        NODE_RANK="0",
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
        **env,
    )
    _forget_accelerate()
    try:
        result = ("ok", fn(rank, *args))
    except BaseException as error:  # noqa: BLE001 - everything goes to the test
        result = ("error", (type(error).__name__, str(error), traceback.format_exc()))
    connection.send(result)
    if result[0] == "ok":  # a peer may still be opening a group through the store, which rank 0 holds
        connection.poll(None)
    os._exit(0)


def _tracebacks(results):
    failed = [(rank, result[1][2]) for rank, result in enumerate(results) if result and result[0] == "error"]
    return "\n".join(f"--- rank {rank}\n{text}" for rank, text in failed)


def _say_where(pids):
    """These processes and their children write their stacks to stderr, one after the other."""
    for pid in pids:
        children = Path(f"/proc/{pid}/task/{pid}/children")
        for one in [pid, *map(int, children.read_text().split() if children.exists() else ())]:
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGUSR1)
            time.sleep(0.3)


def _how_it_ended(pid):
    """Exit code or signal of an ended child, which stays a zombie until it is joined: tests look at it, too."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return f"with {'exit code' if ended.si_code == os.CLD_EXITED else 'signal'} {ended.si_status}"


def _context(start):
    if start == "fork" and torch.cuda.is_initialized():
        raise RuntimeError(
            "a test has used a GPU in the process that all ranks are forked from: those of later tests would die. Use "
            'it in a rank, run_ranks(..., start="spawn").'
        )
    return get_context(start)


def _end(processes, pipes, patience):
    """Let the ranks go, and kill those that have not gone within ``patience`` seconds."""
    for pipe in pipes:
        with suppress(OSError):
            pipe.send("all are done")
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, signal.SIGCONT)
            process.join(patience)
            process.kill()
        process.join()


def run_ranks(fn, world_size, *args, timeout=90.0, env=None, expect_errors=False, start="fork"):
    """``fn(rank, *args)`` on every rank at once; the list of results.

    Ranks that use a GPU need ``start="spawn"``: they begin with an interpreter of their own, because CUDA cannot be
    used in the fork of a process that has asked for as little as the number of devices.

    Raises:
        RuntimeError: if this process uses a GPU, so that nothing can be forked from it any more.
        RankError: if a rank raised.
        TimeoutError: if the ranks were not done within ``timeout`` seconds; they and their loaders' workers write where
            they are to stderr, and are killed.
    """
    torch.set_num_threads(1)
    context, filters = _context(start), list(warnings.filters) if start == "spawn" else []
    port = free_port()
    pipes, processes = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe()
        given = (theirs, fn, args, rank, world_size, port, env or {}, filters)
        process = context.Process(target=_child, args=given, daemon=False)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    deadline = time.monotonic() + timeout
    results = [None] * world_size
    try:
        open_pipes = dict(zip(pipes, range(world_size), strict=True))
        while open_pipes:
            ready = wait(list(open_pipes), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = ", ".join(map(str, sorted(open_pipes.values())))
                text = f"rank {missing} of {world_size} was not done within {timeout} s"
                _say_where([processes[rank].pid for rank in open_pipes.values()])
                raise TimeoutError(f"{text}\n{_tracebacks(results)}")
            for pipe in ready:
                rank = open_pipes.pop(pipe)
                try:
                    results[rank] = pipe.recv()
                except EOFError:
                    text = f"rank {rank} died without a word, {_how_it_ended(processes[rank].pid)}"
                    results[rank] = ("error", ("Died", text, text))
    finally:
        _end(processes, pipes, 0.2 if any(r is None for r in results) else 10)
    errors = [(rank, *value[:2]) for rank, (kind, value) in enumerate(results) if kind == "error"]
    if expect_errors:
        return errors
    if errors:
        raise RankError(errors, _tracebacks(results))
    return [value for _, value in results]


def collected():
    """Our log lines from here on, in the order in which this process says them."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("lightning_hetero").addHandler(handler)
    return lines


class Points(Dataset):
    """Rows of a random regression problem that know their index: ``(x, y, index)``."""

    def __init__(self, n=64, features=5, dtype=torch.float64, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, features, generator=generator, dtype=torch.float64).to(dtype)
        self.y = torch.randn(n, 1, generator=generator, dtype=torch.float64).to(dtype)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i], i


class Regressor(L.LightningModule):
    """Small network; remembers which samples it saw and its gradients before every optimizer step."""

    def __init__(self, reduction="mean", features=5, lr=0.05, momentum=0.9, dtype=torch.float64, loss_scale=1.0):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(features, 7), nn.Tanh(), nn.Linear(7, 1)).to(dtype)
        self.reduction, self.lr, self.momentum, self.loss_scale = reduction, lr, momentum, loss_scale
        self.seen, self.grads, self.weights = [], [], []

    def forward(self, x):
        return self.net(x)

    def loss(self, batch):
        x, y, _ = batch
        return nn.functional.mse_loss(self(x), y, reduction=self.reduction) * self.loss_scale

    def training_step(self, batch, batch_idx):
        own = getattr(getattr(self.trainer.strategy, "engine", None), "own_size", None)
        indices = batch[2].tolist()
        self.seen.append((self.trainer.current_epoch, batch_idx, [] if own == 0 else indices))
        return self.loss(batch)

    def on_before_optimizer_step(self, optimizer):
        self.grads.append(
            torch.cat([p.grad.detach().flatten().clone() for p in self.parameters() if p.grad is not None])
        )

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)

    def flat(self):
        return torch.cat([p.detach().flatten() for p in self.parameters()]).numpy()


def trainer_of(strategy, world_size, **kwargs):
    settings = {
        "accelerator": "cpu",
        "devices": world_size,
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(strategy=strategy, **{**settings, **kwargs})


def fit(rank, strategy, world_size, batch_size, model=None, dataset=None, ckpt_path=None, loader_kwargs=None, **kwargs):
    """Fit on this rank; a strategy may be a name, a dict of ``HeteroDDPStrategy`` arguments, or an object."""
    from lightning_hetero import HeteroDDPStrategy

    if isinstance(strategy, dict):
        strategy = HeteroDDPStrategy(**strategy)
    model = Regressor() if model is None else model
    dataset = Points() if dataset is None else dataset
    loader = DataLoader(dataset, batch_size, shuffle=True, **(loader_kwargs or {}))
    trainer = trainer_of(strategy, world_size, **kwargs)
    trainer.fit(model, loader, ckpt_path=ckpt_path)
    return {
        "weights": model.flat(),
        "grads": np.stack([g.numpy() for g in model.grads]) if model.grads else np.zeros((0, 0)),
        "seen": model.seen,
        "history": [(e.epoch, e.step, e.plan.local_batch_sizes) for e in getattr(trainer.strategy, "plan_history", ())],
        "rows": [e.rows for e in getattr(trainer.strategy, "plan_history", ())],
        "steps": trainer.global_step,
        "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()},
    }


def save_late(monkeypatch, checksums, limit=1.0):
    """Let ``torch.save`` wait for checksums that must not be taken before, which is until the limit."""
    save = torch.save

    def late(*args, **kwargs):
        end = time.monotonic() + limit
        while time.monotonic() < end and not (checksums.is_file() and checksums.stat().st_size):
            time.sleep(0.01)
        save(*args, **kwargs)

    monkeypatch.setattr(torch, "save", late)


def covered(results, epoch):
    """All sample indices that count, over all ranks, of one epoch."""
    return sorted(i for r in results for e, _, indices in r["seen"] if e == epoch for i in indices)
