"""Weighted sums in flat buckets: the same for any size of bucket, over real ranks."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lightning_hetero.elastic.merging.weighted_average import buckets, synchronize, weighted_sums
from tests.helpers import run_ranks


def tensors(rank):
    generator = torch.Generator().manual_seed(rank)
    return {
        "matrix": torch.randn(7, 5, generator=generator),
        "channels_last": torch.randn(2, 3, 4, 4, generator=generator).to(memory_format=torch.channels_last),
        "double": torch.randn(9, generator=generator, dtype=torch.float64),
        "half": torch.randn(6, generator=generator).bfloat16(),
        "scalar": torch.randn((), generator=generator),
    }


def _sums(rank, weights, bucket_bytes):
    dist.init_process_group("gloo")
    mine = tensors(rank)
    if weights[rank] == 0:
        mine["matrix"][0] = float("nan")
    settings = {"world_size": len(weights), "bucket_bytes": bucket_bytes, "in_flight": 1}
    found = {name: value.clone() for name, value in weighted_sums(mine, weights[rank], **settings)}
    count = {"n": torch.tensor(rank + 5)}
    synchronize({**mine, **count}, world_size=len(weights))
    dist.barrier()
    kinds = {name: str(value.dtype) for name, value in found.items()}
    arrays = ({name: value.double().numpy() for name, value in part.items()} for part in (found, mine))
    return *arrays, kinds, int(count["n"])


@pytest.mark.parametrize("bucket_bytes", [1, 200, 2**20])
def test_sums_are_weighted_and_a_weight_of_zero_hides_what_is_not_finite(bucket_bytes):
    weights = (0.5, 0.7, 0.0)
    expected = {name: sum(w * tensors(rank)[name].double() for rank, w in enumerate(weights)) for name in tensors(0)}
    for found, synchronized, kinds, count in run_ranks(_sums, 3, weights, bucket_bytes):
        assert set(found) == set(expected)
        for name, value in found.items():
            assert kinds[name] == ("torch.float64" if name == "double" else "torch.float32")
            np.testing.assert_allclose(value, expected[name], rtol=1e-6, atol=1e-6)
            np.testing.assert_array_equal(synchronized[name], tensors(0)[name].double())
        assert count == 5


def test_buckets_hold_one_kind_and_at_most_their_size():
    groups = buckets(tensors(0), bucket_bytes=4 * 100)
    assert sorted(name for group in groups for name in group) == sorted(tensors(0))
    for group in groups:
        kinds = {tensors(0)[name].dtype for name in group}
        size = sum(tensors(0)[name].numel() * tensors(0)[name].element_size() for name in group)
        assert len(kinds) == 1
        assert size <= 400 or len(group) == 1
