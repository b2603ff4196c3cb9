"""Every encoder equals the definition of block top-k bit by bit, and applies nothing of a step that goes wrong."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from lightning_hetero.compression import MessageFormat, TorchEncoder
from tests.kernels.backends import (
    BACKENDS,
    DEVICE,
    TRITON,
    VALUES,
    Definition,
    Step,
    draw,
    encoder,
    flat_of,
    total,
)

backends = pytest.mark.parametrize("backend", BACKENDS, ids="-".join)
CASES = [  # type of gradients, sizes, density, block, type of values
    (torch.float32, (17, 5), 0.3, 16, "bfloat16"),
    (torch.float32, (700, 1, 33), 0.04, 16, "int8"),
    (torch.float32, (300,), 1.0, 16, "float32"),
    (torch.bfloat16, (300, 1, 33), 0.06, 16, "bfloat16"),
    (torch.float16, (300, 33), 0.2, 16, "int8"),
    (torch.float32, (0, 35), 0.4, 16, "bfloat16"),
    (torch.bfloat16, (0,), 1.0, 16, "float32"),
    (torch.float32, (70, 3), 0.2, 1, "bfloat16"),
    (torch.float32, (700, 3), 0.2, 8, "bfloat16"),
    (torch.float32, (500, 3), 0.1, 64, "int8"),
]
if not TRITON or DEVICE.type == "cuda":  # chunks, threads, segments of 65 536 blocks: sizes of training
    CASES += [
        (torch.float32, (2_200_003, 700_001), 0.001, 16, "bfloat16"),
        (torch.float32, (2_200_003,), 0.2, 16, "int8"),
    ]


def check_steps(backend, sizes, density, block, values, dtype, weight=0.5, steps=3, scale=1.0, seed=0):
    """Messages, residuals and sums of some steps; what is sent and what stays make up what there was."""
    enc, rows = encoder(backend, sizes, density, block=block, values=values)
    definition = Definition(enc.form, backend[1], enc.layout.numel)
    host = TorchEncoder(enc.layout, enc.form, backend[1])  # all write the same bytes, so that ranks may differ
    for step in range(steps):
        gradients = draw(sizes, dtype, seed + step, whole=backend[1] == "histogram", scale=scale)
        flat, before = flat_of(enc.layout, gradients), definition.residual.clone()
        chosen, sent = definition.step(flat, weight)
        one, its = Step(enc, gradients, weight), Step(host, gradients, weight)
        assert one.finite
        message = torch.zeros_like(rows[0], device="cpu")
        one.send(rows[0], step=step), its.send(message, step=step)
        assert torch.equal(rows[0].cpu(), message)
        pack, flags = enc.form.read(message, rank=0, bucket=0, step=step)
        assert (pack.indices.tolist(), flags) == (chosen.tolist(), 0)
        assert torch.equal(pack.values, sent)
        assert torch.equal(enc.residual.cpu(), definition.residual)
        dropped, merged, blocks = one.receive(rows, step=step)
        assert (dropped, blocks) == (False, len(chosen))
        assert torch.equal(merged, total(enc.form, [(chosen, sent)], enc.layout.numel))
        assert torch.equal(merged + definition.residual, before.add(flat, alpha=weight))
        if enc.deferred:
            assert torch.equal(flat_of(enc.layout, one.gradients), (2.0 * merged).to(dtype).float())
        host.finish()


@backends
@pytest.mark.parametrize(("dtype", "sizes", "density", "block", "values"), CASES, ids=str)
def test_a_step_is_the_definitions(backend, dtype, sizes, density, block, values, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # as Numba's loops ask for it
    check_steps(backend, sizes, density, block, values, dtype, steps=2)


SIZES = (500, 3)


def three(backend, density=0.07, values="bfloat16", step=0):
    """This rank's encoder and step among three ranks, the definitions of all, and the encoders of the two others."""
    enc, rows = encoder(backend, SIZES, density, values=values, world_size=3)
    steps, packs = [], []
    for rank in range(3):
        own = enc if rank == 1 else TorchEncoder(enc.layout, enc.form)
        gradients = draw(SIZES, torch.float32, rank, whole=True)
        steps.append(Step(own, gradients if own is enc else [g + 0.3 * torch.rand(len(g)) for g in gradients], 0.5))
        message = torch.zeros_like(rows[0], device=rows.device if own is enc else "cpu")
        steps[-1].send(message, step=step, rank=rank)
        rows[rank].copy_(message)
        pack, _ = enc.form.read(message.cpu(), rank=rank, bucket=0, step=step)
        packs.append((pack.indices, pack.values))
    return enc, rows, steps, packs


@backends
@pytest.mark.parametrize("density", [0.07, 0.3])
@pytest.mark.parametrize("values", VALUES)
def test_messages_of_all_ranks_are_added_up_in_their_order(backend, density, values):
    enc, rows, steps, packs = three(backend, density, values)
    dropped, merged, blocks = steps[1].receive(rows, step=0, rank=1)
    assert (dropped, blocks) == (False, sum(len(chosen) for chosen, _ in packs))
    assert torch.equal(merged, total(enc.form, packs, enc.layout.numel))


@backends
@pytest.mark.parametrize("fill", [0.0, float("inf")])
def test_a_step_that_another_rank_gives_up_is_taken_back(backend, fill):
    """Also if that rank has no GPU; a gradient becomes what a loss scaler has to see."""
    enc, rows, steps, _ = three(backend, values="int8")
    steps[1].receive(rows, step=0, rank=1)
    before, gradients = enc.residual.clone(), draw(SIZES, torch.float32, 9, whole=True)
    mine, message = Step(enc, gradients, 0.5), rows.cpu()
    mine.send(rows[1], step=1, rank=1)
    for rank in (0, 2):
        write = steps[rank].enc.give_up if rank else steps[rank].enc.encode
        write(message[rank], step=1, rank=rank)
        rows[rank].copy_(message[rank])
    assert not torch.equal(enc.residual, before)
    dropped, merged, blocks = mine.receive(rows, step=1, rank=1, fill=fill)
    assert (dropped, blocks, bool(merged.any())) == (True, 0, False)
    torch.testing.assert_close(enc.residual, before, rtol=1e-5, atol=1e-5)
    if enc.deferred:
        assert all((gradient == fill).all() for gradient in mine.gradients)


@backends
@pytest.mark.parametrize(
    ("bad", "where"),
    [(np.nan, (0, 3)), (np.inf, (1, 0)), (-np.inf, (1, 7)), (np.nan, (1, 199)), (np.inf, (1, 208))],
    ids=str,
)
def test_a_gradient_that_is_not_finite_enters_no_residual(backend, bad, where):
    """Whole vectors, half ones and single elements; the step after it is as if nothing had been."""
    sizes = (20, 209)
    enc, rows = encoder(backend, sizes, 0.2, values="int8")
    definition = Definition(enc.form, backend[1], enc.layout.numel)
    for step in range(3):
        gradients = draw(sizes, torch.float32, step, whole=True)
        if step == 1:
            before = enc.residual.clone()
            gradients[where[0]][where[1]] = bad
        one = Step(enc, gradients, 0.5)
        assert one.finite == (step != 1 or enc.deferred)
        one.send(rows[0], step=step)
        dropped, _, _ = one.receive(rows, step=step)
        assert dropped == (step == 1)
        if step == 1:
            torch.testing.assert_close(enc.residual, before, rtol=1e-5, atol=1e-5)
            enc.residual.copy_(before)
        elif backend[1] == "histogram":
            definition.step(flat_of(enc.layout, gradients), 0.5)
            assert torch.equal(enc.residual.cpu(), definition.residual)


# messages that are not what they should be


def written(form, rank, *, step=7, bucket=0, indices=(3, 5), blocks=None):
    message = torch.zeros(form.num_bytes, dtype=torch.uint8)
    blocks = torch.ones(len(indices), form.block) if blocks is None else blocks
    form.write(message, np.array(indices, dtype=np.int64), blocks, bucket=bucket, step=step, rank=rank)
    return message


def flipped(form, message, at):
    message[at % form.num_bytes] ^= 4
    return message


SPOILT = {
    "cut off": lambda form, m, rank: torch.cat([m[: form.num_bytes // 2], 0 * m[form.num_bytes // 2 :]]),
    "empty": lambda form, m, rank: 0 * m,
    **{f"bit of byte {at}": lambda form, m, rank, at=at: flipped(form, m, at) for at in (0, -3)},
    "a bit of an index": lambda form, m, rank: flipped(form, m, form.places_at),
    "another rank's": lambda form, m, rank: written(form, rank + 5),
    "another bucket's": lambda form, m, rank: written(form, rank, bucket=1),
    "of the step before": lambda form, m, rank: written(form, rank, step=6),
    "another layout": lambda form, m, rank: written(replace(form, layout=form.layout ^ 1), rank),
    "an index out of range": lambda form, m, rank: written(form, rank, indices=(3, form.num_blocks)),
    "a value that is not finite": lambda form, m, rank: written(
        form, rank, blocks=torch.full((2, form.block), float("nan"))
    ),
    "indices that do not ascend": lambda form, m, rank: written(form, rank, indices=(5, 3)),
    "an index twice": lambda form, m, rank: written(form, rank, indices=(3, 3)),
}


def nothing_of_it_is_applied(backend, density, rank, spoil):
    enc, rows, steps, _ = three(backend, density, step=7)
    before, own = torch.zeros_like(enc.residual), enc.residual.clone()
    bad = spoil(enc.form, rows[rank].cpu(), rank)
    with pytest.raises(ValueError, match=f"rank {rank}, bucket 0, step 7"):
        enc.form.read(bad, rank=rank, bucket=0, step=7)
    rows[rank].copy_(bad)
    with pytest.raises(ValueError, match=f"rank {rank}, bucket 0, step 7"):
        steps[1].receive(rows, step=7, rank=1)
    assert not enc.merged.any()
    if enc.deferred:  # it has taken the step back
        torch.testing.assert_close(enc.residual, before, rtol=1e-5, atol=1e-5)
        assert not any(gradient.any() for gradient in steps[1].gradients)
    else:  # the step stays as it is, and this rank's message can be taken back
        assert torch.equal(enc.residual, own)


@backends
@pytest.mark.parametrize(("fault", "rank"), [(fault, 2 * (i % 2)) for i, fault in enumerate(SPOILT)])
def test_a_malformed_message_is_refused_by_name_and_nothing_is_applied(backend, fault, rank):
    nothing_of_it_is_applied(backend, 0.07, rank, SPOILT[fault])


@backends
@pytest.mark.parametrize("fault", ["cut off", "a bit of an index", "an index out of range"])
def test_a_malformed_bitmap_is_refused_by_name_and_nothing_is_applied(backend, fault):
    nothing_of_it_is_applied(backend, 0.3, 0, SPOILT[fault])


# what else is asked of an encoder


@backends
def test_a_parameter_without_a_gradient_is_held_back(backend):
    enc, rows = encoder(backend, (32, 32, 40), 0.2)
    enc.residual[40], enc.residual[70] = 500.0, 1.0  # by its size, the one of the second parameter would be sent
    one = Step(enc, [torch.full((32,), 0.01), torch.zeros(32), torch.ones(40)], 1.0, hold=True)
    one.send(rows[0], step=0)
    pack, _ = enc.form.read(rows[0].cpu(), rank=0, bucket=0, step=0)
    assert pack.indices.tolist() == [4]
    assert enc.residual[40] == 500.0


@backends
def test_another_density_takes_the_residual_along(backend):
    """From a list of indices to a bitmap and back: all that was merged and what is left make up all gradients."""
    enc, _ = encoder(backend, (700, 33), 0.04)
    due = got = torch.zeros(enc.layout.numel)
    for step, k in enumerate((2, 30, 1, 2)):
        enc.reform(MessageFormat(enc.layout.num_blocks, k, 16, "float32", enc.layout.fingerprint()))
        rows = torch.zeros(1, enc.form.num_bytes, dtype=torch.uint8, device=DEVICE)
        gradients = draw((700, 33), torch.float32, step, whole=True)
        one = Step(enc, gradients, 0.5)
        one.send(rows[0], step=step)
        dropped, merged, blocks = one.receive(rows, step=step)
        assert (dropped, blocks) == (False, k)
        due, got = due + 0.5 * flat_of(enc.layout, gradients), got + merged
    assert torch.equal(got + enc.residual.cpu(), due)


@backends
@pytest.mark.parametrize("kind", ["equal", "zero", "wide"])
def test_ties_zeros_and_a_wide_range(backend, kind):
    gradient = {"equal": torch.full((1600,), 2.0), "zero": torch.zeros(1600)}.get(kind)
    if gradient is None:
        powers = torch.randint(-120, 120, (100, 1), generator=torch.Generator().manual_seed(0))
        gradient = (2.0**powers).repeat(1, 16).flatten()
    enc, rows = encoder(backend, (1600,), 0.1)
    Step(enc, [gradient], 1.0).send(rows[0], step=0)
    pack, _ = enc.form.read(rows[0].cpu(), rank=0, bucket=0, step=0)
    scores = gradient.view(-1, 16).abs().sum(1)
    assert len(pack.indices) == (0 if kind == "zero" else enc.form.k)
    assert scores[pack.indices].sum() >= 0.95 * scores.sort(descending=True).values[: enc.form.k].sum()
