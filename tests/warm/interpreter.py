"""A Python for programs that tests start: it has imported torch and what Lightning imports, which takes seconds.

Programs of :func:`warm_python` are forks of one server (``server.py``), and so are those that they start as
``sys.executable``: workers of torchrun and of Lightning. What else a program imports, Lightning and our package first
of all, it imports itself. A test of what `import torch` does needs ``sys.executable``.
"""

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent


@functools.cache
def warm_python():
    """Path of an executable to be used in place of ``sys.executable``."""
    if not hasattr(os, "pidfd_open"):
        return sys.executable
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    address, interpreter = folder / "socket", folder / "python"
    client = f'exec "{sys.executable}" -I -S "{HERE / "client.py"}" "{address}" "$@"'
    interpreter.write_text(f"#!/bin/sh\n{client}\n")
    interpreter.chmod(0o755)
    server = subprocess.Popen(
        [sys.executable, HERE / "server.py", address, interpreter],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    os.register_at_fork(after_in_child=server.stdin.close)  # a rank that stays would keep the server alive
    atexit.register(_end, os.getpid(), server, folder)
    assert server.stdout.readline() == "ready\n"
    return str(interpreter)


def warmed(command, *arguments):
    """A command, of which ``sys.executable`` or the Python of an installed script gives way to the warm one."""
    return [warm_python(), *(() if str(command) == sys.executable else (str(command),)), *map(str, arguments)]


def _end(owner, server, folder):
    if os.getpid() == owner:
        server.stdin.close()
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)
