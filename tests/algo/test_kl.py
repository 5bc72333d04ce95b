import math

import pytest
import torch

from keel.algo.kl import adaptive_coefficient, k1


def test_k1_by_hand():
    assert torch.equal(k1(torch.tensor([-1.0, -3.0]), torch.tensor([-1.5, -1.0])), torch.tensor([0.5, -2.0]))


def test_k1_averages_to_the_exact_divergence():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    exact = torch.distributions.kl_divergence(torch.distributions.Categorical(p), torch.distributions.Categorical(q))
    torch.testing.assert_close((p * k1(p.log(), q.log())).sum(), exact)


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        (6.0, 0.1),  # on target: no change
        (6.6, 0.1 * (1 + 0.1 * 0.0256)),  # 10 % over
        (5.4, 0.1 * (1 - 0.1 * 0.0256)),
        (60.0, 0.1 * (1 + 0.2 * 0.0256)),  # clipped
        (-3.0, 0.1 * (1 - 0.2 * 0.0256)),
        (math.inf, 0.1 * (1 + 0.2 * 0.0256)),
    ],
)
def test_controller_by_hand(observed, expected):
    assert adaptive_coefficient(0.1, observed, target=6.0, horizon=10_000, episodes=256) == pytest.approx(expected)


def test_controller_shows_a_kl_that_is_no_number():
    assert math.isnan(adaptive_coefficient(0.1, math.nan, 6.0, 10_000, 256))


def test_controller_settles_on_its_target():
    # A policy whose KL falls with the coefficient: kl = 1 / beta.
    beta = 1.0
    for _ in range(2000):
        beta = adaptive_coefficient(beta, 1 / beta, target=5.0, horizon=1000, episodes=100)
    assert 1 / beta == pytest.approx(5.0, rel=1e-3)
