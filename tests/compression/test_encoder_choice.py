"""Which encoder a rank works with, and what the log says where a GPU's kernels cannot be had."""

import logging
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_hetero import BlockTopK
from lightning_hetero.compression import Layout, MessageFormat, TorchEncoder
from lightning_hetero.compression import encoder_choice as choice

triton = pytest.importorskip("triton")

from lightning_hetero.compression.triton_gpu import encoder as triton_encoder  # noqa: E402
from lightning_hetero.compression.triton_gpu import warmup as triton_warm  # noqa: E402

ROOT = Path(__file__).parents[2]
LAYOUT = Layout.of([("w", 320)], 16)
FORM = MessageFormat(LAYOUT.num_blocks, 4, 16, "bfloat16")


def parameters(device="cuda", dtype=torch.float32):
    return {"w": SimpleNamespace(device=torch.device(device), dtype=dtype)}


def chosen(caplog, settings=None, **kwargs):
    with caplog.at_level(logging.INFO, logger="lightning_hetero"):
        encoder = choice.encoder_for(settings or BlockTopK(), LAYOUT, FORM, parameters(**kwargs), 2)
    return encoder, [record.getMessage() for record in caplog.records]


def test_on_cpu_the_host_works_and_nothing_is_said(caplog):
    encoder, said = chosen(caplog, device="cpu")
    assert isinstance(encoder, TorchEncoder)
    assert encoder.selector == "exact"
    assert not said


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_residuals_are_as_precise_as_parameters_or_more(caplog, dtype):
    encoder, _ = chosen(caplog, device="cpu", dtype=dtype)
    assert encoder.residual.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("hold", [False, True])
def test_kernels_are_tried_for_what_they_will_have_to_do(monkeypatch, hold):
    tried = []
    monkeypatch.setattr(triton_warm, "warm", lambda *given, hold: tried.append(hold))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(triton_encoder, "TritonEncoder", lambda *given: "an encoder")
    encoder = choice.encoder_for(BlockTopK(), LAYOUT, FORM, parameters(), 2, hold=hold)
    assert (encoder, tried) == ("an encoder", [hold])


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels work here")
def test_where_kernels_fail_the_host_selects_as_they_would_and_says_why_once(caplog):
    encoder, said = chosen(caplog)
    assert isinstance(encoder, TorchEncoder)
    assert encoder.selector == "histogram"
    (line,) = said
    assert line.startswith("block top-k works on the host, not on cuda, where its kernels fail: ")
    assert len(line.split(" fail: ")[1]) > 10


def test_without_triton_the_log_says_what_to_install(caplog, monkeypatch):
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    encoder, said = chosen(caplog)
    assert encoder.selector == "histogram"
    assert said == [
        "block top-k works on the host, not on cuda: Triton is not installed. pip install lightning-hetero[triton]"
    ]


@pytest.mark.parametrize(
    ("settings", "dtype", "reason", "selector"),
    [
        (BlockTopK(selector="exact"), torch.float32, "selector='exact'", "exact"),
        (BlockTopK(scores="balanced"), torch.float32, "scores='balanced'", "exact"),
        (BlockTopK(), torch.float64, "a parameter in float64", "exact"),
    ],
)
def test_what_only_the_host_does_is_done_there(caplog, settings, dtype, reason, selector):
    encoder, said = chosen(caplog, settings, dtype=dtype)
    assert encoder.selector == selector
    assert said == [f"block top-k works on the host, beside cuda: {reason} has no kernels"]


OLD_GPU = """
import logging, sys, torch
logging.basicConfig(stream=sys.stdout, format="%(message)s")
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from lightning_hetero.compression import Layout, MessageFormat
from lightning_hetero.compression import encoder_choice as choice
from tests.gpu.builds import NoDriver

class Driver(NoDriver):
    def get_current_target(self):
        return GPUTarget("cuda", {capability}, 32)

    class utils:
        load_binary = staticmethod(lambda *a: (0, 1, 32, 0, 1024))
        get_device_properties = staticmethod(lambda d: {{"max_shared_mem": 2**17, "multiprocessor_count": 8,
                                                         "warpSize": 32, "max_num_regs": 65536}})

    def launcher_cls(self, *a):
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable")

driver.set_active(Driver())
layout = Layout.of([("w", 320)], 16)
form = MessageFormat(layout.num_blocks, 4, 16, "bfloat16")
sys.exit(choice.gpu_encoder(layout, form, torch.device("cpu"), 2, {{torch.{dtype}}}) is not None)
"""


@pytest.mark.parametrize(
    ("capability", "dtype", "reason"),
    [(90, "float32", "RuntimeError: Failed to find C compiler"), (61, "bfloat16", "")],
)
def test_an_old_gpu_or_a_missing_compiler_is_found_before_training(capability, dtype, reason, tmp_path):
    """Triton itself, with a driver that says what GPU it is and that has no compiler for what launches a kernel."""
    code = OLD_GPU.format(capability=capability, dtype=dtype)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "block top-k works on the host, not on cpu, where its kernels fail: " + reason in done.stdout
    if not reason:
        assert "find C compiler" not in done.stdout, "the kernel was compiled"
