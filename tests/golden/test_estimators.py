"""Advantage estimators and aggregations against veRL 0.9.1, to 1e-5 (README of the folder of --peer-numbers)."""

import pytest
import torch

from keel.algo import baselines
from keel.algo.masking import Aggregation, loss_denominators, masked_mean
from tests.golden.cases import Case, same

PEER_MODES: dict[Aggregation, str] = {
    "token_mean": "token-mean",
    "sequence_mean_token_mean": "seq-mean-token-mean",
    "sequence_mean_token_sum": "seq-mean-token-sum",
}


def groups(case: Case) -> torch.Tensor:
    return torch.as_tensor(case.arrays["in.group"])


def test_group_estimators(case: Case):
    # Every other file has a row alone in its group.
    inputs = case["in.rewards"], case.mask, groups(case)
    same(baselines.grpo(*inputs, divide_by_sd=True), case["out.grpo"])
    same(baselines.grpo(*inputs, divide_by_sd=False), case["out.grpo_no_std"])
    same(baselines.rloo(*inputs), case["out.rloo"])


def test_reinforce_plus_plus(case: Case):
    rewards, mask = case["in.rewards"], case.mask
    # Outside the mask veRL leaves numbers that nothing may read; Keel leaves 0.
    for actual, name in (
        (baselines.reinforce_plus_plus(rewards, mask, case.number("in.gamma")), "reinforce_plus_plus"),
        (baselines.reinforce_plus_plus_baseline(rewards, mask, groups(case)), "reinforce_plus_plus_baseline"),
    ):
        same(actual, case[f"out.{name}"], mask)
        assert not actual[~mask].any()


def test_remax(case: Case):
    rewards, mask, greedy, gamma = case["in.rewards"], case.mask, case["in.greedy_score"], case.number("in.gamma")
    # veRL's ReMax takes no discount, also where the file has one.
    same(baselines.remax(rewards, mask, greedy, 1.0), case["out.remax"], mask)
    # On purpose: Keel can discount the sampled rewards, as its REINFORCE does; the greedy score stays.
    discount = baselines.reinforce(rewards, mask, 1.0, False) - baselines.reinforce(rewards, mask, gamma, False)
    same(baselines.remax(rewards, mask, greedy, gamma), case["out.remax"] - discount, mask)


@pytest.mark.parametrize("mode", PEER_MODES)
def test_aggregation(case: Case, mode: Aggregation):
    denominators = loss_denominators(case.mask.sum(1), mode, case.mask.shape[1])
    same(masked_mean(case["in.advantages"], case.mask, denominators), case[f"out.agg:{PEER_MODES[mode]}"])


def test_constant_aggregation_is_the_mean_of_sums_over_the_longest_response(case: Case):
    denominators = loss_denominators(case.mask.sum(1), "constant", 100)
    actual = masked_mean(case["in.advantages"], case.mask, denominators)
    same(actual * 100, case["out.agg:seq-mean-token-sum"])
