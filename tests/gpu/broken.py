"""A check that does not go well, for the test of how checks are run."""

import os
import subprocess
import sys
import time

from tests.gpu.outcome import NotHere, require


def stand_in():
    how = os.environ["HOW"]
    if how == "misses":
        require(False, "two is not three", {"two": 2})
    if how == "dies":
        os._exit(3)
    if how == "not here":
        raise NotHere("it rains")
    if how == "hangs":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print("child", child.pid, flush=True)
        time.sleep(60)
    return {"two": 2, "half": 0.5, "list": [1, 2]}
