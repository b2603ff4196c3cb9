"""The fit of ``_lossy_fit.py`` as a loop with torchft: each worker is a replica group of its own, under its torchrun.

As in torchft's own example, but gradients are averaged in one call of the manager after the backward pass: its wrapper
of DDP (torchft 0.2.0, torch 2.13) ends every worker with an AssertionError when one is killed. The total batch becomes
smaller when a worker is lost. ``--job`` starts it all: a lighthouse, with the settings of torchft's README, and a
torchrun for each worker.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

LIGHTHOUSE = ("--min_replicas=1", "--quorum_tick_ms=100", "--join_timeout_ms=10000")


def train(folder, slot, seconds_per_sample):
    import torch
    from _lossy_fit import LOCAL, MOMENTUM, RATE, SAMPLES, WORKERS, Numbers, loss_of, network
    from _lossy_notes import Notes
    from torch.nn.utils import parameters_to_vector, vector_to_parameters
    from torchft import Manager, Optimizer, ProcessGroupGloo

    torch.set_num_threads(1)
    notes, data = Notes(folder, slot, os.environ["TORCHELASTIC_RESTART_COUNT"]), Numbers()

    def load(state):
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def state():
        return {"model": net.state_dict(), "optimizer": optimizer.state_dict()}

    group = ProcessGroupGloo(timeout=timedelta(seconds=5))
    patience = timedelta(seconds=30)
    name = f"worker_{slot}"
    manager = Manager(
        pg=group, min_replica_size=1, load_state_dict=load, state_dict=state, replica_id=name, timeout=patience
    )
    net = network()
    optimizer = Optimizer(manager, torch.optim.SGD(net.parameters(), lr=RATE, momentum=MOMENTUM))
    while True:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(manager.current_step()))
        optimizer.zero_grad()
        step = manager.current_step()
        notes.write(step=step, generation=manager._quorum_id, rank=slot)
        mine = order[slot * LOCAL : (slot + 1) * LOCAL]
        assert len(mine) == LOCAL <= SAMPLES // WORKERS
        time.sleep(seconds_per_sample * LOCAL)
        loss_of(net, data.inputs[mine]).backward()
        gradients = [parameter.grad for parameter in net.parameters()]
        flat = parameters_to_vector(gradients)
        manager.allreduce(flat).wait()
        vector_to_parameters(flat, gradients)
        optimizer.step()
        if manager.current_step() > step:
            notes.write(done=step, generation=manager._quorum_id, rank=slot)


def start(folder, port, ms, workers):
    """Start a lighthouse and the workers, and wait for a signal."""
    environment = {**os.environ, "TORCHFT_LIGHTHOUSE": f"http://localhost:{port}"}
    lighthouse = Path(sys.executable).parent / "torchft_lighthouse"
    running = [subprocess.Popen([lighthouse, f"--bind=[::]:{port}", *LIGHTHOUSE])]
    for slot in range(workers):
        run = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", "--max-restarts=100000")
        script = (__file__, str(folder), f"--slot={slot}", f"--ms={ms}")
        running.append(subprocess.Popen([*run, f"--master-port={port + 1 + slot}", *script], env=environment))
    signal.signal(signal.SIGTERM, lambda *_: [one.terminate() for one in running])
    for one in running:
        one.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--job", type=int, metavar="PORT", help="start all, with ports from this one on")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--slot", type=int)
    parser.add_argument("--ms", type=float, default=2.0, help="of a sample")
    args = parser.parse_args()
    if args.job:
        start(args.folder, args.job, args.ms, args.workers)
    else:
        train(args.folder, args.slot, args.ms / 1000)


if __name__ == "__main__":
    main()
