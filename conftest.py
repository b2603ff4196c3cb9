"""What holds for all tests: one thread in each process, and no kernels where there is no Triton or Numba."""

import os
from importlib.util import find_spec

# Tests fork their ranks. OpenMP does not survive a fork: once a test has used its threads in this process, a rank would
# wait for ever for threads that it does not have. To be set before torch is imported.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

KERNELS = {
    "triton": ("compression/triton_gpu", "optim/sparse/triton_gpu"),
    "numba": ("compression/numba_jit", "optim/sparse/numba_jit"),
}
collect_ignore = [
    f"lightning_hetero/{folder}" for needed, folders in KERNELS.items() if not find_spec(needed) for folder in folders
]
collect_ignore.append("tests/accelerate/flag_scripts")  # scripts, which tests run
