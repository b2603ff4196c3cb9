"""Imports torch and what Lightning imports; runs programs in forks of itself: ``python server.py SOCKET PYTHON``.

Nothing of ours or of Lightning is imported before the fork, so that ours finds Lightning as in any process. Torch would
call our entry point as it is imported; that is left to the program, with the environment that it has.
"""

import array
import atexit
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import threading
from contextlib import suppress
from types import ModuleType

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
BEFORE = ("torch", "torch._dynamo", "torch.distributed.run", "scipy.optimize", "torchmetrics", "aiohttp")


def received(connection):
    """The order of a client, and its streams."""
    room = socket.CMSG_SPACE(3 * array.array("i").itemsize)
    head, ancillary, *_ = connection.recvmsg(8, room)
    streams = array.array("i", ancillary[0][2]).tolist()
    left, parts = int.from_bytes(head, "big"), []
    while left:
        parts.append(connection.recv(left))
        left -= len(parts[-1])
    return json.loads(b"".join(parts)), streams


def become(order, streams):
    """Make this process that of the program; what it is to run, as Python's own options say it."""
    os.setpgid(0, 0)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(order["folder"])
    searched = [path for path in sys.path[1:] if path not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ.clear()
    os.environ.update(order["environment"])
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*given, *searched]
    arguments = list(order["arguments"])
    if arguments[0] == "-u":
        arguments.pop(0)
        sys.stdout.reconfigure(write_through=True)
    return arguments


def program_of(arguments):
    """Code and namespace of ``-c code``, ``-m module`` or a script; ``sys.argv`` and ``sys.path`` become its own."""
    main = ModuleType("__main__")
    if arguments[0] == "-c":
        code, sys.argv, first = compile(arguments[1], "<string>", "exec"), ["-c", *arguments[2:]], ""
    elif arguments[0] == "-m":
        code = compile("import runpy, sys; runpy._run_module_as_main(sys.argv[0])", "<module>", "exec")
        sys.argv, first = arguments[1:], os.getcwd()
    else:
        path = arguments[0]
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec")
        main.__file__, sys.argv, first = path, arguments, os.path.dirname(os.path.realpath(path))
    sys.path.insert(0, first)
    main.__builtins__ = __builtins__
    sys.modules["__main__"] = main
    return code, main.__dict__


class Server:
    """Forks a process for each client, tells the client how it ends, and ends it when the client is gone."""

    def __init__(self, address):
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(address)
        self.listener.listen(64)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ, self.accept)
        self.selector.register(0, selectors.EVENT_READ, self.end)
        self.clients = {}  # of each running program, the connection
        self.program = None

    def end(self, _):
        """Standard input is at its end: whoever started the server is gone, or has done with it."""
        for process in self.clients:
            with suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
        os._exit(0)

    def accept(self, listener):
        connection, _ = listener.accept()
        order, streams = received(connection)
        process = os.fork()
        if process == 0:
            self.selector.close()
            listener.close()
            connection.close()
            for other in self.clients.values():
                other.close()
            self.program = become(order, streams)
            return
        with suppress(OSError):  # it may be further than here
            os.setpgid(process, process)
        for stream in streams:
            os.close(stream)
        self.clients[process] = connection
        watched = os.pidfd_open(process)
        connection.sendall(f"{process}\n".encode())
        self.selector.register(connection, selectors.EVENT_READ, lambda _: self.gone(process))
        self.selector.register(watched, selectors.EVENT_READ, lambda fd: self.ended(process, fd))

    def gone(self, process):
        """The client was killed before its program ended: with it go all in its group, clients among them."""
        self.selector.unregister(self.clients[process])
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)

    def ended(self, process, watched):
        self.selector.unregister(watched)
        os.close(watched)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        connection = self.clients.pop(process)
        with suppress(KeyError):
            self.selector.unregister(connection)
        with suppress(OSError):
            connection.sendall(f"{status}\n".encode())
        connection.close()

    def serve(self):
        """Arguments of the program, in the process that is to run it: the only one in which this returns."""
        while True:
            for key, _ in self.selector.select():
                key.data(key.fileobj)
                if self.program is not None:
                    return self.program


def start(address, interpreter):
    """As :meth:`Server.serve`, with what programs need imported."""
    os.environ[AUTOLOAD] = "0"
    for name in BEFORE:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    server = Server(address)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    arguments = server.serve()
    sys.executable = interpreter
    return arguments


def finish(run):
    """Run a program and end as Python does, but take nothing apart: that takes longer than all else."""
    status = 0
    try:
        run()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if status and not isinstance(end.code, int):
            sys.stderr.write(f"{end.code}\n")
    except BaseException as error:  # noqa: BLE001 - Python itself would write and end
        status = 1
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            status = -signal.SIGINT
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status & 0xFF)


if __name__ == "__main__":
    _arguments = start(*sys.argv[1:])

    def _run():
        code, names = program_of(_arguments)
        if os.environ.get(AUTOLOAD, "1") == "1":
            sys.modules["torch"]._import_device_backends()
        exec(code, names)

    finish(_run)
