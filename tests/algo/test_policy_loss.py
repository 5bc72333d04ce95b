"""Each policy loss on numbers worked by hand; what holds for all of them is in test_loss_properties.py."""

import math

import pytest
import torch

from keel.algo.policy_loss import cispo, gspo, kl_penalised, policy_gradient, ppo_clip

NAN = float("nan")
LOG_2 = math.log(2)

# Four tokens and padding: ratios 2, 2, 1/2, 1/2 with advantages 1, -1, 1, -1; pi_old is 1/8 everywhere.
RATIOS = torch.tensor([[2.0, 2.0, 0.5, 0.5, NAN]])
ADVANTAGES = torch.tensor([[1.0, -1.0, 1.0, -1.0, NAN]])
MASK = torch.tensor([[True] * 4 + [False]])
OLD = torch.full((1, 5), -3 * LOG_2)
K3 = 2 * (1 - LOG_2) + 2 * (LOG_2 - 0.5)  # rho - 1 - log rho, summed


def by_hand(loss_function, expected, gradient, weights=None, **settings):
    """Compares loss and gradient, both before the division by a denominator of 10, and gives the metrics."""
    logprobs = (OLD + RATIOS.log()).requires_grad_()
    loss, metrics = loss_function(logprobs, OLD, ADVANTAGES, MASK, 10, weights, **settings)
    loss.backward()
    assert loss.item() == pytest.approx(expected / 10, abs=1e-7)
    torch.testing.assert_close(logprobs.grad, torch.tensor([[*gradient, 0.0]]) / 10)
    assert not any(x.requires_grad for x in metrics.values())
    assert metrics["approx_kl"].item() == pytest.approx(K3)
    assert metrics["ratio_max"].item() == pytest.approx(2.0)
    assert metrics["log_ratio_abs_max"].item() == pytest.approx(LOG_2)
    return metrics


def test_policy_gradient_by_hand():
    # log pi = -2, -2, -4, -4 times log 2, signs + - + -: the sum is 0. Gradient: -A.
    assert "clip_fraction" not in by_hand(policy_gradient, 0.0, [-1, 1, -1, 1])


def test_ppo_clip_by_hand():
    # min(2, 1.2) + min(-2, -1.2) + min(0.5, 0.8) + min(-0.5, -0.8) = 1.2 - 2 + 0.5 - 0.8
    metrics = by_hand(ppo_clip, 1.1, [0, 2, -0.5, 0], clip_low=0.2, clip_high=0.2)
    assert metrics["clip_fraction"] == 2 and "dual_clip_fraction" not in metrics


def test_each_side_of_the_range_has_its_own_width():
    # Above: 1 + 1.5 > 2, so nothing is clipped; below: 1 - 0.1.
    metrics = by_hand(ppo_clip, -(2 - 2 + 0.5 - 0.9), [-2, 2, -0.5, 0], clip_low=0.1, clip_high=1.5)
    assert metrics["clip_fraction"] == 1
    metrics = by_hand(ppo_clip, -(1.1 - 2 + 0.5 - 0.5), [0, 2, -0.5, 0.5], clip_low=0.9, clip_high=0.1)
    assert metrics["clip_fraction"] == 1


def test_dual_clip_by_hand():
    # Token 2: max(-2, 1.5 * -1) = -1.5, without gradient. Token 1 has a ratio of 2 as well, but a positive advantage.
    settings = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 1.5}
    metrics = by_hand(ppo_clip, -(1.2 - 1.5 + 0.5 - 0.8), [0, 0, -0.5, 0], **settings)
    assert metrics["clip_fraction"] == 2 and metrics["dual_clip_fraction"] == 1
    assert by_hand(ppo_clip, 1.1, [0, 2, -0.5, 0], **settings | {"dual_clip": 2.5})["dual_clip_fraction"] == 0


def test_gspo_by_hand():
    # The geometric mean of the ratios is 1: nothing is clipped, and each token has the gradient of ratio 1.
    metrics = by_hand(gspo, 0.0, [-1, 1, -1, 1], clip_low=0.2, clip_high=0.2)
    assert metrics["clip_fraction"] == 0


@pytest.mark.parametrize(("advantage", "objective", "slope"), [(1.0, 1.25, 0.0), (-1.0, -math.sqrt(2), -math.sqrt(2))])
def test_gspo_clips_whole_responses(advantage, objective, slope):
    # Ratios 4 and 1/2: s = sqrt(2). With A = 1 it is clipped to 1.25, with A = -1 the plain branch is the smaller.
    logprobs = torch.tensor([[math.log(4), -LOG_2]]).requires_grad_()
    inputs = torch.zeros(1, 2), torch.full((1, 2), advantage), torch.ones(1, 2).bool()
    loss, metrics = gspo(logprobs, *inputs, 2, clip_low=0.25, clip_high=0.25)
    loss.backward()
    assert loss.item() == pytest.approx(-objective)
    torch.testing.assert_close(logprobs.grad, torch.full((1, 2), -slope / 2))
    assert metrics["clip_fraction"] == (2 if slope == 0 else 0)
    assert metrics["approx_kl"].item() == pytest.approx(4 - 1 - math.log(4) + 0.5 - 1 + LOG_2)


def test_cispo_by_hand():
    # Weights 1.2, 1.2, 0.5, 0.5 (no lower bound); log pi = -2, -2, -4, -4 times log 2. No token loses its gradient.
    metrics = by_hand(cispo, 0.0, [-1.2, 1.2, -0.5, 0.5], clip_low=1.0, clip_high=0.2)
    assert metrics["clip_fraction"] == 2
    metrics = by_hand(cispo, 0.0, [-1.2, 1.2, -0.8, 0.8], clip_low=0.2, clip_high=0.2)
    assert metrics["clip_fraction"] == 4


def test_kl_penalised_by_hand():
    # rho * A sums to 0. Gradient 3 (rho - 1) - rho * A: 3 - 2, 3 + 2, -1.5 - 0.5, -1.5 + 0.5
    by_hand(kl_penalised, 3 * K3, [1, 5, -2, -1], beta=3.0)
    by_hand(kl_penalised, 0.0, [-2, 2, -0.5, 0.5], beta=0.0)


def test_weights_multiply_the_loss_of_a_token_but_no_metric():
    weights = torch.tensor([[1.0, 2.0, 0.0, 0.5, NAN]])
    metrics = by_hand(ppo_clip, -(1.2 - 4 + 0 - 0.4), [0, 4, 0, 0], weights, clip_low=0.2, clip_high=0.2)
    assert metrics["clip_fraction"] == 2
    k3 = (1 - LOG_2) + 2 * (1 - LOG_2) + 0.5 * (LOG_2 - 0.5)
    by_hand(kl_penalised, 3 * k3 - (2 - 4 - 0.25), [1, 10, 0, -0.5], weights, beta=3.0)


def test_the_sampled_kl_of_the_penalty_has_the_gradient_of_the_exact_one():
    # Enumerated: every token of the vocabulary once, weighted by pi_old.
    old = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    logits = torch.tensor([0.2, -0.4, 0.7, 0.0], requires_grad=True)
    inputs = old, torch.zeros(4), torch.ones(4).bool(), 1.0, old.exp()
    loss, _ = kl_penalised(logits.log_softmax(0), *inputs, beta=1.0)
    exact = (old.exp() * (old - logits.log_softmax(0))).sum()
    torch.testing.assert_close(loss, exact)
    torch.testing.assert_close(*(torch.autograd.grad(x, logits) for x in (loss, exact)))


def test_a_bad_number_on_a_real_token_is_not_hidden():
    logprobs = torch.tensor([[NAN, 0.0]])
    inputs = torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2).bool(), 2
    assert policy_gradient(logprobs, *inputs)[0].isnan()
    for function in (ppo_clip, gspo, cispo):
        assert function(logprobs, *inputs, clip_low=0.2, clip_high=0.2)[0].isnan()
    assert kl_penalised(logprobs, *inputs, beta=1.0)[0].isnan()
