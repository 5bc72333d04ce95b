"""Keel's numbers against those of veRL 0.9.1 and OpenRLHF 0.11.2, to 1e-5 (README of the folder of --peer-numbers)."""

import pytest

from keel.algo.advantages import gae
from keel.algo.kl import adaptive_coefficient, k1
from keel.algo.masking import masked_whiten
from keel.algo.preference import bradley_terry
from keel.algo.shaping import token_rewards
from keel.algo.value_loss import value_loss
from tests.golden.cases import Case, same


def test_gae(case: Case):
    gamma, lam = case.number("in.gamma"), case.number("in.lam")
    advantages, returns = gae(case["in.rewards"], case["in.values"], case.mask, gamma, lam)
    # Outside the mask veRL leaves numbers that nothing may read; Keel leaves 0.
    same(masked_whiten(advantages, case.mask), case["out.gae_whitened"], case.mask)
    same(returns, case["out.gae_returns"], case.mask)
    assert not advantages[~case.mask].any() and not returns[~case.mask].any()


@pytest.mark.parametrize("clipped", [False, True])
def test_value_loss(case: Case, clipped: bool):
    clip = case.number("in.value_clip") if clipped else None
    inputs = case["in.new_values"], case["in.values"], case["in.returns"]
    loss, _ = value_loss(*inputs, case.mask, clip, case.count)
    same(loss, case["out.value_loss_clipped" if clipped else "out.value_loss"])


def test_kl_in_the_reward(case: Case):
    kl = k1(case["in.logprobs"], case["in.ref_logprobs"])
    beta = case.number("in.beta")
    rewards = token_rewards(case["in.score"], kl, beta, case.mask)
    same(rewards, case["out.kl_in_reward"], case.mask)
    # On purpose: OpenRLHF penalises positions outside the mask too, where Keel's rewards are 0.
    same(case["out.kl_in_reward"], -beta * kl, ~case.mask)
    assert not rewards[~case.mask].any()


def test_adaptive_coefficient(case: Case):
    coefficient, trace = 0.2, []
    for kl in case.arrays["in.kl_trace"].tolist():
        coefficient = adaptive_coefficient(coefficient, kl, target=6.0, horizon=10_000, episodes=256)
        trace.append(coefficient)
    assert trace == pytest.approx(case.arrays["out.adaptive_kl"].tolist(), rel=1e-9)


def test_bradley_terry(case: Case):
    chosen, rejected = case["in.score"], case["in.greedy_score"]
    same(bradley_terry(chosen, rejected, len(chosen))[0], case["out.bradley_terry"])
