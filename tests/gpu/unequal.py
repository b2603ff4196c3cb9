"""Unequal workers on real devices: the split that is learned, against the best of those that are tried in the same run.

A GPU beside a CPU: the GPU lends a part of its multiprocessors (a green context), or takes more work for each sample.
Two processes on one GPU run side by side only under CUDA's Multi-Process Service, which also limits the share of each;
the service is a process of this check and changes no setting of the GPU. Without it the GPU runs one process after the
other, whatever their shares: their times then add up, all samples belong to the faster one, and no split says anything.
Where the two are found to hold each other up, their hosts sleep in place of the GPU, and the figures say so.
"""

import os
import shutil
import subprocess
import tempfile
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from tests.gpu.common import CPU, Clock, median, noted, place, ranks, synchronize
from tests.gpu.steps import Nap
from tests.helpers import trainer_of

SHARES = (75, 25)
NAPS = (2e-4, 4e-4)
TOGETHER = 1.15
"""How much slower a process may be for another one, if both are to count as running side by side."""


@dataclass(frozen=True)
class Worker:
    """A worker and its speed.

    Args:
        device: where it trains.
        percent: share of the GPU under the Multi-Process Service.
        multiprocessors: of a green context; 0 for all.
        rounds: how often a sample passes the network.
        nap: seconds of the host for a sample, twice as many backwards.
        threads: of a CPU.
    """

    device: torch.device
    percent: int = 100
    multiprocessors: int = 0
    rounds: int = 1
    nap: float = 0.0
    threads: int = 1

    def begin(self):
        """Take the share, before this process uses the GPU; the stream on which it has it."""
        torch.set_num_threads(self.threads)
        if self.percent < 100:
            os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(self.percent)
        return torch.cuda.stream(green_context(self.multiprocessors)[1]) if self.multiprocessors else nullcontext()


@cache
def green_context(multiprocessors):
    """A green context of so many multiprocessors, and a stream whose kernels run there, whichever thread queues them.

    Raises:
        RuntimeError: if the driver or the packages know none.
    """
    torch.zeros(1, device="cuda")  # a context must be there
    try:
        from torch.cuda.green_contexts import GreenContext

        context = GreenContext.create(num_sms=multiprocessors, device_id=0)
        if hasattr(context, "Stream"):  # since torch 2.12; before, it is that of a thread, and autograd has its own
            return context, context.Stream()
    except (ImportError, RuntimeError) as error:
        print(error, flush=True)
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise RuntimeError("neither torch nor cuda.bindings has green contexts with streams") from error

    def checked(result):
        if result[0] != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"green context: {result[0]}")
        return result[1] if len(result) == 2 else result[1:]

    device = checked(driver.cuDeviceGet(0))
    whole = checked(driver.cuDeviceGetDevResource(device, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))
    groups, *_ = checked(driver.cuDevSmResourceSplitByCount(1, whole, 0, multiprocessors))
    described = checked(driver.cuDevResourceGenerateDesc(groups[:1], 1))
    flag = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    context = checked(driver.cuGreenCtxCreate(described, device, flag))
    stream = checked(driver.cuGreenCtxStreamCreate(context, driver.CUstream_flags.CU_STREAM_NON_BLOCKING, 0))
    return context, torch.cuda.ExternalStream(int(stream), device=0)


@contextmanager
def service():
    """CUDA's Multi-Process Service for the processes that begin meanwhile; ``False`` where it does not start."""
    tool = shutil.which("nvidia-cuda-mps-control")
    if tool is None:
        yield False
        return
    with tempfile.TemporaryDirectory() as folder:
        own = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        os.environ.update(own)
        daemon = subprocess.Popen([tool, "-f"], stdin=subprocess.DEVNULL)
        try:
            end = time.monotonic() + 5
            while daemon.poll() is None and not (Path(folder) / "control").exists() and time.monotonic() < end:
                time.sleep(0.05)
            yield daemon.poll() is None
        finally:
            for name in own:
                del os.environ[name]
            try:
                subprocess.run([tool], input="quit\n", text=True, env={**os.environ, **own}, timeout=5, check=False)
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                daemon.kill()


class Net(L.LightningModule):
    """Convolutions with few parameters and much work."""

    def __init__(self, worker, width, depth):
        super().__init__()
        torch.manual_seed(0)
        self.worker = worker
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Linear(width, 10)
        self.body = nn.Sequential(*(nn.Conv2d(width, width, 3, padding=1) for _ in range(depth)))

    def training_step(self, batch, batch_idx):
        x = functional.relu(self.first(batch[0]))
        for _ in range(self.worker.rounds):
            for layer in self.body:
                x = functional.relu(layer(x))
        loss = functional.cross_entropy(self.last(x.mean((2, 3))), batch[1])
        return Nap.apply(loss, self.worker.nap * len(batch[0])) if self.worker.nap else loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4)


@dataclass(frozen=True)
class Size:
    """Size of a case: of the network, of images, of a batch; steps for learning a split, and for timing one."""

    width: int = 128
    depth: int = 8
    image: int = 32
    each: int = 64
    learn: int = 80
    steps: int = 16
    tried: tuple[float, ...] = (-0.25, -0.12, -0.06, -0.03, 0.03, 0.06, 0.12, 0.25)
    seconds: float = 1.0


def images(size, count):
    """So many images and their classes, all of them one image in memory."""
    return torch.randn(3, size.image, size.image).expand(count, -1, -1, -1), torch.arange(count) % 10


def _speeds(rank, workers, size):
    """Seconds of a sample, for this worker alone and beside the other."""
    worker = workers[rank]
    place(rank, 2, worker.device)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    with worker.begin():
        net = Net(worker, size.width, size.depth).to(worker.device)
        many = size.each // 2 if worker.device.type == "cuda" else min(8, size.each)
        batch = [part.to(worker.device) for part in images(size, many)]

        def for_a_while(seconds):
            begin, count = time.perf_counter(), 0
            while time.perf_counter() - begin < seconds:
                net.training_step(batch, 0).backward()
                synchronize(worker.device)
                count += 1
            return (time.perf_counter() - begin) / count / many

        for_a_while(size.seconds / 2)
        alone = 0.0
        for turn in range(2):
            dist.barrier()
            if turn == rank:
                alone = for_a_while(size.seconds)
        dist.barrier()
        together = for_a_while(size.seconds)
    dist.barrier()
    return alone, together


def _trainings(rank, workers, size):
    """The split that is learned, and median seconds of a step by fixed splits and by DDP's."""
    from lightning.pytorch.strategies import DDPStrategy

    from lightning_hetero import HeteroDDPStrategy

    worker, total = workers[rank], 2 * size.each
    where = place(rank, 2, worker.device)
    worker.begin()

    def train(strategy, steps):
        clock = Clock(worker.device, steps // 3, steps - 1, lead=0)
        trainer = trainer_of(strategy, 1, max_epochs=1, callbacks=[clock], **where)
        loader = DataLoader(TensorDataset(*images(size, total * steps)), size.each)
        with worker.begin():
            trainer.fit(Net(worker, size.width, size.depth), loader)
        return median(clock.host)

    learning = HeteroDDPStrategy(replan=8, process_group_backend="gloo", report=False)
    train(learning, size.learn)
    plans = learning.plan_history
    learned = plans[-1].plan.local_batch_sizes[0]
    around = {total // 2, *(min(max(learned + round(total * part), 1), total - 1) for part in size.tried)}
    seconds = {learned: [], **{one: [] for one in sorted(around)}}
    ddp = []
    for turn in range(2):
        for one in list(seconds)[:: 1 - 2 * turn]:
            fixed = HeteroDDPStrategy(local_batch_sizes=[one, total - one], process_group_backend="gloo", report=False)
            seconds[one].append(train(fixed, size.steps))
        ddp.append(train(DDPStrategy(process_group_backend="gloo"), size.steps))
    means = {one: float(np.mean(values)) for one, values in seconds.items()}
    return {"learned": learned, "plans": len(plans), "seconds": means, "ddp": float(np.mean(ddp))}


def picture(path, title, found, total):
    """Step time by split, as SVG: those that were tried, the learned one, and DDP's."""
    points = {**found["seconds"], total // 2: found["ddp"]}
    most, wide, high = 1.1 * max(points.values()), 560, 260

    def at(samples, seconds):
        return 60 + (wide - 80) * samples / total, high - 40 - (high - 80) * seconds / most

    marks = []
    for one, seconds in points.items():
        x, y = at(one, seconds)
        name = {found["learned"]: "learned", total // 2: "ddp"}.get(one, "")
        colour = {"learned": "#1a7f37", "ddp": "#cf222e"}.get(name, "#6e7781")
        marks.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4' fill='{colour}'/>")
        marks.append(f"<text x='{x:.1f}' y='{y - 9:.1f}' text-anchor='middle' fill='{colour}'>{name}</text>")
    (left, bottom), (right, _) = at(0, 0), at(total, 0)
    Path(path).write_text(
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {wide} {high}' font-family='sans-serif' font-size='12'>"
        f"<text x='{left}' y='20' font-weight='600'>{title}: ms of a step</text>"
        f"<path d='M{left} {at(0, most)[1]}V{bottom}H{right}' stroke='#6e7781' fill='none'/>"
        f"<text x='{left - 6}' y='{at(0, most)[1] + 4}' text-anchor='end'>{1e3 * most:.0f}</text>"
        f"<text x='{right}' y='{bottom + 18}' text-anchor='end'>samples of the first worker, of {total}</text>"
        f"{''.join(marks)}</svg>\n"
    )


def case(figures, name, workers, size, real):
    """Train, and compare the learned split with the best that was tried."""
    found = ranks(_trainings, 2, workers, size, timeout=110)[0]
    total, learned = 2 * size.each, found["learned"]
    best = min(found["seconds"], key=found["seconds"].__getitem__)
    step, ideal = found["seconds"][learned], found["seconds"][best]
    share = ideal / step
    figures.add(
        {
            "learned split": f"{learned}/{total - learned}",
            "best split tried": f"{best}/{total - best}",
            "share of the best": share,
            "ms of a step": 1e3 * step,
            "ms with ddp": 1e3 * found["ddp"],
            "times the speed of ddp": found["ddp"] / step,
            "plans": found["plans"],
            "ms by split": {one: round(1e3 * seconds, 2) for one, seconds in sorted(found["seconds"].items())},
        },
        name,
    )
    path = figures.folder / f"unequal {name}.svg".replace(" ", "-")
    picture(path, name, found, total)
    figures[f"{name}: picture"] = path.name
    figures.must(0 < learned < total, f"{name}: a worker has no samples")
    figures.must(not real or share >= 0.97, f"{name}: the learned split has {share:.3f} of the best one's speed")


def side_by_side(workers, size):
    """Seconds of a sample of each worker, if both run at once as fast as alone; else ``None``, with the slowdown."""
    found = ranks(_speeds, 2, workers, size, timeout=30)
    slowdown = max(together / alone for alone, together in found)
    return ([alone for alone, _ in found] if slowdown <= TOGETHER else None), slowdown


def two_on_one(figures, device, size):
    """Two processes on one GPU."""
    name, naps = "two on one GPU", [Worker(device, nap=nap) for nap in NAPS]
    with service() as served:
        if served:
            workers = [Worker(device, percent=share) for share in SHARES]
            try:
                alone, slowdown = side_by_side(workers, size)
            except Exception as error:  # the service runs, and serves nobody
                alone, slowdown = None, type(error).__name__
            figures[f"{name}: slower at once than alone"] = slowdown
            if alone:
                figures.add({"shares in %": list(SHARES), "us of a sample": [1e6 * s for s in alone]}, name)
                case(figures, name, workers, size, True)
                return
    figures[f"{name}: who is slow"] = "hosts, which sleep: the GPU runs one process after the other"
    case(figures, name, naps, replace(size, width=16, depth=2, each=24), True)


def beside_a_cpu(figures, device, size):
    """A part of a GPU beside the host's CPU."""
    name, cpu = "GPU beside a CPU", Worker(CPU, threads=max(1, (os.cpu_count() or 2) - 2))
    size = replace(size, each=24, learn=48, steps=12, tried=(-0.25, -0.12, -0.04, 0.04, 0.12, 0.25))
    few = Worker(device, multiprocessors=8)
    try:
        found = ranks(_speeds, 2, [few, cpu], size, timeout=40)
    except Exception as error:  # no green contexts here
        figures[f"{name}: no green context"] = f"{type(error).__name__}: {str(error).strip().rpartition(chr(10))[2]}"
        few = Worker(device)
        found = ranks(_speeds, 2, [few, cpu], size, timeout=40)
    (gpu, _), (host, _) = found
    rounds = max(1, round(host / gpu / 4)) if host / gpu > 8 else 1
    few = replace(few, rounds=rounds)
    figures.add({"multiprocessors": few.multiprocessors or "all", "work of a sample on the GPU": rounds}, name)
    figures.add({"us of a sample": [1e6 * gpu * rounds, 1e6 * host], "threads": cpu.threads}, name)
    case(figures, name, [few, cpu], size, True)


def unequal(figures, device):
    if device.type == "cpu":
        small = Size(width=4, depth=1, image=4, each=12, learn=20, steps=6, tried=(-0.1,), seconds=0.05)
        workers = [Worker(device, nap=nap) for nap in NAPS]
        figures["slower at once than alone"] = side_by_side(workers, small)[1]
        case(figures, "two CPUs", workers, small, False)
        return
    for part in (two_on_one, beside_a_cpu):
        with noted(figures, part.__name__):
            part(figures, device, Size())
