"""Time model of a data-parallel step on unequal workers (C sec. 3.2, C eq. 3-7 and 12) and its fit.

Symbols: ``a_i = q_i b_i + s_i`` is everything in a step except backward (load, forward, update), ``P_i = k_i b_i +
m_i`` the backward pass, ``gamma`` the share of the backward pass before the first gradient bucket is ready, ``t_o`` and
``t_u`` the synchronization of all buckets but the last, and of the last. All times are seconds *without waiting* for
others: a worker's idle time is no part of its model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.timing.fitting import estimate_gamma, estimate_sync_times, fit_line, steps_that_tell
from lightning_hetero.core.timing.winsorized_mean import winsorized_mean
from lightning_hetero.core.validation import check_number

__all__ = ["ClusterTimeModel", "NodeModels", "NodeTimeModel", "fit_node"]

Array = npt.NDArray[np.float64]


@checked_keywords
@dataclass(frozen=True, slots=True)
class NodeTimeModel:
    """Compute time of one worker, linear in its batch size: ``a = q b + s``, ``P = k b + m`` (C eq. 3).

    Args:
        q: seconds per sample of load, forward and update, ``>= 0``.
        s: fixed seconds of load, forward and update, ``>= 0``.
        k: seconds per sample of the backward pass, ``>= 0``.
        m: fixed seconds of the backward pass, ``>= 0``.

    Raises:
        TypeError: if a coefficient is not a number.
        ValueError: if a coefficient is negative or not finite.

    Example:
        >>> node = NodeTimeModel(q=0.001, s=0.01, k=0.002, m=0.02)
        >>> round(node.forward_time(10), 6), round(node.backward_time(10), 6), round(node.compute_time(10), 6)
        (0.02, 0.04, 0.06)
    """

    q: float
    s: float
    k: float
    m: float

    def __post_init__(self) -> None:
        for name in ("q", "s", "k", "m"):
            object.__setattr__(self, name, check_number(name, getattr(self, name), low=0.0))

    def forward_time(self, b: float) -> float:
        """Return ``a = q b + s``: seconds of a step that are not the backward pass."""
        return self.q * b + self.s

    def backward_time(self, b: float) -> float:
        """Return ``P = k b + m``: seconds of the backward pass."""
        return self.k * b + self.m

    def compute_time(self, b: float) -> float:
        """Return ``a + P``: seconds that the worker computes in a step of ``b`` samples."""
        return self.forward_time(b) + self.backward_time(b)

    def accumulated(self, n: int) -> "NodeTimeModel":
        """Return the model of an accumulation window of ``n`` micro-batches, of which only the last is synchronized.

        The first ``n - 1`` micro-batches run forward and backward before the last one, so they count as ``a``.

        Example:
            >>> NodeTimeModel(1, 0, 2, 0).accumulated(3)
            NodeTimeModel(q=7.0, s=0.0, k=2.0, m=0.0)
        """
        return NodeTimeModel(self.q + (n - 1) * (self.q + self.k), self.s + (n - 1) * (self.s + self.m), self.k, self.m)


class NodeModels(Sequence[NodeTimeModel]):
    """Models of workers in one array; each :class:`NodeTimeModel` is made on access.

    Args:
        coefficients: ``(q, s, k, m)`` of each worker, shape ``(workers, 4)``, finite and ``>= 0``.

    Example:
        >>> NodeModels(np.array([[1.0, 0.0, 2.0, 0.5]]))[0].compute_time(2)
        6.5
    """

    def __init__(self, coefficients: Array) -> None:
        self.coefficients = coefficients
        if not np.all(np.isfinite(coefficients)) or np.any(coefficients < 0):
            raise ValueError("coefficients of time models must be finite and >= 0.")

    def __len__(self) -> int:
        return len(self.coefficients)

    @overload
    def __getitem__(self, index: int) -> NodeTimeModel: ...

    @overload
    def __getitem__(self, index: slice) -> "NodeModels": ...

    def __getitem__(self, index: int | slice) -> "NodeTimeModel | NodeModels":
        if isinstance(index, slice):
            return NodeModels(self.coefficients[index])
        return NodeTimeModel(*map(float, self.coefficients[index]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


@checked_keywords
@dataclass(frozen=True)
class ClusterTimeModel:
    """Time of one synchronous step of all workers (C eq. 7).

    ``T = max( max_i(a_i + P_i) + t_u,  max_i(a_i + gamma P_i) + t_o + t_u )``

    Args:
        nodes: one model per worker.
        gamma: share of the backward pass before the first bucket is ready, 0 to 1.
        t_o: seconds of synchronizing all buckets but the last, which can overlap with the backward pass.
        t_u: seconds of synchronizing the last bucket, which cannot.

    Raises:
        ValueError: if there is no node, or a value is out of range.

    Example:
        >>> fast, slow = NodeTimeModel(0.001, 0, 0.001, 0), NodeTimeModel(0.002, 0, 0.002, 0)
        >>> cluster = ClusterTimeModel((fast, slow), gamma=0.2, t_o=0.0, t_u=0.01)
        >>> round(cluster.step_time([20, 10]), 6)
        0.05
    """

    nodes: Sequence[NodeTimeModel]
    gamma: float = 1.0
    t_o: float = 0.0
    t_u: float = 0.0

    def __post_init__(self) -> None:
        if not len(self.nodes):
            raise ValueError("nodes is empty; give one NodeTimeModel per worker.")
        if not isinstance(self.nodes, NodeModels):
            array = np.array([(n.q, n.s, n.k, n.m) for n in self.nodes], dtype=float)
            object.__setattr__(self, "nodes", NodeModels(array))
        check_number("gamma", self.gamma, low=0.0, high=1.0)
        check_number("t_o", self.t_o, low=0.0)
        check_number("t_u", self.t_u, low=0.0)

    @property
    def array(self) -> Array:
        """``(q, s, k, m)`` of each worker, shape ``(workers, 4)``."""
        return self.nodes.coefficients  # type: ignore[attr-defined, no-any-return]

    def coefficients(self) -> tuple[Array, Array, Array, Array]:
        """Return ``alpha_1, beta_1, alpha_2, beta_2`` of finish times ``max(alpha_1 b + beta_1, alpha_2 b + beta_2)``.

        The first line holds where computing is the worker's bottleneck (C eq. 5), the second where communication is
        (C eq. 6).
        """
        q, s, k, m = self.array.T
        tiny = 1e-12
        return (
            np.maximum(q + k, tiny),
            s + m + self.t_u,
            np.maximum(q + self.gamma * k, tiny),
            s + self.gamma * m + self.t_o + self.t_u,
        )

    def finish_times(self, local_batch_sizes: Sequence[int] | Array) -> Array:
        """Return the seconds after which each worker would finish the step if it were alone."""
        b = np.asarray(local_batch_sizes, dtype=float)
        if b.shape != (len(self.nodes),):
            raise ValueError(f"give one batch size per worker ({len(self.nodes)}); got shape {b.shape}.")
        alpha_1, beta_1, alpha_2, beta_2 = self.coefficients()
        return np.asarray(np.maximum(alpha_1 * b + beta_1, alpha_2 * b + beta_2))

    def step_time(self, local_batch_sizes: Sequence[int] | Array) -> float:
        """Return the seconds of one step with these local batch sizes (C eq. 7)."""
        return float(self.finish_times(local_batch_sizes).max())

    def accumulated(self, n: int) -> "ClusterTimeModel":
        """Return the model of an accumulation window of ``n`` micro-batches, see :meth:`NodeTimeModel.accumulated`."""
        if n == 1:
            return self
        q, s, k, m = self.array.T
        whole = np.stack([q + (n - 1) * (q + k), s + (n - 1) * (s + m), k, m], axis=1)
        return ClusterTimeModel(NodeModels(whole), self.gamma, self.t_o, self.t_u)

    def slowed(self, share: float, seconds: float) -> "ClusterTimeModel":
        """Return the model of a cluster whose every step takes ``(1 + share) T + seconds``.

        Example:
            >>> ClusterTimeModel((NodeTimeModel(1, 0, 2, 0),), t_u=1.0).slowed(0.5, 0.25).step_time([2])
            10.75
        """
        more = 1.0 + share
        t_u = max(more * self.t_u + seconds, 0.0)
        return ClusterTimeModel(NodeModels(more * self.array), self.gamma, more * self.t_o, t_u)

    @classmethod
    def fit(cls, observations: StepObservations) -> "ClusterTimeModel":
        """Learn all coefficients from observed steps (C sec. 4.5, with the estimators of C eq. 12).

        Args:
            observations: at least one step; a worker seen at one batch size only gets a model through the origin.

        Raises:
            ValueError: if there is no step.

        Example:
            >>> sizes = np.array([[10.0, 10.0], [20.0, 5.0]])
            >>> forward, backward = 0.001 * sizes + 0.01, np.array([0.002, 0.004]) * sizes
            >>> zeros = np.zeros_like(sizes)
            >>> obs = StepObservations(sizes, forward, backward, 0.5 * backward, zeros, zeros + 0.01, zeros)
            >>> cluster = ClusterTimeModel.fit(obs)
            >>> [round(node.k, 6) for node in cluster.nodes], cluster.gamma, cluster.t_u
            ([0.002, 0.004], 0.5, 0.01)
        """
        if observations.num_steps == 0:
            raise ValueError("no step was observed yet; a time model needs at least one.")
        o = observations
        nodes = [
            fit_node(*_paces(o.local_batch_sizes[:, i], o.outside_backward[:, i], o.backward[:, i]))
            for i in range(o.forward.shape[1])
        ]
        t_o, t_u = estimate_sync_times(
            observations.overlapped_sync, observations.last_sync, steps_that_tell(observations)
        )
        return cls(tuple(nodes), estimate_gamma(observations.first_bucket, observations.backward), t_o, t_u)


def _paces(sizes: Array, forward: Array, backward: Array) -> tuple[Array, Array, Array, Array]:
    """Return the distinct sizes, the winsorized means of both times at each, and the number of steps at each."""
    distinct, which, count = np.unique(sizes, return_inverse=True, return_counts=True)
    windows = [which.ravel() == i for i in range(len(distinct))]
    forward, backward = (np.array([winsorized_mean(y[window]) for window in windows]) for y in (forward, backward))
    return distinct, forward, backward, count.astype(float)


def fit_node(
    sizes: Array,
    forward: Array,
    backward: Array,
    weight: Array | None = None,
) -> NodeTimeModel:
    """Fit the model of one worker to its own timings (C sec. 4.5).

    Args:
        sizes: samples of each observation, shape ``(n,)``.
        forward: ``a`` of each observation in seconds.
        backward: ``P`` of each observation in seconds.
        weight: weight of each observation.

    Returns:
        The model; with one distinct size it goes through the origin, as C eq. 8 assumes.

    Example:
        >>> fit_node(np.array([4.0, 4.0]), np.array([0.04, 0.04]), np.array([0.08, 0.08]))
        NodeTimeModel(q=0.01, s=0.0, k=0.02, m=0.0)
    """
    q, s = fit_line(sizes, forward, weight)
    k, m = fit_line(sizes, backward, weight)
    return NodeTimeModel(round(q, 15), round(s, 15), round(k, 15), round(m, 15))
