"""PowerSGD and top-k written down from their papers, for all ranks in one process. The tests compare training with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Gradients = list[np.ndarray]
Combine = Callable[[Sequence[Gradients], Sequence[float]], Gradients]


def powersgd(rank: int) -> Combine:
    """Vogels, Karimireddy and Jaggi, arXiv:1905.13727, algorithms 1 and 2, for matrices that get smaller by half at least."""
    errors: dict[tuple[int, int], np.ndarray] = {}
    starts: dict[int, np.ndarray] = {}

    def one(number: int, gradients: Sequence[np.ndarray], shares: Sequence[float]) -> np.ndarray:
        rows, columns = gradients[0].shape if gradients[0].ndim == 2 else (1, 1)
        if 2 * rank * (rows + columns) > rows * columns:
            return sum(share * gradient for share, gradient in zip(shares, gradients, strict=True))
        whole = [g + errors.get((number, r), 0) if shares[r] else 0 * g for r, g in enumerate(gradients)]
        mean: Any = sum(share * each for share, each in zip(shares, whole, strict=True))
        if number not in starts:
            first = np.random.default_rng([0, number]).standard_normal((columns, rank))
            starts[number] = np.linalg.qr(first.astype(mean.dtype))[0]
        left = np.linalg.qr(mean @ starts[number])[0]
        right = mean.T @ left
        starts[number] = np.linalg.qr(right)[0]
        found: np.ndarray = left @ right.T
        errors.update({(number, r): each - found for r, each in enumerate(whole) if shares[r]})
        return found

    return _each(one)


def topk(ratio: float, smallest: int) -> Combine:
    """The largest elements with error feedback, Aji and Heafield, arXiv:1704.05021."""
    errors: dict[tuple[int, int], np.ndarray] = {}

    def one(number: int, gradients: Sequence[np.ndarray], shares: Sequence[float]) -> np.ndarray:
        if gradients[0].size < smallest:
            return sum(share * gradient for share, gradient in zip(shares, gradients, strict=True))
        found = np.zeros_like(gradients[0])
        for r, gradient in enumerate(gradients):
            if shares[r]:
                whole = gradient + errors.get((number, r), 0)
                limit = np.sort(np.abs(whole), axis=None)[-max(1, round(ratio * whole.size))]
                sent = np.where(np.abs(whole) >= limit, whole, 0)
                errors[number, r] = whole - sent
                found += shares[r] * sent
        return found

    return _each(one)


def _each(one: Callable[[int, Sequence[np.ndarray], Sequence[float]], np.ndarray]) -> Combine:
    def combine(everybody: Sequence[Gradients], samples: Sequence[float]) -> Gradients:
        shares = [weight / sum(samples) for weight in samples]
        return [one(number, each, shares) for number, each in enumerate(zip(*everybody, strict=True))]

    return combine
