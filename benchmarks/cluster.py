"""Emulated cluster of unequal nodes on one Linux machine, for benchmarks and fault tests; it needs root.

Every node is one process in a network namespace of its own (own address; link rate each way by the token bucket filter
of ``tc``) and in a cgroup with a share of processor time. Command line::

    python benchmarks/cluster.py --node 1.0:1000 --node 0.5:1000 --node 0.3:100 -- python train.py

What it is not: an emulation of latency or loss (``netem``), of memory, or of caches, which the nodes share. Shares
that add up to more than the cores of the machine are not delivered.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

__all__ = ["Cluster", "ClusterError", "Node", "Result", "main", "remove_leftovers"]

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_NETNS_ROOT = Path("/run/netns")
_PERIOD_US = 2_000  # short against a training step: what an idle node saves up within a period is no more than that
_MIN_QUOTA_US = 1_000  # the kernel's
_MIN_CPU = 0.001  # the kernel's smallest quota in its longest period
_MIN_BURST = 16_000  # bytes; above one packet
_LARGEST_PACKET = 14_000  # bytes that TCP hands over at once, 64 KiB otherwise: tbf never lets go of a packet that was
# queued at a higher rate and is larger than its bucket at the present one, and the link is dead behind it
_BURST_SECONDS = 0.001
_GRACE = 5.0  # seconds in which the peers of a failed process may report their own errors
_NAME = re.compile(r"lh([0-9a-f]+)-\d+[bnv]\d*")
_counter = itertools.count()


class ClusterError(RuntimeError):
    """The machine cannot emulate the cluster."""


@dataclass(frozen=True)
class Node:
    """Speed of one emulated node.

    Args:
        cpu: share of one core, at least 0.001; above 1.0 for several threads.
        mbit: rate of the link each way in Mbit/s; 0.0 for a link without limit.

    Example:
        >>> Node.parse("0.5:100")
        Node(cpu=0.5, mbit=100.0)
    """

    cpu: float = 1.0
    mbit: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.cpu) and self.cpu >= _MIN_CPU):
            raise ValueError(f"cpu={self.cpu} must be a share of one core of at least {_MIN_CPU}, such as 0.5.")
        if not (math.isfinite(self.mbit) and (self.mbit == 0 or self.mbit >= 0.1)):
            raise ValueError(f"mbit={self.mbit} must be a rate of at least 0.1 Mbit/s, or 0 for no limit.")

    @classmethod
    def parse(cls, text: str) -> Node:
        """A node from ``CPU`` or ``CPU:MBIT``."""
        cpu, _, mbit = text.partition(":")
        return cls(float(cpu), float(mbit or 0.0))


@dataclass(frozen=True)
class Result:
    """How the process of one node ended.

    Args:
        rank: of the process.
        returncode: exit status; negative for the signal that killed it.
        stdout: all that it printed.
        stderr: all that it printed as errors.
        seconds: from the start to the end.
        stopped_by: why it was killed here: ``"peer"`` (another rank had failed), ``"timeout"``; None if it was not.
    """

    rank: int
    returncode: int
    stdout: str
    stderr: str
    seconds: float
    stopped_by: str | None = None


class Cluster:
    """Nodes with their network and processor limits, set up on entry and always removed on exit.

    Exit includes exceptions, KeyboardInterrupt and (when entered in the main thread) SIGTERM. Only SIGKILL leaves
    something behind, which :func:`remove_leftovers` removes.

    Args:
        nodes: one per rank, 1 to 250 of them.
        subnet: first three numbers of the nodes' addresses. Clusters do not see each other, so that several can use
            the same one at the same time.
        port: MASTER_PORT, on the address of rank 0.
        weight: times the processor time that a node gets where one other process of the machine wants it too.

    Raises:
        ValueError: if an argument is outside its range.
        ClusterError: on entry, if the machine cannot emulate the cluster (no root, no ``ip`` or ``tc``, ...).

    Example:
        with Cluster([Node(1.0, 1000), Node(0.3, 100)]) as cluster:
            results = cluster.run([sys.executable, "train.py"])
    """

    def __init__(
        self, nodes: Sequence[Node], *, subnet: str = "10.78.0", port: int = 29650, weight: float = 1.0
    ) -> None:
        if not 1 <= len(nodes) <= 250:
            raise ValueError(f"nodes has {len(nodes)} entries, but a cluster has 1 to 250. Give one Node per rank.")
        if not re.fullmatch(r"\d{1,3}\.\d{1,3}\.\d{1,3}", subnet):
            raise ValueError(f"subnet={subnet!r} must be the first three numbers of an address, such as '10.78.0'.")
        if not 0 < port < 65536:
            raise ValueError(f"port={port} must be between 1 and 65535.")
        if not 0.01 <= weight <= 100:
            raise ValueError(f"weight={weight} must be between 0.01 and 100.")
        self._nodes = list(nodes)
        self._weight = weight
        self._subnet = subnet
        self._port = port
        self._tag = f"lh{os.getpid():x}-{next(_counter) % 10}"  # the name of an interface has at most 15 characters
        self._processes: list[_Process] = []
        self._exit_stack = contextlib.ExitStack()
        self._cpu: _CpuController | None = None

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes as they are now, with the changes made by :meth:`set_cpu` and :meth:`set_link`."""
        return tuple(self._nodes)

    def address(self, rank: int) -> str:
        """Address of a node."""
        return f"{self._subnet}.{rank + 1}"

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float = 600.0,
        echo: bool = True,
        stop_on_failure: bool = True,
    ) -> list[Result]:
        """Run one process per node to the end.

        All are killed, with the processes that they started, at the timeout, and (after a few seconds to report the
        loss of their peer) when one of them fails.

        Args:
            command: program and arguments, the same for each rank.
            env: variables added to those of this process and to the usual ones of a launcher (RANK, WORLD_SIZE, ...).
            timeout: seconds for all.
            echo: pass the output on line by line, with ``[rank]`` in front.
            stop_on_failure: False lets the others go on when one fails.

        Returns:
            One result per rank, in their order.
        """
        if self._cpu is None:
            raise ClusterError("The cluster is not set up. Call run() inside 'with Cluster(...) as cluster:'.")
        if self._processes:
            raise ClusterError("The cluster is running a command already. Wait for its end, or use a second cluster.")
        deadline = time.monotonic() + timeout
        try:
            for rank in range(len(self._nodes)):
                self._processes.append(self._start(rank, command, env or {}, echo))
            self._wait(deadline, stop_on_failure)
            self._kill_all()  # what the processes themselves may have left running
            return [process.result() for process in self._processes]
        finally:
            self._kill_all()
            self._processes = []

    def set_cpu(self, rank: int, share: float) -> None:
        """Change a node's share of one core, also while it runs and from another thread."""
        node = replace(self._node(rank), cpu=share)
        if self._cpu is not None:
            self._cpu.limit(self._name("n", rank), share)
        self._nodes[rank] = node

    def set_link(self, rank: int, mbit: float) -> None:
        """Change the rate of a node's link, also while it runs and from another thread; 0.0 is without limit."""
        node = replace(self._node(rank), mbit=mbit)
        if self._cpu is not None:
            self._limit_link(rank, mbit)
        self._nodes[rank] = node

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to all processes of a node, for fault tests."""
        self._node(rank)
        if self._cpu is not None:
            self._cpu.signal(self._name("n", rank), number)

    def __enter__(self) -> Cluster:
        check_machine()
        with contextlib.ExitStack() as stack:
            stack.enter_context(_exit_on_sigterm())
            self._set_up(stack)
            self._exit_stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._exit_stack.close()
        self._cpu = None

    def _set_up(self, stack: contextlib.ExitStack) -> None:
        cpu = _CpuController()
        bridge = self._name("b")
        stack.callback(_shielded, self._tear_down, cpu)
        _sh("ip", "link", "add", bridge, "type", "bridge")
        _sh("ip", "link", "set", bridge, "up")
        for rank, node in enumerate(self._nodes):
            namespace, link = self._name("n", rank), self._name("v", rank)
            _sh("ip", "netns", "add", namespace)
            _sh("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            _sh("ip", "link", "set", link, "master", bridge, "up")
            _sh("ip", "-n", namespace, "addr", "add", f"{self.address(rank)}/24", "dev", "eth0")
            for where, device in ((["-n", namespace], "eth0"), ([], link)):
                _sh("ip", *where, "link", "set", device, "gso_max_size", str(_LARGEST_PACKET))
            _sh("ip", "-n", namespace, "link", "set", "eth0", "up")
            _sh("ip", "-n", namespace, "link", "set", "lo", "up")
            if node.mbit:
                self._limit_link(rank, node.mbit)
            cpu.create(namespace)
            cpu.limit(namespace, node.cpu)
            cpu.prefer(namespace, self._weight)
        self._cpu = cpu

    def _tear_down(self, cpu: _CpuController) -> None:
        self._kill_all()
        for rank in range(len(self._nodes)):
            cpu.remove(self._name("n", rank))
            _sh("ip", "link", "del", self._name("v", rank), check=False)
            _sh("ip", "netns", "del", self._name("n", rank), check=False)
        _sh("ip", "link", "del", self._name("b"), check=False)

    def _limit_link(self, rank: int, mbit: float) -> None:
        namespace = self._name("n", rank)
        for where, device in ((["-n", namespace], "eth0"), ([], self._name("v", rank))):
            if mbit:
                burst = max(_MIN_BURST, round(mbit * 1e6 / 8 * _BURST_SECONDS))
                shape = ["rate", f"{round(mbit * 1e6)}bit", "burst", f"{burst}b", "latency", "100ms"]
                _sh("tc", *where, "qdisc", "replace", "dev", device, "root", "tbf", *shape)
            else:
                _sh("tc", *where, "qdisc", "del", "dev", device, "root", check=False)  # fails if there is no limit

    def _start(self, rank: int, command: Sequence[str], env: Mapping[str, str], echo: bool) -> _Process:
        assert self._cpu is not None
        namespace = self._name("n", rank)
        joined = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self._cpu.procs_file(namespace))]
        return _Process(
            rank,
            [*joined, "ip", "netns", "exec", namespace, *command],
            {**os.environ, **self._launch_variables(rank), **env},
            echo,
        )

    def _launch_variables(self, rank: int) -> dict[str, str]:
        world_size = str(len(self._nodes))
        return {
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": world_size,
            "NODE_RANK": str(rank),
            "GROUP_RANK": str(rank),
            "GROUP_WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(self._port),
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            # Without this each rank warns that the addresses of the namespaces have no host names.
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        }

    def _wait(self, deadline: float, stop_on_failure: bool) -> None:
        reason = "timeout"
        while None in (codes := [process.returncode() for process in self._processes]):
            if stop_on_failure and reason == "timeout" and any(codes):
                reason, deadline = "peer", min(deadline, time.monotonic() + _GRACE)
            if time.monotonic() >= deadline:
                for process in self._processes:
                    process.mark_stopped(reason)
                return
            time.sleep(0.02)

    def _kill_all(self) -> None:
        for process in self._processes:
            process.kill()
            if self._cpu is not None:
                self._cpu.limit(self._name("n", process.rank), 1.0)  # at a small share it would take long to die
                self._cpu.signal(self._name("n", process.rank), signal.SIGKILL)
        for process in self._processes:
            process.join()
            if self._cpu is not None:
                self._cpu.limit(self._name("n", process.rank), self._nodes[process.rank].cpu)

    def _name(self, kind: str, rank: int | None = None) -> str:
        return f"{self._tag}{kind}{'' if rank is None else rank}"

    def _node(self, rank: int) -> Node:
        if not 0 <= rank < len(self._nodes):
            raise ValueError(f"rank={rank} must be between 0 and {len(self._nodes) - 1}.")
        return self._nodes[rank]


def check_machine() -> None:
    """Raise a :class:`ClusterError` of one sentence if this machine cannot emulate a cluster."""
    if not sys.platform.startswith("linux"):
        raise ClusterError(
            f"An emulated cluster needs the namespaces and cgroups of Linux, and this is {sys.platform}."
        )
    if os.geteuid() != 0:
        raise ClusterError("An emulated cluster needs root, for network namespaces and cgroups; run it with sudo.")
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        raise ClusterError(f"An emulated cluster needs {' and '.join(missing)}; install the package iproute2.")


def remove_leftovers() -> list[str]:
    """Remove what clusters of processes that were killed with SIGKILL have left; returns the names.

    Only safe where no other container shares the cgroups or namespaces, since it looks for the owners by PID.
    """
    check_machine()
    cpu = _CpuController()
    links = {path.name for path in Path("/sys/class/net").iterdir()}
    spaces = {path.name for path in _NETNS_ROOT.iterdir()} if _NETNS_ROOT.is_dir() else set()
    groups = {path.name for path in cpu.root.iterdir()}
    stale = sorted(name for name in links | spaces | groups if _is_stale(name))
    for name in stale:
        if name in groups:
            cpu.remove(name)
        if name in links:
            _sh("ip", "link", "del", name, check=False)
        if name in spaces:
            _sh("ip", "netns", "del", name, check=False)
    return stale


def _is_stale(name: str) -> bool:
    match = _NAME.fullmatch(name)
    return match is not None and not Path(f"/proc/{int(match[1], 16)}").exists()


class _CpuController:
    """CPU-bandwidth cgroups, version 1 or 2."""

    def __init__(self) -> None:
        candidates = [_CGROUP_ROOT / "cpu", _CGROUP_ROOT / "cpu,cpuacct"]
        old = [path for path in candidates if (path / "cpu.cfs_quota_us").exists()]
        self.version = 1 if old else 2
        self.root = old[0] if old else _CGROUP_ROOT
        if self.version == 2:
            self._enable()

    def create(self, name: str) -> None:
        try:
            (self.root / name).mkdir()
        except OSError as error:
            raise ClusterError(
                f"The system refused to make the cgroup {self.root / name}: {error.strerror}."
            ) from error

    def limit(self, name: str, share: float) -> None:
        """Set the share of one core, in a period that is long enough for the kernel's smallest quota."""
        period = max(_PERIOD_US, math.ceil(_MIN_QUOTA_US / share))
        period = min(period, 1_000_000)
        quota = max(_MIN_QUOTA_US, round(share * period))
        if self.version == 2:
            self._write(self.root / name / "cpu.max", f"{quota} {period}")
        else:
            self._write(self.root / name / "cpu.cfs_period_us", str(period))
            self._write(self.root / name / "cpu.cfs_quota_us", str(quota))

    def prefer(self, name: str, weight: float) -> None:
        """Set the weight of a group against other processes of the machine, which have 1."""
        if self.version == 2:
            self._write(self.root / name / "cpu.weight", str(round(100 * weight)))
        else:
            self._write(self.root / name / "cpu.shares", str(round(1024 * weight)))

    def procs_file(self, name: str) -> Path:
        return self.root / name / "cgroup.procs"

    def signal(self, name: str, number: int) -> None:
        """Send a signal to each process of a group; a group without processes, or that is gone, is fine."""
        with contextlib.suppress(FileNotFoundError):
            for pid in self.procs_file(name).read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), number)

    def remove(self, name: str) -> None:
        """Kill what is in the group and remove it."""
        deadline = time.monotonic() + 10.0
        while (self.root / name).is_dir():
            self.signal(name, signal.SIGKILL)
            try:
                (self.root / name).rmdir()
            except OSError as error:  # the kernel takes a moment to empty it
                if time.monotonic() > deadline:
                    print(f"cannot remove {self.root / name}: {error}", file=sys.stderr)
                    return
                time.sleep(0.02)

    def _enable(self) -> None:
        controllers = self.root / "cgroup.controllers"
        if not controllers.exists() or "cpu" not in controllers.read_text().split():
            raise ClusterError(
                f"An emulated cluster needs the cpu controller of cgroups, which is not at {_CGROUP_ROOT}; mount it, "
                "or in a container give it cgroups of its own that it may write."
            )
        if "cpu" not in (self.root / "cgroup.subtree_control").read_text().split():
            self._write(self.root / "cgroup.subtree_control", "+cpu")

    @staticmethod
    def _write(path: Path, text: str) -> None:
        try:
            path.write_text(text)
        except OSError as error:
            raise ClusterError(f"The system refused to write {text!r} to {path}: {error.strerror}.") from error


@dataclass
class _Process:
    """One rank's process, its output, and the two threads that pass it on."""

    rank: int
    command: list[str]
    env: dict[str, str]
    echo: bool
    stopped_by: str | None = None
    ended: float | None = None
    output: dict[str, list[str]] = field(default_factory=lambda: {"stdout": [], "stderr": []})

    def __post_init__(self) -> None:
        self.started = time.monotonic()
        self.popen = subprocess.Popen(
            self.command,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # so that Ctrl-C reaches this process only, which then ends the others
        )
        self.readers = [
            threading.Thread(target=self._read, args=(stream, name), daemon=True)
            for name, stream in (("stdout", self.popen.stdout), ("stderr", self.popen.stderr))
        ]
        for reader in self.readers:
            reader.start()

    def returncode(self) -> int | None:
        code = self.popen.poll()
        if code is not None and self.ended is None:
            self.ended = time.monotonic()
        return code

    def mark_stopped(self, reason: str) -> None:
        if self.returncode() is None:
            self.stopped_by = reason

    def kill(self) -> None:
        if self.returncode() is None:
            os.killpg(self.popen.pid, signal.SIGKILL)

    def join(self) -> None:
        self.popen.wait()
        self.returncode()
        for reader in self.readers:
            reader.join(5.0)

    def result(self) -> Result:
        assert self.ended is not None
        stdout, stderr = "".join(self.output["stdout"]), "".join(self.output["stderr"])
        seconds = self.ended - self.started
        return Result(self.rank, self.popen.returncode, stdout, stderr, seconds, self.stopped_by)

    def _read(self, stream: IO[str], name: str) -> None:
        with stream:
            for line in stream:
                self.output[name].append(line)
                if self.echo:
                    target = sys.stdout if name == "stdout" else sys.stderr
                    target.write(f"[{self.rank}] {line.rstrip()}\n")
                    target.flush()


def _sh(*command: str, check: bool = True) -> None:
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if check and done.returncode != 0:
        raise ClusterError(f"'{' '.join(command)}' failed: {done.stderr.strip()}")


@contextlib.contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """SIGTERM ends the block like an exception; in the main thread, the only one that may handle signals."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _shielded(function: Callable[..., None], *arguments: Any) -> None:
    """Call the function; an impatient second Ctrl-C or SIGTERM must not cut it short."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    in_main = threading.current_thread() is threading.main_thread()
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in numbers} if in_main else {}
    try:
        function(*arguments)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _node(text: str) -> Node:
    try:
        return Node.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not CPU or CPU:MBIT: {error}") from error


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run one process per node of an emulated cluster. Needs root.")
    parser.add_argument(
        "--node", action="append", default=[], type=_node, metavar="CPU[:MBIT]", help="share of a core, link rate"
    )
    parser.add_argument("--subnet", default="10.78.0", help="first three numbers of the addresses (%(default)s)")
    parser.add_argument("--port", type=int, default=29650, help="MASTER_PORT (%(default)s)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for all (%(default)s)")
    parser.add_argument("--clean", action="store_true", help="remove what killed clusters have left, and end")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --: program and arguments")
    options = parser.parse_args(arguments)
    options.command = options.command[options.command[:1] == ["--"] :]
    if not options.clean and not (options.node and options.command):
        parser.error("give at least one --node, and a command after --")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the largest exit status of the ranks, 124 after a timeout, 2 if nothing could run."""
    options = _parse(arguments)
    try:
        if options.clean:
            print("removed:", " ".join(remove_leftovers()) or "nothing")
            return 0
        with Cluster(options.node, subnet=options.subnet, port=options.port) as cluster:
            results = cluster.run(options.command, timeout=options.timeout)
    except (ClusterError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    for result in results:
        reason = f" (killed: {result.stopped_by})" if result.stopped_by else ""
        print(f"rank {result.rank}: exit {result.returncode} after {result.seconds:.1f} s{reason}", file=sys.stderr)
    if any(result.stopped_by == "timeout" for result in results):
        return 124
    return max(code if code >= 0 else 128 - code for code in (result.returncode for result in results))


if __name__ == "__main__":
    sys.exit(main())
