"""Values on the wire: what is sent and what stays make up what there was, bitwise in float32."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from lightning_hetero.compression.value_codecs import CODECS

ERROR = {"float32": 0.0, "bfloat16": 2**-8, "int8": 1 / 127}


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=150, deadline=None)
@given(values=arrays("float32", (3, 16), elements=st.floats(-(2.0**100), 2.0**100, width=32)))
def test_nothing_is_lost_and_errors_are_small(name, values):
    blocks = torch.from_numpy(values.copy())
    codec = CODECS[name]
    sent = codec.decode(codec.encode(blocks))
    rest = blocks - sent
    assert torch.isfinite(sent).all()
    assert torch.equal(sent.double() + rest.double(), blocks.double())
    assert torch.equal(sent + rest, blocks)
    assert (rest.abs() <= ERROR[name] * blocks.abs().amax(1, keepdim=True) + 1e-37).all()


@pytest.mark.parametrize("name", CODECS)
def test_extremes(name):
    largest = torch.finfo(torch.float32).max
    blocks = torch.tensor([[largest, -largest, 1e-45, 0.0] * 4, [0.0] * 16, [1e-42] * 16])
    codec = CODECS[name]
    sent = codec.decode(codec.encode(blocks))
    assert torch.isfinite(sent).all()
    assert torch.equal(sent + (blocks - sent), blocks)
    assert [part.dtype for part in codec.encode(blocks)] == [dtype for dtype, _ in codec.parts]
