import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keel.algo.trust_region import Trial, conjugate_gradient, fisher_product, line_search, step_length


def test_conjugate_gradient_by_hand():
    # A = [[4, 1], [1, 3]], b = (1, 2). First step: r.r = 5, A r = (6, 7), r.A r = 20, so x = b / 4. Then (1, 7) / 11.
    a, b = torch.tensor([[4.0, 1.0], [1.0, 3.0]]), torch.tensor([1.0, 2.0])
    torch.testing.assert_close(conjugate_gradient(a.mv, b, 1), torch.tensor([0.25, 0.5]))
    torch.testing.assert_close(conjugate_gradient(a.mv, b, 2), torch.tensor([1.0, 7.0]) / 11)


def test_nothing_to_solve_takes_no_product():
    def product(v: torch.Tensor) -> torch.Tensor:
        raise AssertionError("b is 0")

    assert torch.equal(conjugate_gradient(product, torch.zeros(3), 10), torch.zeros(3))


def test_an_eigenvector_takes_one_product():
    calls = []

    def product(v: torch.Tensor) -> torch.Tensor:
        calls.append(v)
        return 2.0 * v

    torch.testing.assert_close(conjugate_gradient(product, torch.tensor([1.0, 3.0]), 10), torch.tensor([0.5, 1.5]))
    assert len(calls) == 1


@given(st.integers(0, 2**31), st.integers(1, 8))
def test_conjugate_gradient_is_the_dense_solution(seed: int, size: int):
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(size, size, generator=generator, dtype=torch.float64)
    a = root @ root.T + torch.eye(size, dtype=torch.float64)
    b = torch.randn(size, generator=generator, dtype=torch.float64)
    found = conjugate_gradient(a.mv, b, 4 * size, tolerance=1e-24)
    torch.testing.assert_close(found, torch.linalg.solve(a, b), atol=1e-8, rtol=1e-8)


def test_fisher_product_by_hand():
    # Two actions, logits 0: the Fisher matrix is diag(p) - p p^T = [[1, -1], [-1, 1]] / 4.
    logits = torch.zeros(2, requires_grad=True)
    log_p = logits.log_softmax(0)
    kl = (log_p.detach().exp() * (log_p.detach() - log_p)).sum()
    product = fisher_product(kl, [logits], damping=0.0)
    torch.testing.assert_close(product(torch.tensor([1.0, 0.0])), torch.tensor([0.25, -0.25]))
    torch.testing.assert_close(product(torch.tensor([1.0, 1.0])), torch.zeros(2))
    damped = fisher_product(kl, [logits], damping=0.5)(torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(damped, torch.tensor([0.75, -0.25]))
    assert not damped.requires_grad


def test_fisher_of_a_gaussian_over_two_parameters():
    # KL(N(m, s) || N(m', s')) has the Hessian 1/s^2 in the mean and 2 in log sd, nothing between them.
    mean, log_sd = torch.tensor([3.0], requires_grad=True), torch.tensor([math.log(2.0)], requires_grad=True)
    was = mean.detach(), log_sd.detach()
    kl = log_sd - was[1] + ((2 * was[1]).exp() + (was[0] - mean) ** 2) / (2 * (2 * log_sd).exp()) - 0.5
    product = fisher_product(kl.sum(), [mean, log_sd], damping=0.0)
    with torch.no_grad():  # as within conjugate_gradient
        torch.testing.assert_close(product(torch.tensor([1.0, 1.0])), torch.tensor([0.25, 2.0]))


def test_a_quadratic_worked_by_hand():
    # Gain g.x with g = (2, 8) under 1/2 x^T H x <= 0.05 with H = diag(2, 8). H^-1 g = (1, 1), of curvature 10: the
    # factor is sqrt(0.1 / 10) = 0.1, the gain 1. Along g itself the same KL is reached after sqrt(0.1 / 520) and gains
    # 68 * 0.013868 = 0.943: the natural gradient's step is the better one.
    h, g = torch.tensor([2.0, 8.0]), torch.tensor([2.0, 8.0])
    x = conjugate_gradient(lambda v: h * v, g, 5)
    torch.testing.assert_close(x, torch.ones(2))
    step = step_length(x, h * x, 0.05) * x
    torch.testing.assert_close(step, torch.full((2,), 0.1))
    assert 0.5 * step.dot(h * step).item() == pytest.approx(0.05)
    assert g.dot(step).item() == pytest.approx(1.0)
    plain = step_length(g, h * g, 0.05) * g
    assert g.dot(plain).item() == pytest.approx(0.943, abs=1e-3)


@pytest.mark.parametrize("curvature", [0.0, -1.0])
def test_without_curvature_there_is_no_step(curvature: float):
    assert step_length(torch.ones(1), torch.tensor([curvature]), 0.01).item() == 0.0


def test_line_search_takes_the_longest_step_that_is_good():
    tried = []
    answers = {1.0: (5.0, 0.02), 0.5: (-0.1, 0.005), 0.25: (0.3, 0.01), 0.125: (0.9, 0.001)}

    def measure(fraction: float) -> tuple[float, float]:
        tried.append(fraction)
        return answers[fraction]

    # 1 leaves the region, 1/2 makes it worse, 1/4 is on the bound and better: 1/8 is not tried.
    assert line_search(measure, 0.01, 0.5, 4) == (Trial(0.25, 0.3, 0.01), 3)
    assert tried == [1.0, 0.5, 0.25]
    assert line_search(measure, 0.01, 0.5, 2) == (None, 2)


@pytest.mark.parametrize("bad", [(math.nan, 0.0), (1.0, math.nan), (1.0, math.inf), (0.0, 0.0)])
def test_line_search_refuses(bad: tuple[float, float]):
    assert line_search(lambda fraction: bad, 0.01, 0.5, 3) == (None, 3)
