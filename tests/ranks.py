"""Run a function on several ranks: in processes that stay from test to test, or in new ones.

A new process per rank and test is most of what such a test costs. :func:`run_ranks` therefore keeps its processes,
which are forked when the first test asks for them, and sends them the function by pickle. Every job forms a process
group of its own, on a port of its own: which rank holds the store, and when it goes, is what a user's script sees.
After a job, a process is put back into the state it had; functions, classes, threads, processes and handlers of signals
that the job has left behind fail the test, by their names. (Values of modules are neither compared nor put back.)

If a rank raises, its peers have ``GRACE_S`` to come to their own end; then its connections are closed, which is how
they would learn of the end of its process in a script. A process stays unless it was killed, is stuck, or has kept
something after a failure; then another one takes its place.

``start="fork"`` and ``start="spawn"`` give new processes: to ranks that take over what the test has patched, whose
memory is measured, or that use a GPU. If you suspect the pool, try ``start="fork"``. Ranks that are late write their
stacks to stderr.
"""

import atexit
import faulthandler
import gc
import itertools
import logging
import os
import pickle
import random
import signal
import socket
import sys
import threading
import time
import traceback
import types
import warnings
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.distributed as dist

STARTED = {"ranks": 0, "jobs": 0}
"""Processes that this one has started as ranks, and functions that they ran; `tests/conftest.py` says both."""


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


class RankError(AssertionError):
    """A rank raised; ``errors`` holds ``(rank, type name, message)`` of all that did."""

    def __init__(self, errors, text):
        super().__init__(text)
        self.errors = errors


# in a rank

GRACE_S = 2.0
"""Seconds for which a rank that raised waits for its peers, before it closes its connections."""
_AT_END = []


def at_end(call):
    """Call a function when the job of this process is over, which puts back what the job has changed."""
    _AT_END.append(call)


def put(owner, name, value):
    """Put another function into its place until the run is over."""
    at_end(partial(setattr, owner, name, vars(owner)[name]))
    setattr(owner, name, value)


def _forget_accelerate():
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState, PartialState

        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState._reset_state()
        GradientState._reset_state()


def _filter(filters):
    for action, message, category, module, line in reversed(filters):
        patterns = [getattr(pattern, "pattern", pattern) or "" for pattern in (message, module)]
        warnings.filterwarnings(action, patterns[0], category, patterns[1], line)
    warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`, callbacks used to create the checkpoint")
    warnings.filterwarnings("ignore", "Using `DistributedSampler` with the dataloaders")


def _variables(rank, world_size, port, env):
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        **env,
    }


def _called(fn, args, rank):
    try:
        return "ok", fn(rank, *args)
    except BaseException as error:  # noqa: BLE001 - everything goes to the test
        return "error", (type(error).__name__, str(error), traceback.format_exc())


def _send(connection, result):
    """Send by plain pickle: that of `multiprocessing` leaves a thread, which shares the memory of tensors."""
    try:
        data = pickle.dumps(result)
    except Exception as error:  # noqa: BLE001
        data = pickle.dumps(("error", (type(error).__name__, str(error), traceback.format_exc())))
    connection.send_bytes(data)


def _child(connection, fn, args, rank, world_size, port, env, filters):
    """A rank in a process of its own, for one function."""
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__)
    gc.freeze()  # trainers collect garbage when they end: not among all that the parent has imported
    torch.set_num_threads(1)
    _filter(filters)
    os.environ.update(_variables(rank, world_size, port, env))
    _forget_accelerate()
    result = _called(fn, args, rank)
    _send(connection, result)
    if result[0] == "ok":  # a peer may still be opening a group through the store, which rank 0 holds
        connection.poll(None)
    os._exit(0)


def _connections():
    """Descriptors of this process's TCP connections, with their ends; gloo's thread needs the listeners."""
    return {(one.fd, one.laddr, one.raddr) for one in psutil.Process().net_connections("tcp") if one.raddr}


def _hang_up(before):
    """Close the connections that were made since, as the end of a process does."""
    for fd, *_ in _connections() - before:
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
            copy.shutdown(socket.SHUT_RDWR)


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGALRM)
PATCHED = (
    "lightning_hetero",
    "lightning.",
    "accelerate",
    "torch.distributed",
    "torch.serialization",
    "torch.utils.data",
)
LOGGERS = (
    "lightning_hetero",
    "lightning",
    "lightning.pytorch",
    "lightning.fabric",
    "accelerate",
    "transformers",
    "torch",
)


def _places():
    """Functions and classes by the places where a test could put others: modules, and classes of ours."""
    found = {("time", name): getattr(time, name) for name in ("time", "monotonic", "perf_counter", "sleep")}
    found |= {("torch", "save"): torch.save, ("torch", "load"): torch.load}
    for name, module in list(sys.modules.items()):
        if not name.startswith(PATCHED) or not isinstance(module, types.ModuleType):
            continue
        for key, value in list(vars(module).items()):
            if type(value) in (types.FunctionType, type):
                found[name, key] = value
                if type(value) is type and value.__module__ == name and name.startswith("lightning_hetero"):
                    found |= {(f"{name}.{key}", k): v for k, v in vars(value).items() if callable(v)}
    return found


def _count_from(groups):
    """Let ranks with different pasts count alike: torch its groups, and we the trainings that compare backends."""
    dist.distributed_c10d._world.group_count = groups
    if backends := sys.modules.get("lightning_hetero.comm.agreement.backends"):
        backends._TRAININGS = itertools.count()


class _State:
    """What a job may change in its process; :meth:`restore` puts it back and names what it cannot or should not."""

    def __init__(self):
        self.environment, self.folder = dict(os.environ), os.getcwd()
        self.threads, self.places = set(threading.enumerate()), _places()
        self.signals = {number: signal.getsignal(number) for number in SIGNALS}
        self.hooks = sys.excepthook, threading.excepthook
        self.dtype = torch.get_default_dtype()
        self.logging = logging.root.manager.disable
        self.loggers = {name: self._logger(name) for name in LOGGERS}

    @staticmethod
    def _logger(name):
        logger = logging.getLogger(name)
        return list(logger.handlers), list(logger.filters), logger.level, logger.propagate

    def restore(self):
        left = []
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        torch.set_default_dtype(self.dtype)
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(False)
        logging.disable(self.logging)
        for name, (handlers, filters, level, propagate) in self.loggers.items():
            logger = logging.getLogger(name)
            logger.handlers[:], logger.filters[:], logger.propagate = handlers, filters, propagate
            logger.setLevel(level)
        _forget_accelerate()
        for number, handler in self.signals.items():
            if signal.getsignal(number) != handler:
                left.append(f"a handler of {signal.Signals(number).name}")
        sys.excepthook, threading.excepthook = self.hooks  # torch's, and ours for a later group
        now = _places()
        left += [f"another {'.'.join(place)}" for place, value in self.places.items() if now.get(place) is not value]
        for process in get_context().active_children():
            left.append(f"process {process.name}")
            process.kill()
        gc.collect()
        end = time.monotonic() + 3
        while (threads := [t for t in threading.enumerate() if t not in self.threads]) and time.monotonic() < end:
            time.sleep(0.01)
        return left + [f"thread {thread.name}" for thread in threads]


def _serve(connection):
    """A rank that takes one function after the other."""
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__)
    gc.freeze()
    torch.set_num_threads(1)
    warnings.resetwarnings()
    logging.getLogger("lightning_hetero").setLevel(logging.INFO)  # as an import does, which may be a job's
    atexit._clear()
    parent = os.getppid()
    while (job := _next(connection, parent)) != b"end":
        faulthandler.register(signal.SIGUSR1, file=sys.__stderr__)  # a trainer may have put the signal's default back
        variables, filters, test, groups, grace, job = pickle.loads(job)
        os.environ["PYTEST_CURRENT_TEST"] = test
        try:
            fn, args, rank = pickle.loads(job)  # imports the test's module: no change that the job makes
        except BaseException as error:  # noqa: BLE001
            fn, args, rank = _raise, (error,), int(variables["RANK"])
        _forget_accelerate()
        state, connections = _State(), _connections()
        _count_from(groups)
        os.environ.update(variables)
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        with warnings.catch_warnings():
            _filter(filters)
            result = _called(fn, args, rank)
            _send(connection, result)
            if result[0] == "error" and not connection.poll(grace):
                _hang_up(connections)
            connection.recv()  # all are done
        del fn, args
        while _AT_END:
            _AT_END.pop()()
        gc.collect()
        atexit._run_exitfuncs()  # what a script of the user's would run here
        if lifetime := sys.modules.get("lightning_hetero.comm.agreement.group_lifetime"):
            lifetime.leave_ended()  # as the next training does
        if dist.is_initialized():
            dist.destroy_process_group()
        connection.send((state.restore(), dist.distributed_c10d._world.group_count))
    os._exit(0)


def _next(connection, parent):
    """The next message; without the process of the tests, this one ends."""
    while not connection.poll(10.0):
        if os.getppid() != parent:
            os._exit(1)
    return connection.recv_bytes()


def _raise(rank, error):
    raise error


# in the test


class _Rank:
    """A process that stays."""

    def __init__(self):
        context = get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=False)
        self.process.start()
        theirs.close()
        self.groups = 0
        STARTED["ranks"] += 1

    def end(self, patience=2.0):
        with suppress(OSError):
            self.pipe.send_bytes(b"end")
        self.process.join(patience)
        self.process.kill()
        self.process.join()
        self.pipe.close()


_POOLS, _OWNER = {}, os.getpid()
"""Processes by the number of ranks that they are; ``None`` in the place of one that is gone."""


def _pool(count):
    global _OWNER
    if os.getpid() != _OWNER:  # a fork of a test process
        _POOLS.clear()
        _OWNER = os.getpid()
    pool = _POOLS.setdefault(count, [None] * count)
    if None in pool:
        gc.collect()  # here and not in the ranks: a process group frees itself by threads, which no fork has
        pool[:] = [rank or _Rank() for rank in pool]
    return list(pool)


def _drop(ranks, patience=2.0):
    for pool in _POOLS.values():
        pool[:] = [None if rank in ranks else rank for rank in pool]
    for rank in ranks:
        if rank is not None:
            rank.end(patience)


@atexit.register
def close_pool():
    if os.getpid() == _OWNER:
        for ranks in list(_POOLS.values()):
            _drop(list(ranks))


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


def _answers(pipes, processes, timeout):
    """One answer of each rank, ``None`` of those that have none in time."""
    deadline, answers = time.monotonic() + timeout, [None] * len(pipes)
    waiting = dict(zip(pipes, range(len(pipes)), strict=True))
    while waiting and (ready := wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))):
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                answers[rank] = pipe.recv()
            except (EOFError, ConnectionResetError):
                text = f"rank {rank} died without a word, {_how_it_ended(processes[rank].pid)}"
                answers[rank] = ("error", ("Died", text, text))
    return answers


def _late(results, processes, timeout):
    missing = [rank for rank, result in enumerate(results) if result is None]
    _say_where([processes[rank].pid for rank in missing])
    text = f"rank {', '.join(map(str, missing))} of {len(results)} was not done within {timeout} s"
    return TimeoutError(f"{text}\n{_tracebacks(results)}")


def _results(results, expect_errors):
    errors = [(rank, *value[:2]) for rank, (kind, value) in enumerate(results) if kind == "error"]
    if expect_errors:
        return errors
    if errors:
        raise RankError(errors, _tracebacks(results))
    return [value for _, value in results]


def run_ranks(fn, world_size, *args, timeout=240.0, env=None, expect_errors=False, start="pool", grace=GRACE_S):
    """``fn(rank, *args)`` on every rank at once; the list of results, or of ``(rank, type, message)`` of the errors.

    With ``expect_errors``, the list of errors is returned, which is empty if no rank raised. ``env`` has further
    variables of the ranks' environment. ``grace`` is 0.0 where the end of one rank is what the others are to see.

    Processes that stay (``start="pool"``) know nothing of what a test patches after they were forked, and get ``fn`` by
    pickle: it is a function of a module. ``"fork"`` gives each rank a new process with all that the test's has. Ranks
    that use a GPU need ``"spawn"``: CUDA cannot be used in the fork of a process that has asked for the number of
    devices.

    Raises:
        RuntimeError: if this process uses a GPU, so that nothing can be forked from it any more.
        RankError: if a rank raised, or left something behind.
        TimeoutError: if the ranks were not done within ``timeout`` seconds; they and their loaders' workers write where
            they are to stderr, and are killed.
    """
    if start != "spawn" and torch.cuda.is_initialized():
        raise RuntimeError(
            "a test has used a GPU in the process that all ranks are forked from: those of later tests would die. Use "
            'it in a rank, run_ranks(..., start="spawn").'
        )
    torch.set_num_threads(1)
    STARTED["jobs"] += 1
    if start == "pool":
        return _run_kept(fn, world_size, args, timeout, env or {}, expect_errors, grace)
    return _run_new(fn, world_size, args, timeout, env or {}, expect_errors, start)


def _names(state):
    """Names of what a job has left in a process."""
    if state is None:
        return ["something that takes long to end"]
    names, more = state
    return [more[1]] if names == "error" else names


def _run_kept(fn, world_size, args, timeout, env, expect_errors, grace):
    port, filters, test = free_port(), list(warnings.filters), os.environ.get("PYTEST_CURRENT_TEST", "")
    jobs = [pickle.dumps((fn, args, rank)) for rank in range(world_size)]
    ranks = _pool(world_size)
    groups = max(rank.groups for rank in ranks)
    processes, pipes = [rank.process for rank in ranks], [rank.pipe for rank in ranks]
    results = [None] * world_size
    try:
        for rank, (pipe, job) in enumerate(zip(pipes, jobs, strict=True)):
            pipe.send_bytes(pickle.dumps((_variables(rank, world_size, port, env), filters, test, groups, grace, job)))
        results = _answers(pipes, processes, timeout)
        if None in results:
            raise _late(results, processes, timeout)
        failed = any(kind == "error" for kind, _ in results)
        for pipe in pipes:
            with suppress(OSError):
                pipe.send("all are done")
        left = _answers(pipes, processes, 5.0 if failed else 60.0)
    except BaseException:
        for process in processes:
            process.kill()
        _drop(ranks, 0.0)
        raise
    for rank, state in zip(ranks, left, strict=True):
        rank.groups = state[1] if state and not _names(state) else 0
    kept = {name for state in left for name in _names(state)}
    _drop([rank for rank, state in zip(ranks, left, strict=True) if _names(state)], 0.0)
    if kept and not failed:  # who fails may leave something: it is gone with these processes
        raise RankError([], f"the test left behind: {', '.join(sorted(kept))}")
    return _results(results, expect_errors)


def _run_new(fn, world_size, args, timeout, env, expect_errors, start):
    context, filters = get_context(start), list(warnings.filters) if start == "spawn" else []
    port = free_port()
    pipes, processes = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe()
        given = (theirs, fn, args, rank, world_size, port, env, filters)
        process = context.Process(target=_child, args=given, daemon=False)
        process.start()
        STARTED["ranks"] += 1
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    results = [None] * world_size
    try:
        results = _answers(pipes, processes, timeout)
        if None in results:
            raise _late(results, processes, timeout)
    finally:
        _end(processes, pipes, 0.2 if any(r is None for r in results) else 10)
    return _results(results, expect_errors)


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
