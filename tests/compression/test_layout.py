"""The layout of parameters in one flat buffer, in any order of memory."""

import pytest
import torch

from lightning_hetero.compression import Layout
from lightning_hetero.compression.layout import flat_view, put_rows, take_rows


def test_layout_pads_and_is_the_same_in_any_memory_format():
    layout = Layout.of([("a", 1), ("b", 16), ("c", 17)], 16)
    assert [s.start for s in layout.slots] == [0, 16, 32]
    assert layout.num_blocks == 4
    assert Layout.from_state_dict(layout.state_dict()) == layout
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert flat_view(image).data_ptr() == image.data_ptr()
    assert torch.equal(flat_view(image).sort().values, image.flatten().sort().values)
    with pytest.raises(ValueError, match="not dense"):
        flat_view(torch.randn(4, 4)[:, ::2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 3, 16])
def test_rows_are_taken_and_put_as_torch_does_it(dtype, width):
    table, rows = torch.randn(20, width).to(dtype), torch.tensor([0, 3, 19])
    assert torch.equal(take_rows(table, rows), table[rows])
    expected, part = table.clone(), torch.randn(3, width).to(dtype)
    expected[rows] = part
    put_rows(table, rows, part)
    assert torch.equal(table, expected)


def test_layouts_of_other_names_sizes_or_blocks_differ():
    same = [Layout.of([("a", 3), ("b", 5)], 16).fingerprint() for _ in range(2)]
    others = [
        Layout.of(parameters, block).fingerprint()
        for parameters, block in (([("a", 3), ("c", 5)], 16), ([("a", 4), ("b", 5)], 16), ([("a", 3), ("b", 5)], 8))
    ]
    assert len({*same, *others}) == 4
