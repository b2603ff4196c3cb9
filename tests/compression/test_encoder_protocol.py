"""Encoders of all kinds have what their interfaces ask for, with the same arguments."""

import inspect
from importlib.util import find_spec

import pytest

from lightning_hetero.compression import DeviceEncoder, HostEncoder, TorchEncoder

KINDS = [(TorchEncoder, HostEncoder)]
if find_spec("numba"):
    from lightning_hetero.compression.numba_jit.encoder import NumbaEncoder

    KINDS.append((NumbaEncoder, HostEncoder))
if find_spec("triton"):
    from lightning_hetero.compression.triton_gpu.encoder import TritonEncoder

    KINDS.append((TritonEncoder, DeviceEncoder))


def methods(protocol):
    """Functions of a protocol and of those that it extends, by name."""
    found = {}
    for kind in reversed(protocol.__mro__):
        found |= {name: f for name, f in vars(kind).items() if inspect.isfunction(f) and not name.startswith("_")}
    return found


@pytest.mark.parametrize(("kind", "protocol"), KINDS, ids=lambda kind: kind.__name__)
def test_an_encoder_takes_what_its_interface_says(kind, protocol):
    wanted = methods(protocol)
    assert {"accumulate_bucket", "encode", "give_up", "reform", "finish"} <= set(wanted)
    for name, expected in wanted.items():
        given = {n: (p.kind, p.default) for n, p in inspect.signature(getattr(kind, name)).parameters.items()}
        assert given == {n: (p.kind, p.default) for n, p in inspect.signature(expected).parameters.items()}, name
    assert kind.deferred == (protocol is DeviceEncoder)
