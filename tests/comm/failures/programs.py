"""Training loops of all front ends in processes of their own, one of which fails; each ends as Python does."""

import atexit
import faulthandler
import gc
import logging
import os
import signal
import sys
import time
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from lightning_hetero import HeteroElasticStrategy
from lightning_hetero.accelerate import HeteroAccelerator
from lightning_hetero.comm.failures import rank_monitor as monitor
from lightning_hetero.config import HeteroConfig
from lightning_hetero.data import PermutationStream
from lightning_hetero.engine import HeteroEngine
from lightning_hetero.frontend.model_setup import attach_module
from lightning_hetero.frontend.wrap_model import WrappedModel
from lightning_hetero.session import HeteroSession
from lightning_hetero.transformers import hetero_trainer
from tests.helpers import Points, Regressor, _forget_accelerate, fit, free_port

AT = 3
WALL = 45.0


def strike(what):
    """Suffer a fault in this process."""
    if what == "raise":
        raise ZeroDivisionError("a bug of the user's")
    if what == "leave":
        sys.exit(3)
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}[what])


def _network():
    torch.manual_seed(0)
    return nn.Linear(5, 1)


def _dataset(n=96):
    torch.manual_seed(0)
    return TensorDataset(torch.randn(n, 5), torch.randn(n, 1))


class Struck(Regressor):
    def __init__(self, what):
        super().__init__()
        self.what = what

    def training_step(self, batch, batch_idx):
        if self.what and batch_idx == AT:
            strike(self.what)
        return super().training_step(batch, batch_idx)


def lightning(rank, what):
    fit(rank, {}, 3, 4, model=Struck(what), dataset=Points(96), max_epochs=1)


def elastic(rank, what):
    fit(rank, HeteroElasticStrategy(mega_batch_size=48), 3, 4, model=Struck(what), dataset=Points(96), max_epochs=1)


def fabric(_rank, what):
    fabric = Fabric(accelerator="cpu", devices=3, strategy="hetero_ddp")
    fabric.launch()
    net = _network()
    net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for step, (x, y) in enumerate(fabric.setup_dataloaders(DataLoader(_dataset(), 4, shuffle=True))):
        if what and step == AT:
            strike(what)
        optimizer.zero_grad()
        fabric.backward(nn.functional.mse_loss(net(x), y))
        optimizer.step()


def accelerate(_rank, what):
    accelerator = HeteroAccelerator(cpu=True)
    try:
        _steps(accelerator, what)
    finally:
        accelerator.end_training()


def _steps(accelerator, what, passes=1):
    net = _network()
    net, optimizer, loader = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(_dataset(), 4, shuffle=True)
    )
    for _ in range(passes):
        for step, (x, y) in enumerate(loader):
            if what and step == AT:
                strike(what)
            optimizer.zero_grad()
            accelerator.backward(nn.functional.mse_loss(net(x), y))
            optimizer.step()


def again(_rank, what, passes):
    """A rank catches its error, or ends early, and begins another training, in which nobody else takes part."""
    with suppress(ZeroDivisionError):
        _steps(HeteroAccelerator(cpu=True), what, passes)
    HeteroAccelerator(cpu=True)


def transformers(_rank, what):
    class Strike(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if what and state.global_step == AT:
                strike(what)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = _network()

        def forward(self, x, labels):
            return {"loss": nn.functional.mse_loss(self.net(x), labels)}

    rows = [{"x": x.tolist(), "labels": y.tolist()} for x, y in _dataset()]
    arguments = TrainingArguments(
        os.environ["FOLDER"],
        use_cpu=True,
        per_device_train_batch_size=4,
        num_train_epochs=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    hetero_trainer(Trainer)(Net(), arguments, train_dataset=rows, callbacks=[Strike()]).train()


def own_loop(rank, what):
    torch.distributed.init_process_group("gloo")
    engine = HeteroEngine(HeteroConfig(), rank=rank, world_size=3, device=torch.device("cpu"))
    session = HeteroSession(engine)
    net = DistributedDataParallel(_network())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    WrappedModel(net, engine, lambda model: attach_module(engine, model, None), lambda: [optimizer])
    batches = session.shard(PermutationStream(96, shuffle=True, seed=0), batch_size=4)
    data = _dataset()
    for step, indices in enumerate(session.steps(lambda: iter(batches))):
        if what and step == AT:
            strike(what)
        optimizer.zero_grad()
        x, y = data[indices]
        with engine.backward():
            engine.scale_loss(nn.functional.mse_loss(net(x), y)).backward()
        optimizer.step()


LOOPS = {loop.__name__: loop for loop in (lightning, elastic, fabric, accelerate, transformers, own_loop)}


def _program(rank, world_size, port, folder, settings, loop, args):
    file = os.open(f"{folder}/{rank}.err", os.O_CREAT | os.O_WRONLY)
    os.dup2(file, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    faulthandler.register(signal.SIGUSR2, file=sys.stderr)
    gc.freeze()  # trainers collect garbage when they begin: not what the tests before have left
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", FOLDER=folder)
    _forget_accelerate()
    torch.set_num_threads(1)
    logging.getLogger().handlers.clear()  # those of the tests
    logging.getLogger("lightning_hetero").handlers[:] = [logging.StreamHandler()]
    monitor.SETTINGS = settings
    status = 0
    try:
        loop(rank, *args)
    except SystemExit as end:
        status = end.code
    except BaseException as error:  # noqa: BLE001 - as Python itself does
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(status)


def programs(folder, loop, args_of, settings, world_size=3, left=()):
    """Exit codes, standard error and seconds of each rank; those in ``left`` are killed when the others have ended."""
    context, port, began = get_context("fork"), free_port(), time.monotonic()
    started = [
        context.Process(target=_program, args=(r, world_size, port, str(folder), settings, loop, args_of(r)))
        for r in range(world_size)
    ]
    for process in started:
        process.start()
    try:
        waited = [process for rank, process in enumerate(started) if rank not in left]
        for process in waited:
            process.join(max(0.0, began + WALL - time.monotonic()))
        late = [rank for rank, process in enumerate(started) if process in waited and process.is_alive()]
        for rank in late:  # they write where they are
            os.kill(started[rank].pid, signal.SIGUSR2)
            started[rank].join(1.0)
        texts = [Path(folder, f"{rank}.err").read_text() for rank in range(world_size)]
        assert not late, f"ranks {late} have not ended\n" + "\n---\n".join(texts)
        return [process.exitcode for process in started], texts
    finally:
        for process in started:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            process.join()
