"""State of torch's PowerSGD by parameter, which follows when DDP rebuilds its buckets."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

__all__ = ["BucketState", "Matrices"]


class Matrices:
    """A bucket whose gradients torch's hook can all view as matrices.

    Scalars become vectors, empty gradients are left out, and the dimensions of gradients in another memory order, such
    as channels last, are permuted to that order.

    Args:
        bucket: bucket of DDP.
    """

    def __init__(self, bucket: dist.GradBucket) -> None:
        self.bucket = bucket
        self.buffer, self.index, self.is_last = bucket.buffer, bucket.index, bucket.is_last

    def gradients(self) -> list[torch.Tensor]:
        """Return views of the gradients, of at least one dimension."""
        return [_in_order(gradient) for gradient in self.bucket.gradients() if gradient.numel()]


def _in_order(gradient: torch.Tensor) -> torch.Tensor:
    """Return a view whose dimensions come in the order of memory.

    Example:
        >>> _in_order(torch.zeros(2, 3, 4).transpose(0, 2)).shape
        torch.Size([2, 3, 4])
    """
    if gradient.dim() < 2 or gradient.is_contiguous():
        return gradient.view(-1) if gradient.dim() == 0 else gradient
    strides, sizes = gradient.stride(), gradient.shape
    order = sorted(range(gradient.dim()), key=lambda d: (-strides[d], -sizes[d]))
    return gradient.permute(order)


class _Place(NamedTuple):
    """Place of a parameter in a bucket, the shape of its matrix, and the elements of ``P`` and ``Q``."""

    name: str
    start: int
    numel: int
    shape: tuple[int, int]
    p: int
    q: int


def _grouped(places: list[_Place]) -> list[_Place]:
    """Return the places that are sent as low-rank products, in torch's order: grouped by shape."""
    shapes: dict[tuple[int, int], list[_Place]] = {}
    for place in places:
        if place.q:
            shapes.setdefault(place.shape, []).append(place)
    return [place for group in shapes.values() for place in group]


class BucketState:
    """Residuals and matrices ``Q`` of PowerSGD, kept by parameter between two layouts of DDP's buckets.

    Args:
        state: state of torch's hook, with entries by bucket.
        names: name of each parameter.
        world_size: number of ranks in the average; torch's residuals are ``world_size`` times ours.
    """

    def __init__(self, state: PowerSGDState, names: dict[torch.Tensor, str], world_size: int = 1) -> None:
        self.state, self.names, self.world_size = state, names, world_size
        self._scale = 1.0
        self._places: dict[int, list[_Place]] = {}
        self._errors: dict[str, torch.Tensor] = {}
        self._matrices: dict[str, torch.Tensor] = {}
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def lay_out(self, bucket: dist.GradBucket, finite: torch.Tensor | None = None) -> None:
        """Give torch's hook the state of the parameters of a bucket.

        Args:
            bucket: about to be averaged; buckets come in the order of their numbers.
            finite: number on the device, 0 if the step is left out and the bucket's state has to stay as it was;
                ``None`` if the step is known to count.
        """
        index, places = bucket.index(), self._places_of(bucket)
        if self._places.get(index) != places:
            for other in [number for number in self._places if number >= index]:
                self._take_apart(other)
            self._put_together(bucket, places)
        self._decide(index)
        if finite is not None:  # torch replaces the tensor of errors, but overwrites that of Q in place
            self._before[index] = finite, self.state.error_dict[index], self.state.q_memory_dict[index].clone()

    def _places_of(self, bucket: dist.GradBucket) -> list[_Place]:
        begin, found = bucket.buffer().storage_offset(), []
        for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
            rows = _in_order(gradient).shape[0] if gradient.numel() else 0
            columns = gradient.numel() // rows if rows else 0
            start = int(gradient.storage_offset() - begin)
            found.append(_Place(self.names[parameter], start, gradient.numel(), *self._sizes(rows, columns)))
        return found

    def _sizes(self, n: int, m: int) -> tuple[tuple[int, int], int, int]:
        """Return shape of a matrix and elements of its ``P`` and ``Q``, which are 0 if torch sends it uncompressed."""
        rank = min(n, m, self.state.matrix_approximation_rank)
        low_rank = (n + m) * rank * self.state.min_compression_rate < n * m
        return (n, m), n * rank * low_rank, m * rank * low_rank

    def _decide(self, index: int) -> None:
        """Settle the state of a bucket after its last step: restore the one before if the step was left out."""
        if index in self._before:
            finite, error, matrices = self._before.pop(index)
            errors, qs = self.state.error_dict, self.state.q_memory_dict
            errors[index] = torch.where(finite > 0, errors[index], error)
            qs[index] = torch.where(finite > 0, qs[index], matrices)

    def _take_apart(self, index: int) -> None:
        """Move the state of a bucket that no longer exists to its parameters."""
        self._errors |= {name: error.clone() for name, error in self._errors_of(index)}
        self._matrices |= {name: matrix.clone() for name, matrix in self._matrices_of(index)}
        del self._places[index], self.state.error_dict[index]
        del self.state.p_memory_dict[index], self.state.q_memory_dict[index]

    def _put_together(self, bucket: dist.GradBucket, places: list[_Place]) -> None:
        """Build the state of a new bucket from that of its parameters; draw random matrices for those without."""
        index, buffer, state, drawn = bucket.index(), bucket.buffer(), self.state, torch.Generator()
        self._places[index], error = places, torch.zeros_like(buffer)
        for place in places:
            if place.name in self._errors:
                error[place.start : place.start + place.numel].copy_(self._errors.pop(place.name))
        found = [(place.q, self._matrices.pop(place.name, None)) for place in _grouped(places)]
        known = [None if matrix is None or matrix.numel() != size else matrix for size, matrix in found]
        if any(matrix is None for matrix in known):
            drawn.manual_seed(int(state.rng.randint(1_000_000_000)))  # the same on all ranks
        parts = [
            torch.randn(size, generator=drawn, dtype=buffer.dtype) if matrix is None else matrix
            for (size, _), matrix in zip(found, known, strict=True)
        ]
        state.error_dict[index] = error
        state.q_memory_dict[index] = torch.cat([buffer.new_empty(0), *(part.to(buffer) for part in parts)])
        state.p_memory_dict[index] = buffer.new_empty(sum(place.p for place in places))

    def _errors_of(self, index: int) -> list[tuple[str, torch.Tensor]]:
        self._decide(index)
        error = self.state.error_dict[index]
        return [(place.name, error[place.start : place.start + place.numel]) for place in self._places[index]]

    def _matrices_of(self, index: int) -> list[tuple[str, torch.Tensor]]:
        self._decide(index)
        places = _grouped(self._places[index])
        parts = self.state.q_memory_dict[index].split([place.q for place in places])
        return [(place.name, part) for place, part in zip(places, parts, strict=True)]

    def scale_by(self, scale: float) -> None:
        """Follow the factor of a loss scaler on the gradients."""
        if scale != self._scale:
            self._multiply(scale / self._scale)
            self._scale = scale

    def _multiply(self, factor: float) -> None:
        for index in self._places:
            self._decide(index)
        for error in (*self.state.error_dict.values(), *self._errors.values()):
            error.mul_(factor)

    def residuals(self) -> dict[str, torch.Tensor]:
        """Return residuals by parameter, on the host: parts of the weighted sum over ranks, without a loss scale."""
        factor = self._scale * self.world_size
        exact = math.frexp(factor)[0] == 0.5  # otherwise float64 preserves the exact float32 value
        return {name: (error if exact else error.double()) / factor for name, error in self.errors().items()}

    def load_residuals(self, residuals: Mapping[str, torch.Tensor]) -> None:
        """Replace the residuals; matrices are drawn anew."""
        factor = self._scale * self.world_size
        self.load({name: residual.flatten() * factor for name, residual in residuals.items()}, {})

    def load_matrices(self, matrices: dict[str, torch.Tensor]) -> None:
        """Replace the matrices; the residuals stay."""
        self.load(self.errors(), matrices)

    def errors(self) -> dict[str, torch.Tensor]:
        """Return residuals by parameter, on the host."""
        here = [pair for index in self._places for pair in self._errors_of(index)]
        return {name: error.cpu() for name, error in (*self._errors.items(), *here)}

    def matrices(self) -> dict[str, torch.Tensor]:
        """Return matrices by parameter, on the host."""
        here = [pair for index in self._places for pair in self._matrices_of(index)]
        return {name: matrix.detach().clone().cpu() for name, matrix in (*self._matrices.items(), *here)}

    def load(self, errors: dict[str, torch.Tensor], matrices: dict[str, torch.Tensor]) -> None:
        """Replace all residuals and matrices."""
        self._errors, self._matrices = dict(errors), dict(matrices)
        self._places, self._before = {}, {}
        entries: tuple[dict[int, Any], ...] = (
            self.state.error_dict,
            self.state.p_memory_dict,
            self.state.q_memory_dict,
        )
        for entry in entries:
            entry.clear()
