import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keel.algo.kl import ESTIMATORS, adapt_penalty, adaptive_coefficient, k1, k2, k3, kl_loss
from keel.algo.policy_loss import policy_gradient

# A vocabulary of four, to be enumerated: the policy now, the one that sampled, the reference.
LOGITS = torch.tensor([0.2, -0.4, 1.1, 0.0])
OLD = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
REF = torch.tensor([0.02, 0.08, 0.2, 0.7]).log()


def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL of two log-probability vectors."""
    return (p.exp() * (p - q)).sum()


def gradient(loss_of_logprobs) -> torch.Tensor:
    """Gradient of a function of the policy's log-probabilities with respect to its logits."""
    logits = LOGITS.clone().requires_grad_()
    return torch.autograd.grad(loss_of_logprobs(logits.log_softmax(0)), logits)[0]


POLICY = LOGITS.log_softmax(0)
KL_GRADIENT = gradient(lambda p: kl(p, REF))
OTHER_GRADIENT = gradient(lambda p: kl(REF, p))


def test_by_hand():
    policy, ref = torch.tensor([-1.0, -3.0]), torch.tensor([-1.5, -1.0])
    assert torch.equal(k1(policy, ref), torch.tensor([0.5, -2.0]))
    assert torch.equal(k2(policy, ref), torch.tensor([0.125, 2.0]))
    expected = torch.tensor([math.exp(-0.5) - 1 + 0.5, math.exp(2) - 1 - 2])
    torch.testing.assert_close(k3(policy, ref), expected)


def test_k3_is_bounded_on_both_sides():
    log_r = torch.tensor([2.0, 3.0, 1000.0, -15.0, -1000.0]).requires_grad_()  # log of reference over policy
    values = k3(-log_r, torch.zeros(5))
    torch.testing.assert_close(values, torch.tensor([math.exp(2) - 3, 10.0, 10.0, 10.0, 10.0]))
    values.sum().backward()
    assert log_r.grad is not None
    torch.testing.assert_close(log_r.grad, torch.tensor([math.exp(2) - 1, 0, 0, 0, 0]))
    unbounded = k3(-log_r.detach(), torch.zeros(5), bound=math.inf)
    expected = torch.tensor([math.exp(2) - 3, math.exp(3) - 4, math.exp(20) - 21, 14, 19])
    torch.testing.assert_close(unbounded, expected)


@given(st.floats(-1e-3, 1e-3) | st.floats(-200, 200))
def test_k2_and_k3_are_never_negative(log_ratio):
    x = torch.tensor([log_ratio])
    assert k2(x, torch.zeros(1)) >= 0 and k3(x, torch.zeros(1)) >= 0 and k3(x, torch.zeros(1), math.inf) >= 0


def test_k1_and_k3_average_to_the_divergence_and_k2_does_not():
    means = {name: (POLICY.exp() * f(POLICY, REF)).sum() for name, f in ESTIMATORS.items()}
    torch.testing.assert_close(means["k1"], kl(POLICY, REF))
    torch.testing.assert_close(means["k3"], kl(POLICY, REF))
    assert abs(means["k2"] - kl(POLICY, REF)) > 0.01
    near = (LOGITS + 0.01 * torch.tensor([1.0, -1.0, 2.0, 0.0])).log_softmax(0)
    torch.testing.assert_close((POLICY.exp() * k2(POLICY, near)).sum(), kl(POLICY, near), rtol=0.01, atol=1e-6)


def test_which_estimator_as_a_loss_has_which_gradient():
    # Tokens are drawn from the policy as it stands, so the weights of the enumeration are constants.
    weights = POLICY.exp()
    as_loss = {name: gradient(lambda p, f=f: (weights * f(p, REF)).sum()) for name, f in ESTIMATORS.items()}
    torch.testing.assert_close(as_loss["k1"], torch.zeros(4), atol=1e-6, rtol=0)
    torch.testing.assert_close(as_loss["k2"], KL_GRADIENT)
    torch.testing.assert_close(as_loss["k3"], OTHER_GRADIENT)
    assert not torch.allclose(KL_GRADIENT, OTHER_GRADIENT, atol=0.05)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("old", [POLICY, OLD])
def test_kl_loss_has_the_gradient_of_the_divergence_on_and_off_policy(estimator, old):
    # Every token once, weighted by the probability with which the old policy draws it.
    everything = torch.ones(4).bool()

    def loss(p: torch.Tensor) -> torch.Tensor:
        return kl_loss(p, old, REF, everything, 1.0, old.exp(), estimator=estimator)[0]

    torch.testing.assert_close(gradient(loss), KL_GRADIENT)
    expected = (POLICY.exp() * ESTIMATORS[estimator](POLICY, REF)).sum()
    torch.testing.assert_close(loss(POLICY), expected)
    if estimator != "k2":
        torch.testing.assert_close(expected, kl(POLICY, REF))


def test_only_in_the_reward_does_a_token_answer_for_the_states_that_it_leads_to():
    # All responses of two tokens over a vocabulary of two; the second token's distributions hang on the first.
    first, second = torch.tensor([0.3, -0.2]).requires_grad_(), torch.tensor([[1.0, 0.0], [-0.5, 0.7]]).requires_grad_()
    ref_first, ref_second = torch.tensor([0.4, 0.6]).log(), torch.tensor([[0.1, 0.9], [0.5, 0.5]]).log()
    responses = [(a, b) for a in (0, 1) for b in (0, 1)]

    def logprobs(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.stack([one[a], two[a, b]]) for a, b in responses])

    policy, ref = logprobs(first.log_softmax(0), second.log_softmax(1)), logprobs(ref_first, ref_second)
    now, everything = policy.detach(), torch.ones(4, 2).bool()
    chance = now.sum(1, keepdim=True).exp().expand(4, 2)
    exact = (policy.sum(1).exp() * (policy - ref).sum(1)).sum()
    to_go = k1(now, ref).flip(1).cumsum(1).flip(1)
    in_reward, _ = policy_gradient(policy, now, -to_go, everything, 1.0, chance)
    in_loss, _ = kl_loss(policy, now, ref, everything, 1.0, chance, estimator="k1")
    expected, rewarded, lost = (
        torch.autograd.grad(x, (first, second), retain_graph=True) for x in (exact, in_reward, in_loss)
    )
    torch.testing.assert_close(rewarded, expected)
    torch.testing.assert_close(lost[1], expected[1])  # after the last token nothing follows
    of_first_token = torch.autograd.grad(kl(first.log_softmax(0), ref_first), first)[0]
    torch.testing.assert_close(lost[0], of_first_token)
    assert not torch.allclose(lost[0], expected[0], atol=0.01)


def test_kl_loss_by_hand():
    # rho = 2, 1; d = log 4, -log 2. Value 2 log 4 - log 2, gradient rho * d; weights double the first.
    logprobs = torch.tensor([[0.5, 0.25, 0.9]]).log().requires_grad_()
    old, ref = torch.tensor([[0.25, 0.25, 0.9]]).log(), torch.tensor([[0.125, 0.5, 0.9]]).log()
    mask = torch.tensor([[True, True, False]])
    loss, metrics = kl_loss(logprobs, old, ref, mask, 10, estimator="k1")
    loss.backward()
    assert logprobs.grad is not None
    assert loss.item() == pytest.approx(0.3 * math.log(2)) and metrics["kl"].item() == pytest.approx(3 * math.log(2))
    torch.testing.assert_close(logprobs.grad, torch.tensor([[0.4 * math.log(2), -0.1 * math.log(2), 0.0]]))
    weights = torch.tensor([[2.0, 1.0, float("nan")]])
    loss, metrics = kl_loss(logprobs, old, ref, mask, 10, weights, estimator="k1")
    assert loss.item() == pytest.approx(0.7 * math.log(2)) and metrics["kl"].item() == pytest.approx(3 * math.log(2))


@given(st.integers(0, 2**31), st.sampled_from(["k1", "k2", "k3"]))
def test_kl_loss_reads_nothing_outside_the_mask_and_adds_over_parts(make_batch, spoil, seed, estimator):
    batch = make_batch(seed)
    inputs = batch.logprobs, batch.old_logprobs, batch.old_logprobs + batch.kl
    weights = batch.values.abs()

    def run(rows, inputs, weights):
        logprobs, old, ref = (x[rows].clone() for x in inputs)
        logprobs.requires_grad_()
        loss, metrics = kl_loss(logprobs, old, ref, batch.mask[rows], 7, weights[rows], estimator=estimator)
        loss.backward()
        return loss.detach(), logprobs.grad, metrics["kl"]

    whole = run(slice(None), inputs, weights)
    dirty = run(slice(None), [spoil(x, batch.mask) for x in inputs], spoil(weights, batch.mask))
    assert all(torch.equal(a, b) for a, b in zip(whole, dirty, strict=True))
    first, second = run(slice(2), inputs, weights), run(slice(2, None), inputs, weights)
    torch.testing.assert_close(first[0] + second[0], whole[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(torch.cat([first[1], second[1]]), whole[1], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(first[2] + second[2], whole[2], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("shift", [100.0, -100.0])
def test_kl_loss_is_finite_at_the_extremes(estimator, shift):
    logprobs = torch.tensor([[shift, 0.0], [0.0, 0.0]]).requires_grad_()
    mask = torch.tensor([[True, True], [False, False]])
    for old in (torch.zeros(2, 2), logprobs.detach()):
        loss, metrics = kl_loss(logprobs, old, torch.zeros(2, 2), mask, 2, estimator=estimator)
        (slope,) = torch.autograd.grad(loss, logprobs)
        assert loss.isfinite() and slope.isfinite().all() and metrics["kl"].isfinite()
        assert slope[0, 0].sign() == math.copysign(1, shift)


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


def test_penalty_halves_doubles_or_stays():
    # Target 3: the band is 2 to 4.5, its ends included.
    found = [adapt_penalty(1.0, kl, 3.0) for kl in (0.0, 1.9, 2.0, 3.0, 4.5, 4.6, math.inf)]
    assert found == [0.5, 0.5, 1.0, 1.0, 1.0, 2.0, 2.0]
    assert math.isnan(adapt_penalty(1.0, math.nan, 3.0))
