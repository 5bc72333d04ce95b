"""Distributions, networks and normalisation by themselves."""

import math

import numpy as np
import pytest
import torch
from torch import distributions

from keel.algo.moments import Moments, merge, of
from keel.classic.distributions import Categorical, Gaussian
from keel.classic.networks import ActorCritic
from keel.classic.normalise import ObservationNormaliser, discounted_sums, scale_rewards


def test_categorical_by_hand():
    # Probabilities 1/4 and 3/4 against 1/2 and 1/2.
    policy, other = Categorical(torch.tensor([[0.0, math.log(3.0)]])), Categorical(torch.zeros(1, 2))
    assert policy.logprobs(torch.tensor([1])).item() == pytest.approx(math.log(0.75))
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert policy.entropy().item() == pytest.approx(entropy)
    assert policy.kl(other).item() == pytest.approx(math.log(2.0) - entropy)


def test_gaussian_by_hand():
    # Mean 1 and sd 2 at 3: z = 1. Against mean 0, sd 1: log(1/2) + (4 + 1) / 2 - 1/2.
    policy = Gaussian(torch.tensor([[1.0]]), torch.tensor([math.log(2.0)]))
    other = Gaussian(torch.tensor([[0.0]]), torch.tensor([0.0]))
    assert policy.logprobs(torch.tensor([[3.0]])).item() == pytest.approx(-0.5 - math.log(2 * math.sqrt(2 * math.pi)))
    assert policy.entropy().item() == pytest.approx(math.log(2 * math.sqrt(2 * math.pi * math.e)))
    assert policy.kl(other).item() == pytest.approx(2.0 - math.log(2.0))


def test_both_agree_with_torch():
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    logits, others, actions = normal(6, 3), normal(6, 3), torch.tensor([0, 1, 2, 2, 1, 0])
    ours, theirs = Categorical(logits), distributions.Categorical(logits=logits)
    torch.testing.assert_close(ours.logprobs(actions), theirs.log_prob(actions))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    kl = distributions.kl_divergence(theirs, distributions.Categorical(logits=others))
    torch.testing.assert_close(ours.kl(Categorical(others)), kl)

    means, log_sd, moves = normal(6, 3), normal(3), normal(6, 3)
    ours, theirs = Gaussian(means, log_sd), distributions.Normal(means, log_sd.exp())
    torch.testing.assert_close(ours.logprobs(moves), theirs.log_prob(moves).sum(1))
    torch.testing.assert_close(ours.entropy(), theirs.entropy().sum(1))
    kl = distributions.kl_divergence(theirs, distributions.Normal(means + 1, (log_sd + 1).exp())).sum(1)
    torch.testing.assert_close(ours.kl(Gaussian(means + 1, log_sd + 1)), kl)


def test_frozen_does_not_follow_the_weights():
    log_sd = torch.nn.Parameter(torch.zeros(1))
    frozen = Gaussian(torch.zeros(1, 1), log_sd).frozen()
    with torch.no_grad():
        log_sd.add_(1.0)
    assert frozen.log_sd_A.tolist() == [0.0]


def test_weights_are_orthogonal_with_the_published_gains():
    network = ActorCritic(4, "continuous", 2, [8, 8], "separate", torch.Generator().manual_seed(0))
    assert network.value_trunk is not None and network.value_head is not None and network.log_sd_A is not None
    for layer, gain in ((network.policy_trunk[2], 2.0), (network.value_trunk[2], 2.0), (network.policy_head, 1e-4)):
        assert isinstance(layer, torch.nn.Linear)
        weight = layer.weight.detach()
        torch.testing.assert_close(weight @ weight.T, gain * torch.eye(len(weight)), atol=1e-5, rtol=1e-5)
        assert not layer.bias.any()
    assert network.value_head.weight.norm().item() == pytest.approx(1.0)
    assert network.log_sd_A.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_both_is_policy_and_values(critic):
    network = ActorCritic(4, "discrete", 3, [8], critic, torch.Generator().manual_seed(0))
    seen = torch.randn(5, 4)
    policy, values = network.both(seen)
    torch.testing.assert_close(policy[0], network.policy(seen)[0])
    torch.testing.assert_close(values, network.values(seen))
    common = {id(p) for p in network.policy_parameters()} & {id(p) for p in network.value_parameters()}
    assert len(common) == (2 if critic == "shared" else 0)


def test_observation_moments_are_exact_over_rollouts():
    random = np.random.default_rng(0)
    parts = [random.normal(3.0, 2.0, size=(n, 3)) * [1.0, 1e3, 1e-3] for n in (1, 7, 500)]
    normaliser = ObservationNormaliser([Moments()] * 3)
    for part in parts:
        normaliser = normaliser.seen(part)
    seen = np.concatenate(parts)
    np.testing.assert_allclose([m.mean for m in normaliser.moments_O], seen.mean(0), rtol=1e-12)
    np.testing.assert_allclose([m.variance for m in normaliser.moments_O], seen.var(0), rtol=1e-12)
    scaled = normaliser(seen)
    assert scaled.dtype == np.float32
    np.testing.assert_allclose(scaled[:, :2].mean(0), 0.0, atol=1e-5)
    np.testing.assert_allclose(scaled[:, :2].std(0), 1.0, atol=1e-5)
    assert normaliser(np.array([[1e9, 0.0, -1e9]])).tolist()[0][::2] == [10.0, -10.0]


def test_a_normaliser_that_has_seen_nothing_changes_nothing():
    seen = np.array([[0.5, -3.0]])
    np.testing.assert_allclose(ObservationNormaliser([Moments()] * 2)(seen), seen, rtol=1e-6)


def test_discounted_sums_by_hand():
    # Environment 0 ends after its second step; environment 1 goes on from 8.
    rewards, ended = np.array([[1.0, 0.0], [2.0, 0.0], [4.0, 1.0]]), np.array([[0, 0], [1, 0], [0, 0]], bool)
    sums, after = discounted_sums(rewards, ended, 0.5, np.array([0.0, 8.0]))
    assert sums.tolist() == [[1.0, 4.0], [2.5, 2.0], [4.0, 2.0]]
    assert after.tolist() == [4.0, 2.0]


def test_discounted_sums_do_not_depend_on_where_rollouts_are_cut():
    random = np.random.default_rng(1)
    rewards, ended = random.normal(size=(20, 2)), random.random((20, 2)) < 0.2
    whole, last = discounted_sums(rewards, ended, 0.9, np.zeros(2))
    first, carried = discounted_sums(rewards[:7], ended[:7], 0.9, np.zeros(2))
    second, end = discounted_sums(rewards[7:], ended[7:], 0.9, carried)
    np.testing.assert_array_equal(np.concatenate([first, second]), whole)
    np.testing.assert_array_equal(end, last)
    merged = merge(of(torch.from_numpy(first)), of(torch.from_numpy(second)))
    assert merged.variance == pytest.approx(whole.var(), rel=1e-12)


def test_rewards_are_scaled_about_zero():
    moments = Moments(4, 100.0, 16.0)  # variance 4
    np.testing.assert_allclose(scale_rewards(np.array([1.0, -3.0, 500.0]), moments), [0.5, -1.5, 10.0], rtol=1e-6)
