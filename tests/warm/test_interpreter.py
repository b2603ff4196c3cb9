"""A program behaves as if Python had started it, and finds imported what it would else import for seconds."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

from tests.warm.interpreter import warm_python, warmed

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux"),
    pytest.mark.slow("a tool of other tests, which fail without it"),
]

TELL = """
import json, os, sys
print(json.dumps({"argv": sys.argv, "path": sys.path[0], "folder": os.getcwd(), "variable": os.environ.get("TESTED"),
    "ours": [name for name in sys.modules if name.startswith("lightning_hetero")], "python": sys.executable,
    "torch": "torch._dynamo" in sys.modules, "name": __name__, "read": sys.stdin.read()}))
"""


def test_a_program_has_its_own_arguments_folder_environment_and_input(tmp_path):
    (tmp_path / "script.py").write_text(TELL)
    script = str(tmp_path / "script.py")
    for start, first, path in (([script], script, str(tmp_path)), (["-c", TELL], "-c", "")):
        done = subprocess.run(
            warmed(sys.executable, *start, "a", "-u"),
            capture_output=True,
            text=True,
            timeout=60,
            cwd=tmp_path,
            env={**os.environ, "TESTED": "é", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            input="typed",
        )
        found = json.loads(done.stdout)
        assert (found["argv"], found["path"], found["folder"]) == ([first, "a", "-u"], path, str(tmp_path))
        assert (found["variable"], found["read"], found["name"]) == ("é", "typed", "__main__")
        assert (found["torch"], found["ours"], found["python"]) == (True, [], warm_python())


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('why')", 1, "why\n"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import atexit, sys; atexit.register(lambda: sys.stderr.write('last'))", 0, "last"),
    ],
)
def test_it_ends_as_the_program_does(code, status, error):
    done = subprocess.run([warm_python(), "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == status
    assert error in done.stderr
    assert bool(done.stderr) == bool(error)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_reaches_the_program(number):
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with subprocess.Popen([warm_python(), "-u", "-c", code], stdout=subprocess.PIPE, text=True) as process:
        program = psutil.Process(int(process.stdout.readline()))
        process.send_signal(number)
        assert process.wait(30) == -number
        psutil.wait_procs([program], timeout=30)
        assert not program.is_running()
