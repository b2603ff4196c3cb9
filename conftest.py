"""What holds for all tests: one thread in each process, and no kernels where there is no Triton or Numba."""

import os
from importlib.util import find_spec

# Tests fork their ranks. OpenMP does not survive a fork: once a test has used its threads in this process, a rank would
# wait for ever for threads that it does not have. To be set before torch is imported.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

KERNELS = {
    "triton": (
        *("compression/kernels.py", "compression/receiving.py", "compression/applying.py"),
        *("compression/triton_encoder.py", "optim/kernels.py", "optim/triton_step.py"),
    ),
    "numba": (
        *("compression/numba_vectors.py", "compression/numba_kernels.py", "compression/numba_encoder.py"),
        *("optim/numba_kernels.py", "optim/numba_step.py"),
    ),
}
collect_ignore = [
    f"lightning_hetero/{file}" for needed, files in KERNELS.items() if not find_spec(needed) for file in files
]
