"""Choice of a rank's encoder: Triton's kernels on its GPU, or the host where these are not wanted or do not work.

All encoders write the same messages and merge them in the order of ranks, so a job may have workers of both kinds.
"""

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from importlib.util import find_spec

import torch

from lightning_hetero.compression.encoder_protocol import DeviceEncoder, HostEncoder
from lightning_hetero.compression.host.encoder import cpu_encoder
from lightning_hetero.compression.layout import Layout
from lightning_hetero.compression.wire_format import MessageFormat
from lightning_hetero.core.compression.settings import BlockTopK

__all__ = ["encoder_for", "gpu_encoder", "reason_of"]

log = logging.getLogger("lightning_hetero")


def encoder_for(
    settings: BlockTopK,
    layout: Layout,
    form: MessageFormat,
    parameters: Mapping[str, torch.Tensor],
    world_size: int,
    *,
    hold: bool = False,
) -> HostEncoder | DeviceEncoder:
    """Return the encoder for the parameters' device.

    Args:
        settings: settings of block top-k.
        layout: places of the parameters.
        form: format of messages.
        parameters: parameters by name, all on one device.
        world_size: number of ranks.
        hold: whether parameters without a gradient are held back.
    """
    device = next(iter(parameters.values())).device
    dtypes = {p.dtype for p in parameters.values()}
    selector = settings.selector or "exact"
    if device.type == "cuda":
        asked = _only_on_host(settings, dtypes)
        encoder = None if asked else gpu_encoder(layout, form, device, world_size, dtypes, hold=hold)
        if encoder is not None:
            return encoder
        if asked:
            log.info("block top-k works on the host, beside %s: %s has no kernels", device, asked)
        else:
            selector = "histogram"  # what the kernels do
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    return cpu_encoder(layout, form, selector, dtype, balanced=settings.scores == "balanced")


def _only_on_host(settings: BlockTopK, dtypes: set[torch.dtype]) -> str | None:
    """Return a setting that the kernels do not support, ``None`` if there is none."""
    if settings.selector not in (None, "histogram"):
        return f"selector={settings.selector!r}"
    if settings.scores != "magnitude":
        return f"scores={settings.scores!r}"
    return "a parameter in float64" if torch.float64 in dtypes else None


def gpu_encoder(
    layout: Layout,
    form: MessageFormat,
    device: torch.device,
    world_size: int,
    dtypes: set[torch.dtype],
    *,
    hold: bool = False,
) -> DeviceEncoder | None:
    """Return Triton's encoder with its kernels compiled and tried; ``None``, and the reason in the log, if they fail.

    A GPU may be too old for a kernel, and Triton needs a C compiler and Python's headers to launch one.
    """
    if not find_spec("triton"):
        log.warning(
            "block top-k works on the host, not on %s: Triton is not installed. pip install lightning-hetero[triton]",
            device,
        )
        return None
    try:
        from lightning_hetero.compression.triton_gpu.encoder import TritonEncoder
        from lightning_hetero.compression.triton_gpu.warmup import warm

        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            warm(layout.block, form.value_dtype, world_size, device, dtypes, hold=hold)
    except Exception as error:  # compiler, driver and linker each raise their own
        log.warning("block top-k works on the host, not on %s, where its kernels fail: %s", device, reason_of(error))
        return None
    return TritonEncoder(layout, form, device, world_size)


def reason_of(error: Exception, max_chars: int = 300) -> str:
    r"""Return an error as one line for the log: the last line of a compiler's message.

    Example:
        >>> reason_of(RuntimeError("at line 3:\n  x = y\nno such type"))
        'RuntimeError: no such type'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *lines[-1:]])[:max_chars]
