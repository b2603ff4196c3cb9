"""Workers with keepers that are forked instead of started: they have imported everything."""

import faulthandler
import os
import signal
import subprocess
import sys
from multiprocessing import get_context

import torch

from lightning_hetero.comm.membership import slots
from lightning_hetero.comm.membership.roster import Roster
from lightning_hetero.comm.membership.slots import job_board
from lightning_hetero.keeper import Keeper
from tests.ranks import run_ranks


class Forked:
    """A forked process as ``subprocess.Popen`` shows one."""

    def __init__(self, function, environment):
        self.process = get_context("fork").Process(target=_child, args=(function, environment))
        self.process.start()
        self.pid, self.kill = self.process.pid, self.process.kill
        self.send_signal = lambda number: os.kill(self.pid, number)

    def wait(self, timeout=None):
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("a worker", timeout)
        return self.process.exitcode

    def poll(self):
        return self.process.exitcode


def _child(function, environment):
    for number in (signal.SIGTERM, signal.SIGINT):  # its keeper's handlers are not its own
        signal.signal(number, signal.SIG_DFL)
    faulthandler.unregister(signal.SIGUSR1)  # it takes itself for registered
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__)  # where the worker is when a test takes too long
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    Roster.of_process.cache_clear()
    function()
    os._exit(0)


class ForkingKeeper(Keeper):
    """Keeper of a function."""

    def _start(self, environment):
        return Forked(self.function, environment)


def _keep(rank, world_size, function, arguments, kwargs):
    slots.BEAT_S = 0.2
    keeper = ForkingKeeper(
        [], job_board(os.environ, host=rank == 0), slot=rank, slots=world_size, **{"silence": 5.0, **kwargs}
    )
    keeper.function = lambda: function(*arguments)
    code = keeper.run()
    if rank == 0:  # it holds the store
        keeper.outlast()
    return code


def run_kept(function, world_size, *arguments, timeout=90.0, **kwargs):
    """Exit codes of ``function(*arguments)`` in each slot, started again when it is lost, as a keeper does."""
    given = (world_size, function, arguments, kwargs)
    return run_ranks(_keep, world_size, *given, timeout=timeout, env={"OMP_NUM_THREADS": "1"}, start="fork")
