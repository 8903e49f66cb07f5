"""PowerSGD: gradients of matrices as products of two narrow ones.

Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", 2019, arXiv 1905.13727: algorithm 1 (compress, aggregate, decompress) and the error
feedback of algorithm 2. Shape letters: a matrix M is ``(n, m)``, its factors P ``(n, r)`` and Q
``(m, r)``; what errors are remembered is ``(n, m)``.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch_xla.core.xla_model as xm

from ..collectives.host_data import as_data
from ..sharding.grad_bucket import GradBucket
from .orthogonal import orthonormal_columns


@dataclass(eq=False)
class _Kept:
    """What is remembered of one matrix from one reduction to the next, on this rank.

    Of scanned blocks, which have such a matrix each, with a row for each in front.
    """

    q: torch.Tensor  # (m, r), the same on every rank
    error: torch.Tensor | None  # (n, m), this rank's own
    ranks: int
    names: tuple[str, ...] = ()  # the matrix's, or in each block
    owner: object = None  # the unit whose gradients these are


@dataclass(frozen=True)
class _Saved:
    """The same of a matrix, as ``state_dict`` gives it."""

    q: torch.Tensor
    error: torch.Tensor | None
    ranks: int


class PowerSGDState:
    """The options of :func:`powerSGD_hook`, by torch's names and with its defaults, and its memory.

    Args:
        process_group: only ``None``: groups are those of the wrapper.
        matrix_approximation_rank: r, the columns of the factors.
        start_powerSGD_iter: a parameter's first reductions are not compressed: gradients change
            fast at the start of a training.
        min_compression_rate: a matrix is compressed where ``n * m > (n + m) * r *
            min_compression_rate``.
        use_error_feedback: remember what the approximation missed, and add it to the next gradient.
            Takes a float32 gradient of every compressed matrix on **each** rank (with
            ``over="replicas"``: of this rank's shard). Without it training may not converge.
        warm_start: start from the last Q. ``False``: from a new random one each time.
        random_seed: of the first Q; the same on all ranks.

    Raises:
        ValueError, TypeError: an option has a value that is not allowed.
    """

    def __init__(
        self,
        process_group: None = None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1000,
        min_compression_rate: float = 2.0,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        random_seed: int = 0,
    ) -> None:
        if process_group is not None:
            raise ValueError(
                f"process_group must be None, got {process_group!r}: gradients are averaged over "
                "the wrapper's sharding_groups and replication_groups"
            )
        for name, value, least in (
            ("matrix_approximation_rank", matrix_approximation_rank, 1),
            ("start_powerSGD_iter", start_powerSGD_iter, 0),
            ("random_seed", random_seed, 0),
        ):
            if type(value) is not int or value < least:
                raise ValueError(f"{name} must be a whole number from {least} on, got {value!r}")
        if not isinstance(min_compression_rate, (int, float)) or not min_compression_rate > 0:
            raise ValueError(
                f"min_compression_rate must be a positive number, got {min_compression_rate!r}"
            )
        for name, flag in (("use_error_feedback", use_error_feedback), ("warm_start", warm_start)):
            if not isinstance(flag, bool):
                raise TypeError(f"{name} must be True or False, got {flag!r}")
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = float(min_compression_rate)
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.random_seed = random_seed
        self._iterations: dict[str, int] = {}  # reductions so far, by parameter
        self._kept: dict[str, _Kept] = {}
        self._loaded: dict[str, _Saved] = {}  # and not used yet

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, on the host; save it for **each** rank: errors are its own.

        By the names that parameters have, in scanned blocks each one's.
        """
        saved = dict(self._loaded)
        for one in self._kept.values():
            q, error = one.q.cpu(), None if one.error is None else one.error.cpu()
            if len(one.names) == 1 and q.dim() == 2:
                saved[one.names[0]] = _Saved(q, error, one.ranks)
                continue
            for row, name in enumerate(one.names):
                own = None if error is None else error[row].clone()
                saved[name] = _Saved(q[row].clone(), own, one.ranks)
        kept = {name: dict(vars(one)) for name, one in saved.items()}
        return {"iterations": dict(self._iterations), "matrices": kept}

    def load_state_dict(self, state_dict: Mapping[str, Any], with_errors: bool = True) -> None:
        """Takes what :meth:`state_dict` of as many ranks returned, one for each rank.

        ``with_errors=False``: forgets the errors, which is all that another number of ranks, or
        one file for all, can do.
        """
        self._iterations = dict(state_dict["iterations"])
        self._kept, self._loaded = {}, {}
        for name, one in state_dict["matrices"].items():
            error, ranks = (one["error"], one["ranks"]) if with_errors else (None, 0)
            self._loaded[name] = _Saved(one["q"], error, ranks)

    # -- for the hook ---------------------------------------------------------------------------

    def _counted(self, bucket: GradBucket) -> list[bool]:
        """Whether each parameter is past its start; counts this reduction."""
        past = []
        for number in range(len(bucket.names)):
            names = _names(bucket, number)
            past.append(self._iterations.get(names[0], 0) >= self.start_powerSGD_iter)
            for name in names:
                self._iterations[name] = self._iterations.get(name, 0) + 1
        return past

    def _compresses(self, gradient: torch.Tensor) -> bool:
        if gradient.dim() < 2 or not gradient.is_floating_point() or not gradient.numel():
            return False
        n = gradient.shape[0]
        m = gradient.numel() // n
        r = min(n, m, self.matrix_approximation_rank)
        return n * m > (n + m) * r * self.min_compression_rate

    def _kept_of(self, number: int, matrix: torch.Tensor, bucket: GradBucket) -> _Kept:
        """What is remembered of the matrix; the first time it is made, on its device."""
        name = bucket.names[number]
        one = self._kept.get(name)
        if one is None:
            one = self._kept[name] = self._made(_names(bucket, number), matrix, bucket)
        if one.owner is not bucket.owner:
            raise RuntimeError(
                f"two models have a parameter {name!r} and share one PowerSGDState, which "
                "remembers by name: make a state for each"
            )
        return one

    def _made(self, names: tuple[str, ...], matrix: torch.Tensor, bucket: GradBucket) -> _Kept:
        rows = [self._first(name, matrix, bucket) for name in names]
        q = _stacked([row.q for row in rows], bucket)
        # As data, and not as constants of the first program, which would be another one then.
        tensors = [q]
        if self.use_error_feedback:
            zeros = torch.zeros(matrix.shape, dtype=matrix.dtype)
            errors = [zeros if row.error is None else row.error for row in rows]
            tensors.append(_stacked(errors, bucket))
        sent: Any = xm.send_cpu_data_to_device(tensors, matrix.device)
        error = sent[1] if self.use_error_feedback else None
        for name in names:
            self._loaded.pop(name, None)
        return _Kept(sent[0], error, bucket.ranks, names, bucket.owner)

    def _first(self, name: str, matrix: torch.Tensor, bucket: GradBucket) -> _Saved:
        """What the matrix called ``name`` starts with: what was loaded, or a random Q."""
        n, m = matrix.shape
        r = min(n, m, self.matrix_approximation_rank)
        loaded = self._loaded.get(name)
        if loaded is None:
            return _Saved(self._random_q(name, m, r, 0), None, bucket.ranks)
        q, error = loaded.q, loaded.error
        if q.shape != (m, r) or (error is not None and error.shape != (n, m)):
            raise RuntimeError(
                f"PowerSGDState was loaded for another {name!r}: Q has the shape "
                f"{tuple(q.shape)}, and ({m}, {r}) is needed; load it into a state of the same "
                "matrix_approximation_rank and a model of the same sizes"
            )
        if error is not None and loaded.ranks != bucket.ranks:
            raise RuntimeError(
                f"PowerSGDState was saved by {loaded.ranks} ranks, and errors of {name!r} are "
                f"now those of {bucket.ranks}: load_state_dict(..., with_errors=False)"
            )
        return loaded

    def _random_q(self, name: str, m: int, r: int, iteration: int) -> torch.Tensor:
        seed = zlib.crc32(f"{self.random_seed} {iteration} {name}".encode())
        return torch.randn(m, r, generator=torch.Generator("cpu").manual_seed(seed))

    def _q_for(self, one: _Kept, bucket: GradBucket) -> torch.Tensor:
        if self.warm_start:
            return bucket.recall(one.q)
        m, r = one.q.shape[-2:]
        fresh = [self._random_q(name, m, r, self._iterations[name]) for name in one.names]
        return bucket.recall(as_data(_stacked(fresh, bucket), one.q.device))


def _names(bucket: GradBucket, number: int) -> tuple[str, ...]:
    """Of gradient ``number`` of the bucket; in scanned blocks, one for each."""
    if bucket.block_names is None:
        return (bucket.names[number],)
    return tuple(names[number] for names in bucket.block_names)


def _stacked(rows: list[torch.Tensor], bucket: GradBucket) -> torch.Tensor:
    return rows[0] if bucket.block_names is None else torch.stack(rows)


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.Tensor:
    """Averages matrices as ``P Q^T`` of rank r; everything else in full.

    Sends ``(n + m) r`` float32 values of each matrix through two all-reduces, where a
    reduce-scatter sends ``n m``. Gradients of more than two dimensions are matrices of their first
    one and the others. Vectors go with P, uncompressed; a bucket without a matrix is reduced as
    without a hook.

    Raises:
        TypeError: ``state`` is no :class:`PowerSGDState`.
        ValueError: gradients are float16, and errors are to be remembered.
        RuntimeError: two models share a state, or it was loaded for another model.
    """
    if not isinstance(state, PowerSGDState):
        raise TypeError(
            "powerSGD_hook needs a PowerSGDState: model.register_comm_hook("
            f"PowerSGDState(matrix_approximation_rank=2), powerSGD_hook), got {state!r}"
        )
    gradients, names = bucket.gradients(), bucket.names
    past = state._counted(bucket)
    chosen = [n for n, g in enumerate(gradients) if past[n] and state._compresses(g)]
    if not chosen:
        return bucket.reduce()
    if state.use_error_feedback and gradients[chosen[0]].dtype is torch.float16:
        raise ValueError(
            f"gradients of {names} are float16, which needs loss scaling, and errors are "
            "remembered in the unit of a scale that changes: compute in bfloat16, or pass "
            "use_error_feedback=False to PowerSGDState"
        )
    means = _averaged(state, bucket, gradients, chosen)
    return bucket.shard_of(means)


def _averaged(
    state: PowerSGDState, bucket: GradBucket, gradients: list[torch.Tensor], chosen: list[int]
) -> list[torch.Tensor]:
    """The mean of every gradient, those of ``chosen`` approximated."""
    wide = torch.promote_types(gradients[chosen[0]].dtype, torch.float32)
    kept, matrices, ps = [], [], []
    for n in chosen:
        matrix = gradients[n].reshape(gradients[n].shape[0], -1).to(wide)
        one = state._kept_of(n, matrix, bucket)
        if one.error is not None:
            matrix = matrix + bucket.recall(one.error)
        kept.append(one)
        matrices.append(matrix)
        ps.append(matrix @ state._q_for(one, bucket).to(wide))
    others = [n for n in range(len(gradients)) if n not in chosen]
    summed = _summed(bucket, [*ps, *(gradients[n].to(wide) for n in others)])
    bases = [orthonormal_columns(p) for p in summed[: len(ps)]]
    own_qs = [matrix.t() @ basis for matrix, basis in zip(matrices, bases, strict=True)]
    qs = _summed(bucket, own_qs)

    means: dict[int, torch.Tensor] = {}
    for n, total in zip(others, summed[len(ps) :], strict=True):
        means[n] = total.view(gradients[n].shape)
    for n, one, matrix, basis, own, q in zip(
        chosen, kept, matrices, bases, own_qs, qs, strict=True
    ):
        means[n] = (basis @ q.t()).view(gradients[n].shape)
        _remember(bucket, one, q, matrix - basis @ own.t())
    return [means[n] for n in range(len(gradients))]


def _remember(bucket: GradBucket, one: _Kept, q: torch.Tensor, error: torch.Tensor) -> None:
    """In place, so that a program can write where it read.

    After an infinite gradient, whose step is skipped, everything is as before. A column of Q that
    was zero would be zero for ever.
    """
    finite = torch.isfinite(q).all()
    there = (q != 0).any(dim=0, keepdim=True)
    old = bucket.recall(one.q)
    bucket.remember(one.q, torch.where(finite & there, q.to(old.dtype), old))
    if one.error is not None:
        old = bucket.recall(one.error)
        bucket.remember(one.error, torch.where(finite, error.to(old.dtype), old))


def _summed(bucket: GradBucket, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each tensor's mean over all ranks, in one collective."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    mean = bucket.all_reduce(flat) / bucket.divisor
    pieces = mean.split([math.prod(tensor.shape) for tensor in tensors])
    return [piece.view(one.shape) for piece, one in zip(pieces, tensors, strict=True)]
