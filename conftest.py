"""What holds for all tests: one thread in each process, and no kernels where there is no Triton or Numba."""

import os
from importlib.util import find_spec

# Tests fork their ranks. OpenMP does not survive a fork: once a test has used its threads in this process, a rank would
# wait for ever for threads that it does not have. To be set before torch is imported.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

KERNELS = {
    "triton": (
        *(
            "compression/triton_gpu/encode_kernels.py",
            "compression/triton_gpu/receive_kernels.py",
            "compression/triton_gpu/apply_kernels.py",
        ),
        *("compression/triton_gpu/encoder.py", "optim/sparse/triton_kernels.py", "optim/sparse/triton_backend.py"),
    ),
    "numba": (
        *("compression/numba_jit/simd.py", "compression/numba_jit/kernels.py", "compression/numba_jit/encoder.py"),
        *("optim/sparse/numba_kernels.py", "optim/sparse/numba_backend.py"),
    ),
}
collect_ignore = [
    f"lightning_hetero/{file}" for needed, files in KERNELS.items() if not find_spec(needed) for file in files
]
