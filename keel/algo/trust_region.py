"""Trust-region policy optimisation: the natural gradient by conjugate gradients, its length, and the line search.

A vector over D is all of the policy's parameters, flat. Functions that take a function call it with such a vector (or a
number) and keep nothing of it.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


@torch.no_grad()
def conjugate_gradient(
    product: Callable[[Tensor], Tensor], target_D: Tensor, iterations: int, tolerance: float = 1e-10
) -> Tensor:
    """Solves A x = b for a symmetric positive definite A that is known only by its products with a vector.

        r = p = b - A x,  x = 0
        a = r^T r / p^T A p;   x += a p;   r' = r - a A p;   p = r' + (r'^T r' / r^T r) p

    Hestenes and Stiefel 1952; as TRPO uses it: Schulman et al. 2015 (arXiv 1502.05477), appendix C, with A the Fisher
    matrix and b the gradient of the surrogate. Exact after D iterations but for rounding.

    Args:
        product: v_D -> A v, [D].
        target_D: b.
        iterations: at most so many products.
        tolerance: ends where the squared norm of the residual r is no larger than this times that of b.

    Returns: x_D in units of b / A; 0 where b is 0.
    """
    x_D, residual_D, direction_D = torch.zeros_like(target_D), target_D.clone(), target_D.clone()
    squared = start = residual_D.dot(residual_D)
    for _ in range(iterations):
        if squared <= tolerance * start:
            break
        product_D = product(direction_D)
        length = squared / direction_D.dot(product_D)
        x_D += length * direction_D
        residual_D -= length * product_D
        before, squared = squared, residual_D.dot(residual_D)
        direction_D = residual_D + squared / before * direction_D
    return x_D


def fisher_product(kl: Tensor, parameters: Sequence[Tensor], damping: float) -> Callable[[Tensor], Tensor]:
    """Products of the damped Fisher matrix with a vector: v -> H v + damping * v, H never formed.

        H v = grad( grad(KL) . v ),   H = the Hessian of KL(pi_old || pi) at pi = pi_old

    Schulman et al. 2015 (arXiv 1502.05477), appendix C.1: at that point the Hessian of the mean KL is the Fisher
    matrix. The paper multiplies by J^T M J instead of differentiating twice; the numbers are the same. Its damping
    stands in the released code only.

    Args:
        kl: mean KL(pi_old || pi) over the states, a scalar in nats with a graph, at pi = pi_old.
        parameters: what the graph reaches; all of them together are D numbers.
        damping: added to the diagonal, nats per squared unit of a parameter, 0 or more.

    Returns: a function v_D -> [D], detached.
    """
    parameters = list(parameters)
    slope_D = _flat(torch.autograd.grad(kl, parameters, create_graph=True))

    def product(vector_D: Tensor) -> Tensor:
        # Outside of whoever's no_grad: the second derivative needs the graph.
        with torch.enable_grad():
            along = slope_D.dot(vector_D)
        return _flat(torch.autograd.grad(along, parameters, retain_graph=True)) + damping * vector_D

    return product


def step_length(direction_D: Tensor, product_D: Tensor, max_kl: float) -> Tensor:
    """The factor of a direction at which the quadratic model of the KL is `max_kl`: sqrt(2 delta / x^T H x).

    Schulman et al. 2015 (arXiv 1502.05477), appendix C: delta = 1/2 (beta s)^T A (beta s), solved for beta.

    Args:
        direction_D: x.
        product_D: H x, the Fisher matrix times x.
        max_kl: delta, nats, larger than 0.

    Returns: a scalar without a unit; 0 where x^T H x is not above 0 (no gradient, or rounding).
    """
    curvature = direction_D.dot(product_D)
    positive = curvature > 0
    return torch.where(positive, (2.0 * max_kl / torch.where(positive, curvature, 1.0)).sqrt(), 0.0)


class Trial(NamedTuple):
    """A point of a line search. fraction: of the full step. improvement: of the surrogate. kl: nats from the start."""

    fraction: float
    improvement: float
    kl: float


def line_search(
    measure: Callable[[float], tuple[float, float]], max_kl: float, shrink: float, attempts: int
) -> tuple[Trial | None, int]:
    """The longest of the steps 1, shrink, shrink^2, ... that improves the surrogate and stays inside the trust region.

    Schulman et al. 2015 (arXiv 1502.05477), appendix C: backtracking on L(theta) - X[KL <= delta], X infinite outside.
    Numbers that are not finite count as failure.

    Args:
        measure: fraction of the full step -> (surrogate there minus surrogate at the start, mean KL in nats).
        max_kl: delta, nats.
        shrink: factor from one try to the next, between 0 and 1.
        attempts: tries at most.

    Returns: (the accepted step or None, tries made).
    """
    for attempt in range(attempts):
        trial = Trial(shrink**attempt, *measure(shrink**attempt))
        if trial.improvement > 0 and trial.kl <= max_kl:
            return trial, attempt + 1
    return None, attempts


def _flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts])
