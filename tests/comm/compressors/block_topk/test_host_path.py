"""The path on the host does what block top-k says, against a transcription in a few lines of numpy."""

import numpy as np
import pytest
import torch

from lightning_hetero.comm.compressors.block_topk.host_path import HostPath
from lightning_hetero.compression.block_gradient import BlockGradient
from tests.comm.compressors.block_topk.paths import BLOCK, SIZES, Averager, backward, cluster, exchange, flat_of

WEIGHTS = (0.75, 0.25)


def drawn(generator):
    """A gradient of each parameter."""
    return [torch.from_numpy(generator.standard_normal(size).astype(np.float32)) for size in SIZES.values()]


def top_blocks(residual, k):
    """The residual's ``k`` largest blocks, and what is left."""
    blocks = residual.reshape(-1, BLOCK)
    chosen = np.argsort(-np.abs(blocks).sum(1), kind="stable")[:k]
    sent = np.zeros_like(blocks)
    sent[chosen] = blocks[chosen]
    return sent.ravel(), (blocks - sent).ravel()


def unpadded(flat):
    """Of a flat sum, what each parameter gets."""
    parts, start = [], 0
    for size in SIZES.values():
        parts.append(flat[start : start + size])
        start += -(-size // BLOCK) * BLOCK
    return np.concatenate(parts)


@pytest.mark.parametrize("density", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_buckets_get_the_sum_of_the_largest_blocks(density, scale):
    generator, paths = np.random.default_rng(1), cluster(2, density)
    k, residuals = paths[0].encoder.form.k, [np.zeros(24, np.float32)] * 2
    for step in range(6):
        gradients = [drawn(generator) for _ in paths]
        scaled = [[g * scale for g in own] for own in gradients]
        passes = [
            backward(path, own, weight=w / scale, scale=scale, step=step)
            for path, own, w in zip(paths, scaled, WEIGHTS, strict=True)
        ]
        total = np.zeros(24, np.float32)
        for rank, own in enumerate(gradients):
            held = residuals[rank] + WEIGHTS[rank] * flat_of(own).numpy()
            sent, residuals[rank] = top_blocks(held, k)
            total += sent
        averagers = [Averager(step=step) for _ in paths]
        for path, sent, running, averager in zip(
            paths, exchange(paths, passes, step=step), passes, averagers, strict=True
        ):
            path.apply(averager, sent, running)
            path.encoder.finish()
            buffer = running.waiting[0][0]
            np.testing.assert_allclose(buffer.numpy(), unpadded(total) * scale, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(
                path.encoder.residual.numpy(), residuals[path.topology.rank], rtol=1e-4, atol=1e-6
            )
            assert averager.counted[0][0] == 2 * k
            assert averager.counted[0][1] > 0
            assert not averager.skipped


@pytest.mark.parametrize("grad_scale", [None, lambda: 4.0])
def test_a_gradient_that_is_not_finite_leaves_the_step_out_on_all_ranks(grad_scale):
    paths = cluster(2, 0.5)
    before = [drawn(np.random.default_rng(seed)) for seed in (2, 3)]
    for path, own in zip(paths, before, strict=True):
        path.encoder.residual.copy_(flat_of(own))
    bad = [torch.full((size,), float("nan")) for size in SIZES.values()]
    passes = [backward(paths[0], drawn(np.random.default_rng(4)), step=7), backward(paths[1], bad, step=7)]
    assert [running.finite for running in passes] == [True, False]
    averagers = [Averager(step=7, grad_scale=grad_scale) for _ in paths]
    for path, sent, running, averager in zip(paths, exchange(paths, passes, step=7), passes, averagers, strict=True):
        path.apply(averager, sent, running)
        path.encoder.finish()
    for path, own, running, averager in zip(paths, before, passes, averagers, strict=True):
        torch.testing.assert_close(path.encoder.residual, flat_of(own))
        filled = running.waiting[0][0]
        assert (torch.isinf(filled) if grad_scale else filled == 0).all(), "a loss scaler has to see it"
        assert averager.counted[0][0] == 0
    assert averagers[0].skipped == [(7, "on another rank than this")]
    assert averagers[1].skipped == [(7, "on this rank")]


def test_of_a_step_that_is_over_what_was_sent_returns():
    """The gradient is gone by then, so only the blocks on the wire go back."""
    paths = cluster(2, 0.5)
    gradients = [drawn(np.random.default_rng(5)), [torch.full((size,), float("inf")) for size in SIZES.values()]]
    passes = [backward(path, own, step=3) for path, own in zip(paths, gradients, strict=True)]
    kept = paths[0].encoder.residual.clone()
    sent = exchange(paths, passes, step=3)
    averager = Averager(step=4)
    assert paths[0].receive(averager, sent[0]) == []
    assert not torch.equal(paths[0].encoder.residual, kept)
    torch.testing.assert_close(paths[0].encoder.residual, flat_of(gradients[0]))
    assert averager.skipped == [(3, "on another rank than this")]


def test_a_member_takes_nothing_back_that_its_leader_sent():
    """Only leaders have residuals; the blocks would be in two of them, and be applied twice."""
    paths = cluster(3, 0.5, clusters=((0, 1), (2,)))
    bad = [torch.full((size,), float("inf")) for size in SIZES.values()]
    gradients = [drawn(np.random.default_rng(5)), drawn(np.random.default_rng(6)), bad]
    passes = [backward(path, own, step=3) for path, own in zip(paths, gradients, strict=True)]
    sent = exchange(paths, passes, step=3)
    assert [path.receive(Averager(step=4), one) for path, one in zip(paths, sent, strict=True)] == [[]] * 3
    assert [bool(path.encoder.residual.any()) for path in paths] == [True, False, False]


def test_a_malformed_message_names_its_rank_and_moves_nothing():
    paths = cluster(2, 0.5)
    passes = [backward(path, drawn(np.random.default_rng(6)), step=1) for path in paths]
    sent = exchange(paths, passes, step=1)
    for one in sent:
        one.rows[1, -1] ^= 4
    for path, one, running in zip(paths, sent, passes, strict=True):
        buffer = running.waiting[0][0].clone()
        with pytest.raises(ValueError, match="rank 1, bucket 0, step 1 is refused: checksum"):
            path.apply(Averager(step=1), one, running)
        torch.testing.assert_close(running.waiting[0][0], buffer)


def test_messages_are_waited_for():
    (path,) = cluster(1, 0.5)
    running = backward(path, drawn(np.random.default_rng(7)))
    (sent,) = exchange([path], [running])
    path.apply(Averager(), sent, running)
    assert sent.arrival.waited == 1


def test_stale_messages_are_applied_in_place_of_those_in_flight():
    """What a stale averager hands out is merged: here, the message of the step before."""
    (path,) = cluster(1, 1.0)
    earlier = backward(path, drawn(np.random.default_rng(8)))
    (sent,) = exchange([path], [earlier])
    packs = path.read(sent)

    class Stale:
        def step(self, newer):
            self.given = newer
            return packs

    first = earlier.waiting[0][0].clone()
    path.use_rows(torch.zeros_like(path.rows))  # what is in flight keeps its own
    running = backward(path, drawn(np.random.default_rng(9)), step=1)
    (newer,) = exchange([path], [running], step=1)
    stale = Stale()
    path.apply(Averager(step=1, stale=stale), newer, running)
    assert stale.given is newer
    torch.testing.assert_close(running.waiting[0][0], first)


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_an_optimizer_gets_blocks_and_no_buffer_is_written(scale):
    paths = cluster(2, 0.5)
    gradients = [drawn(np.random.default_rng(seed)) for seed in (10, 11)]
    passes = [backward(path, own, scale=scale) for path, own in zip(paths, gradients, strict=True)]
    sums = np.zeros(24, np.float32)
    for own in gradients:
        sums += top_blocks(flat_of(own).numpy(), paths[0].encoder.form.k)[0]
    for path, sent, running in zip(paths, exchange(paths, passes), passes, strict=True):
        before = running.waiting[0][0].clone()
        path.apply(Averager(takes_blocks=True), sent, running)
        torch.testing.assert_close(running.waiting[0][0], before)
        found = np.zeros((6, BLOCK), np.float32)
        for parameter, gradient in running.gradients.items():
            assert isinstance(gradient, BlockGradient)
            first = path.model.slots[parameter].start // BLOCK
            found[first + gradient.rows.numpy()] = gradient.values.numpy().reshape(-1, BLOCK)
        np.testing.assert_allclose(found.ravel(), sums * scale, rtol=1e-5, atol=1e-6)


def test_a_step_that_is_left_out_hands_a_loss_scaler_one_infinite_element_of_each_parameter():
    (path,) = cluster(1, 0.5)
    running = backward(path, [torch.full((size,), float("nan")) for size in SIZES.values()])
    (sent,) = exchange([path], [running])
    path.apply(Averager(takes_blocks=True, grad_scale=lambda: 2.0), sent, running)
    for gradient in running.gradients.values():
        assert int(torch.isinf(gradient.values).sum()) == 1
    without = backward(path, [torch.full((size,), float("nan")) for size in SIZES.values()], step=1)
    (sent,) = exchange([path], [without], step=1)
    path.apply(Averager(step=1, takes_blocks=True), sent, without)
    assert sum(len(gradient.rows) for gradient in without.gradients.values()) == 0


def test_sums_by_parameter_leave_nothing_behind():
    paths = cluster(2, 1.0)
    gradients = [drawn(np.random.default_rng(seed)) for seed in (12, 13)]
    passes = [backward(path, own) for path, own in zip(paths, gradients, strict=True)]
    path = paths[0]
    sums = path.sums_of(path.read(exchange(paths, passes)[0]))
    for name, *parts in zip(SIZES, *gradients, strict=True):
        torch.testing.assert_close(sums[name], parts[0] + parts[1])
    assert not path.encoder.merged.any()


def test_parameters_get_their_blocks_after_the_pass():
    (path,) = cluster(1, 0.2)
    running = backward(path, [torch.ones(size) * (1 + i) for i, size in enumerate(SIZES.values())])
    (sent,) = exchange([path], [running])
    path.apply(Averager(takes_blocks=True), sent, running)
    parameters = dict(zip(SIZES, path.model.slots, strict=True))
    parameters["third"].grad = torch.zeros(3)
    assert path.blocks(running) is running.gradients
    given = {name: p.grad is not None and p.grad.is_sparse for name, p in parameters.items()}
    assert given["second"], "its block is the largest"
    for name, p in parameters.items():
        if not len(running.gradients[p].rows) and name != "third":
            assert p.grad is None, "nothing of it was sent, and it had no gradient"


def test_it_is_that_of_the_host_already():
    (path,) = cluster(1, 0.5)
    assert path.on_host("exact") is path
    assert isinstance(path, HostPath)
