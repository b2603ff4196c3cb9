"""Which modules pytest leaves alone: those of kernels, where there is no Triton (it is for Linux only)."""

from importlib.util import find_spec

KERNELS = ["compression/kernels.py", "compression/triton_encoder.py"]
collect_ignore = [] if find_spec("triton") else [f"lightning_hetero/{name}" for name in KERNELS]
