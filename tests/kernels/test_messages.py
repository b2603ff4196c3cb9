"""Messages, values, selections and layouts: what is written is read, nothing is lost, no block starves."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from lightning_hetero.compression import (
    SELECT,
    BlockGradient,
    Layout,
    MessageFormat,
    Pack,
    block_scores,
    compress,
    merge,
)
from lightning_hetero.compression.block_gradient import GradientParts
from lightning_hetero.compression.reference import merge_sparse
from lightning_hetero.compression.selectors import SelectorState
from lightning_hetero.compression.value_codecs import CODECS
from lightning_hetero.compression.wire_format import message_size
from lightning_hetero.core.compression.settings import blocks_per_rank
from tests.kernels.backends import HOSTS, decoded, encoder, largest

# the message


def written(k=10, num_blocks=200_000, values="bfloat16", indices=(3, 65_535, 65_536, 199_999), rank=0):
    form = MessageFormat(num_blocks, k, 16, values)
    message = torch.zeros(form.num_bytes, dtype=torch.uint8)
    sent = form.write(message, np.array(indices), torch.randn(len(indices), 16), bucket=0, step=7, rank=rank)
    return form, message, Pack(torch.tensor(indices), sent)


@pytest.mark.parametrize("values", CODECS)
@pytest.mark.parametrize("k", [4, 10, 19_999, 20_000, 30_000])
def test_messages_arrive_as_they_were_sent(k, values):
    form, message, pack = written(k, values=values, rank=1)
    assert form.bitmap == (k >= 20_000)
    got, flags = form.read(message, rank=1, bucket=0, step=7)
    assert flags == 0
    assert torch.equal(got.indices, pack.indices)
    assert torch.equal(got.values, pack.values)


@given(at=st.integers(0, 431), bit=st.integers(0, 7), k=st.sampled_from([10, 150]))
def test_any_flipped_bit_is_found(at, bit, k):
    form, message, _ = written(k, num_blocks=1000, indices=(1, 2, 900))
    message[at % form.num_bytes] ^= 1 << bit
    with pytest.raises(ValueError, match="rank 0, bucket 0, step 7"):
        form.read(message, rank=0, bucket=0, step=7)


@pytest.mark.parametrize("values", CODECS)
@pytest.mark.parametrize("num_blocks", [1, 37, 1_000_003])
def test_sizes_are_known_without_the_message_and_parts_begin_where_a_gpu_reads_16_bytes(num_blocks, values):
    densities = np.array([*np.geomspace(1e-4, 1.0, 30), 0.1, 0.2, 0.5])
    for world_size, block in ((2, 16), (5, 3)):
        size = message_size(num_blocks, block, values, world_size)
        forms = [
            MessageFormat(num_blocks, blocks_per_rank(num_blocks, d, world_size), block, values) for d in densities
        ]
        due = [(world_size - 1) * form.num_bytes for form in forms]
        assert size.bytes(densities).tolist() == [size.bytes(d) for d in densities.tolist()] == due
        assert not any(at % 16 for form in forms for at in (form.places_at, *form.parts_at, form.num_bytes))


# values


@pytest.mark.parametrize("name", CODECS)
@given(values=arrays("float32", (3, 16), elements=st.floats(-(2.0**100), 2.0**100, width=32)))
def test_what_is_sent_and_what_stays_make_up_what_there_was(name, values):
    blocks, codec = torch.from_numpy(values.copy()), CODECS[name]
    sent = codec.decode(codec.encode(blocks))
    rest = blocks - sent
    assert torch.equal(sent, decoded(blocks, name))
    assert torch.equal(sent.double() + rest.double(), blocks.double())
    error = {"float32": 0.0, "bfloat16": 2**-8, "int8": 1 / 127}[name]
    assert (rest.abs() <= error * blocks.abs().amax(1, keepdim=True) + 1e-37).all()


# the definition


@pytest.mark.parametrize("values", CODECS)
@given(seed=st.integers(0, 2**16), k=st.integers(1, 12), numel=st.integers(1, 180))
def test_the_reference_is_the_definition(values, seed, k, numel):
    generator = torch.Generator().manual_seed(seed)
    residual, gradient = torch.randn(192, generator=generator), torch.randn(numel, generator=generator)
    due = residual.clone()
    due[:numel].add_(gradient, alpha=0.25)
    scores = due.view(12, 16).abs().sum(1)
    pack = compress(residual, gradient, 0.25, k, value_dtype=values)
    assert torch.equal(block_scores(due), scores)
    assert pack.indices.tolist() == largest(scores.numpy(), k, "exact").tolist()
    assert torch.equal(pack.values, decoded(due.view(12, 16)[pack.indices], values))
    assert torch.equal(merge([pack], 12) + residual, due)


@pytest.mark.parametrize("backend", HOSTS[::2], ids="-".join)
@given(st.lists(st.sets(st.integers(0, 9)), min_size=1, max_size=4), st.integers(0, 2**16))
def test_a_sparse_sum_is_the_dense_one(backend, blocks, seed):
    generator = torch.Generator().manual_seed(seed)
    packs = [
        Pack(torch.tensor(sorted(rows), dtype=torch.int64), torch.randn(len(rows), 16, generator=generator))
        for rows in blocks
    ]
    enc, _ = encoder(backend, (160,), 1.0)
    for total in (merge_sparse(packs), enc.merge_sparse(packs)):
        assert total.indices.tolist() == sorted(set().union(*blocks))
        assert torch.equal(merge([total], 10), merge(packs, 10))


# selection

PROMISED = {"exact": 0.999999, "histogram": 0.95}
SCORES = {
    "normal": lambda rng, n: np.abs(rng.normal(size=n)),
    "ties": lambda rng, n: rng.integers(0, 3, n).astype(float),
    "zeros": lambda rng, n: np.zeros(n),
    "equal": lambda rng, n: np.ones(n),
    "heavy": lambda rng, n: rng.lognormal(sigma=6, size=n),
}


def top(scores, k):
    return np.sort(scores)[::-1][:k].sum()


@pytest.mark.parametrize("name", SELECT)
@pytest.mark.parametrize("kind", SCORES)
@given(n=st.integers(0, 400), share=st.floats(0.001, 1.0), seed=st.integers(0, 2**16))
def test_a_selector_takes_each_block_once_and_never_too_many(name, kind, n, share, seed):
    rng, state = np.random.default_rng(seed), SelectorState()
    k = max(min(n, 1), int(n * share))
    for scale in (1.0, 1.0, 50.0, 0.01):  # a threshold of the last step, which the next ones do not fit
        scores = (scale * SCORES[kind](rng, n)).astype(np.float32)
        chosen = SELECT[name](scores, k, state)
        assert chosen.dtype == np.int64
        assert len(chosen) <= k
        assert (np.diff(chosen) > 0).all()
        assert (scores[chosen] > 0).all()
        if name in PROMISED:
            assert len(chosen) == min(k, (scores > 0).sum())
            assert scores[chosen].astype(float).sum() >= PROMISED[name] * top(scores.astype(float), k)


def drift(name, steps, n=100_000, k=500):
    """Share of the exact top-k's mass in each step under error feedback, and in each of 8 parts over all steps."""
    rng, state = np.random.default_rng(1), SelectorState()
    scale = rng.lognormal(sigma=0.7, size=20).repeat(n // 20)
    mean, residual, masses, mine, best = 0.3 * rng.normal(size=n), np.zeros(n), [], np.zeros(n), np.zeros(n)
    for step in range(steps):
        residual += scale * (0.1 if step >= steps // 2 else 1.0) * (rng.normal(size=n) + mean)
        scores = np.abs(residual).astype(np.float32)
        chosen, exact = SELECT[name](scores, k, state), np.argpartition(scores, n - k)[n - k :]
        masses.append(scores[chosen].sum() / scores[exact].sum())
        mine[chosen] += scores[chosen]
        best[exact] += scores[exact]
        residual[chosen] = 0
    return np.array(masses), mine.reshape(8, -1).sum(1) / np.maximum(best.reshape(8, -1).sum(1), 1e-9)


@pytest.mark.parametrize(
    ("name", "least", "mean"), [("exact", 0.9999, 0.9999), ("histogram", 0.95, 0.95), ("sample", 0.5, 0.85)]
)
def test_mass_in_every_step_of_a_drifting_problem_and_everywhere(name, least, mean):
    """A single sample is luck. More scores than a sample has, as in a large model."""
    masses, parts = drift(name, steps=60)
    assert masses.min() >= least
    assert masses.mean() >= mean
    assert parts.min() >= 0.9 * mean


def test_the_papers_threshold_rises_by_a_step_falls_by_a_share_and_falls_behind():
    """Up by 1 % of its first value where the budget was filled, down by 1 % of itself where it was not (S sec. 3.2)."""
    many, few, state = np.arange(1.0, 11.0), np.zeros(10), SelectorState()
    due = [([7, 8, 9], 8.08), ([8, 9], 8.08 * 0.99), ([], 8.08 * 0.99**2)]
    for scores, (chosen, threshold) in zip((many, many, few), due, strict=True):
        assert SELECT["aimd"](scores, 3, state).tolist() == chosen
        assert state.state_dict()["threshold"] == pytest.approx(threshold)
    assert drift("aimd", steps=100, n=4000, k=40)[0][30:50].mean() < 0.85, "why it is no default"


# parameters in one buffer


def test_a_layout_pads_to_whole_blocks_and_survives_a_checkpoint():
    layout = Layout.of([("a", 1), ("b", 16), ("c", 17)], 16)
    assert [(s.start, s.numel, s.padded) for s in layout.slots] == [(0, 1, 16), (16, 16, 16), (32, 17, 32)]
    assert (layout.num_blocks, layout.numel) == (4, 64)
    assert Layout.from_state_dict(layout.state_dict()) == layout
    others = [("a", 1), ("b", 16), ("d", 17)], [("a", 1), ("b", 17), ("c", 17)]
    assert layout.fingerprint() not in [Layout.of(other, 16).fingerprint() for other in others]


SHAPES = [(8, 32), (3, 20), (40,), (48,), (2, 3, 4, 5), (), (7,), (2, 16), (3, 1)]


@pytest.mark.parametrize("touched", [slice(None), slice(1, None, 3), slice(0, 0)], ids=["all", "some", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parts_of_a_sum_are_each_parameters_gradient(touched, dtype):
    """Dense as torch reads them; what scales or clips `p.grad` in place changes the blocks as well."""
    parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    parameters.append(torch.nn.Parameter(torch.zeros(2, 3, 4, 5, dtype=dtype).to(memory_format=torch.channels_last)))
    layout = Layout.of(((str(i), p.numel()) for i, p in enumerate(parameters)), 16)
    flat = torch.zeros(layout.numel)
    for slot in layout.slots:
        flat[slot.start : slot.start + slot.numel] = torch.randn(slot.numel).bfloat16().float()
    indices = torch.arange(layout.num_blocks)[touched]
    total = Pack(indices, flat.view(-1, 16)[indices])
    merged = torch.zeros_like(flat).view(-1, 16).index_copy(0, indices, total.values).view(-1)
    gradients = GradientParts(dict(zip(parameters, layout.slots, strict=True)), 16).of(total)
    for p, slot in zip(parameters, layout.slots, strict=True):
        one, due = gradients[p], merged[slot.start : slot.start + slot.numel].to(dtype)
        alone = BlockGradient.of(p, one.rows, one.values)
        p.grad = one.grad
        assert one.stands(p)
        for grad in (one.grad, alone.grad):
            dense = grad.to_dense() if grad.is_sparse else grad
            laid_out = torch.empty_like(p).copy_(dense)  # in the parameter's order of memory
            assert torch.equal(laid_out.as_strided((p.numel(),), (1,)), due)
        p.grad.mul_(2.0)
        assert one.stands(p)
        assert torch.equal(one.values.view(-1).sum(), 2 * due.sum()) or dtype == torch.bfloat16
        p.grad = p.grad.clone()
        assert not one.stands(p)
