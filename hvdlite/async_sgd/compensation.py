"""Delay compensation: what a server does about gradients that belong to older values than those it has now.

The *staleness* of a push is the number of pushes of other workers that the server has applied since it sent the values with
which the gradients were computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hvdlite.errors import ArgumentError


@dataclass(frozen=True)
class DelayCompensation:
    """The contract of a compensation. This one compensates nothing.

    Tensors are those of any framework, or arrays of NumPy: an operator makes a new one.
    """

    @property
    def needs_pulled(self) -> bool:
        """Whether `corrected` is to be called, for which the server keeps the values that each worker has pulled last."""
        return False

    def rate(self, staleness: int) -> float:
        """Return the number by which the learning rate is multiplied for a push of this staleness."""
        return 1.0

    def corrected(self, gradient: Any, now: Any, pulled: Any, mean_square: Any | None) -> tuple[Any, Any | None]:
        """Return the gradient with which the server makes its step. Tensors of one shape and dtype, element by element.

        Args:
            gradient: The gradient of the push.
            now: The present values of the parameter.
            pulled: The values that the worker has computed with.
            mean_square: What this method has returned for this parameter the last time; None at first.

        Returns:
            The corrected gradient, and what is to be kept for this parameter (None for nothing).
        """
        return gradient, None


@dataclass(frozen=True)
class StalenessRate(DelayCompensation):
    """Divide the learning rate of a push by its staleness; a staleness of 0 counts as 1.

    W. Zhang, S. Gupta, X. Lian, J. Liu, "Staleness-aware async-SGD for distributed deep learning", IJCAI 2016
    (arXiv:1511.05950).

    Examples:
        >>> [hvdlite.StalenessRate().rate(staleness) for staleness in (0, 1, 2, 4)]
        [1.0, 1.0, 0.5, 0.25]
    """

    def rate(self, staleness: int) -> float:
        """See `DelayCompensation`."""
        return 1.0 / max(1, staleness)


@dataclass(frozen=True)
class DCASGD(DelayCompensation):
    """Estimate the gradient at the server's present values w from the gradient g at the pulled values v: g + λ g² (w - v).

    g² stands for the diagonal of the Hessian matrix. With `mean_square_decay` (m) λ is different for each element and changes:
    λ = strength / sqrt(s + epsilon), where s becomes m s + (1 - m) g² with each push, and is 0 at first.

    S. Zheng et al., "Asynchronous stochastic gradient descent with delay compensation", ICML 2017 (arXiv:1609.08326). The paper
    calls this DC-ASGD-c and, with `mean_square_decay`, DC-ASGD-a.

    Args:
        strength: λ, or its numerator; 0 or more.
        mean_square_decay: None for a constant λ; else m, at least 0 and less than 1. Then λ g² grows like the gradient and not
            like its square, so the strength is chosen anew, and larger.
        epsilon: More than 0; used with `mean_square_decay` only.

    Raises:
        ArgumentError: An argument is out of its range.

    Examples:
        >>> gradient, now, pulled = np.array([2.0]), np.array([1.5]), np.array([1.0])
        >>> corrected, _ = hvdlite.DCASGD(strength=0.1).corrected(gradient, now, pulled, None)
        >>> corrected.round(6).tolist()  # 2 + 0.1 × 2² × (1.5 - 1)
        [2.2]
    """

    strength: float = 0.04
    mean_square_decay: float | None = None
    epsilon: float = 1e-7

    def __post_init__(self) -> None:
        if not 0 <= self.strength < math.inf:
            raise ArgumentError(f"DCASGD: strength={self.strength!r}: expected 0 or more, such as 0.04.")
        if self.mean_square_decay is not None and not 0 <= self.mean_square_decay < 1:
            raise ArgumentError(
                f"DCASGD: mean_square_decay={self.mean_square_decay!r}: expected None, or at least 0 and less than 1, such as "
                "0.95."
            )
        if not 0 < self.epsilon < math.inf:
            raise ArgumentError(f"DCASGD: epsilon={self.epsilon!r}: expected more than 0, such as 1e-7.")

    @property
    def needs_pulled(self) -> bool:
        """See `DelayCompensation`."""
        return True

    def corrected(self, gradient: Any, now: Any, pulled: Any, mean_square: Any | None) -> tuple[Any, Any | None]:
        """See `DelayCompensation`."""
        square = gradient * gradient
        change = self.strength * square * (now - pulled)
        if self.mean_square_decay is None:
            return gradient + change, None
        before = 0.0 if mean_square is None else self.mean_square_decay * mean_square
        kept = before + (1 - self.mean_square_decay) * square
        return gradient + change / (kept + self.epsilon) ** 0.5, kept


NO_COMPENSATION = DelayCompensation()
