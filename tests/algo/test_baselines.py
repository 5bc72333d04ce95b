import math

import pytest
import torch

from keel.algo import baselines

# Row scores 6, 2 | 1, 4, 4 | 5 of groups 7, 3 and 5, over gaps and padding that hold other numbers.
REWARDS = torch.tensor(
    [[1.0, 9, 5, 9], [2, 9, 9, 9], [9, 1, 9, 9], [1, 1, 1, 1], [9, 9, 9, 4], [2, 3, 9, 9]],
)
MASK = torch.tensor(
    [[1, 0, 1, 0], [1, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1], [1, 1, 0, 0]],
).bool()
GROUPS = torch.tensor([7, 7, 3, 3, 3, 5])


def on_tokens(*scores: float) -> torch.Tensor:
    return torch.where(MASK, torch.tensor(scores)[:, None], 0.0)


def test_reinforce_by_hand():
    # Rewards to go at gamma 0.5: 1 + 0.5 * 5 and 5; 2; 1; 1.875, 1.75, 1.5, 1; 4; 2 + 0.5 * 3 and 3
    to_go = torch.tensor(
        [[3.5, 0, 5, 0], [2, 0, 0, 0], [0, 1, 0, 0], [1.875, 1.75, 1.5, 1], [0, 0, 0, 4], [3.5, 3, 0, 0]]
    )
    assert torch.equal(baselines.reinforce(REWARDS, MASK, 0.5, False), to_go)
    # Their sum is 28.125, over 11 tokens.
    expected = torch.where(MASK, to_go - 28.125 / 11, 0.0)
    torch.testing.assert_close(baselines.reinforce(REWARDS, MASK, 0.5, True), expected)


def test_reinforce_plus_plus_by_hand():
    # Rewards to go at gamma 1: 4 and 1; 7. Mean 4, deviations 0, -3, 3, unbiased variance 18 / 2.
    rewards, mask = torch.tensor([[3.0, 8, 1], [7, 8, 8]]), torch.tensor([[1, 0, 1], [1, 0, 0]]).bool()
    actual = baselines.reinforce_plus_plus(rewards, mask, 1.0)
    torch.testing.assert_close(actual, torch.tensor([[0.0, 0, -1], [1, 0, 0]]))


def test_reinforce_plus_plus_baseline_by_hand():
    # Scores 4, 1 | 7, 9 less 2.5 and 8: 1.5 (two tokens), -1.5, -1, 1. Mean 0.3, squared deviations of sum
    # 2 * 1.44 + 3.24 + 1.69 + 0.49 = 8.3, unbiased variance 8.3 / 4.
    rewards = torch.tensor([[3.0, 8, 1], [1, 8, 8], [8, 7, 8], [8, 8, 9]])
    mask = torch.tensor([[1, 0, 1], [1, 0, 0], [0, 1, 0], [0, 0, 1]]).bool()
    actual = baselines.reinforce_plus_plus_baseline(rewards, mask, torch.tensor([0, 0, 1, 1]))
    expected = torch.tensor([[1.2, 0, 1.2], [-1.8, 0, 0], [0, -1.3, 0], [0, 0, 0.7]]) / math.sqrt(8.3 / 4)
    torch.testing.assert_close(actual, expected)


def test_rloo_by_hand():
    # 6 - 2, 2 - 6 | 1 - 4, 4 - 2.5, 4 - 2.5 | alone: its score
    actual = baselines.rloo(REWARDS, MASK, GROUPS)
    torch.testing.assert_close(actual, on_tokens(4, -4, -3, 1.5, 1.5, 5))


def test_grpo_by_hand():
    # Means 4 and 3; unbiased variances (4 + 4) / 1 and (4 + 1 + 1) / 2; alone: mean 0 and sd 1
    plain = baselines.grpo(REWARDS, MASK, GROUPS, divide_by_sd=False)
    torch.testing.assert_close(plain, on_tokens(2, -2, -2, 1, 1, 5))
    divided = baselines.grpo(REWARDS, MASK, GROUPS, divide_by_sd=True)
    two, three = math.sqrt(8), math.sqrt(3)
    torch.testing.assert_close(divided, on_tokens(2 / two, -2 / two, -2 / three, 1 / three, 1 / three, 5))


def test_remax_by_hand():
    greedy = torch.tensor([4.0, 3, 0, 1, float("nan"), 5])
    rewards, mask = REWARDS.clone(), MASK.clone()
    mask[4] = False  # a row without tokens, whose greedy score is not read
    actual = baselines.remax(rewards, mask, greedy, 1.0)
    expected = torch.tensor([[2.0, 0, 1, 0], [-1, 0, 0, 0], [0, 1, 0, 0], [3, 2, 1, 0], [0, 0, 0, 0], [0, -2, 0, 0]])
    assert torch.equal(actual, expected)
    # 1 + 0.5 * 5 - 4 and 5 - 4: the baseline is not discounted.
    assert torch.equal(baselines.remax(rewards, mask, greedy, 0.5)[0], torch.tensor([-0.5, 0, 1, 0]))


def test_a_row_without_tokens_is_in_no_mean():
    mask = MASK.clone()
    mask[1] = mask[2] = False
    expected = on_tokens(6, 0, 0, 0, 0, 5)  # row 0 is alone now; rows 3 and 4 have equal scores
    expected[1:3] = 0
    assert torch.equal(baselines.rloo(REWARDS, mask, GROUPS), expected)
    assert torch.equal(baselines.grpo(REWARDS, mask, GROUPS, divide_by_sd=False), expected)
    alone = baselines.grpo(REWARDS, mask, GROUPS, divide_by_sd=True)
    torch.testing.assert_close(alone, expected)


@pytest.mark.parametrize("score", [0.1, -3.3, 1e4, 1e8])
def test_equal_scores_give_exactly_0_even_where_their_mean_is_rounded(score):
    # Seven rows of different lengths: 0.1 + ... + 0.1 is not 7 * 0.1 in floating point.
    mask = torch.arange(7) <= torch.arange(7)[:, None]
    rewards = torch.where(torch.eye(7).bool(), score, 0.0)
    groups = torch.zeros(7, dtype=torch.long)
    zeros = torch.zeros(7, 7)
    assert torch.equal(baselines.rloo(rewards, mask, groups), zeros)
    assert torch.equal(baselines.grpo(rewards, mask, groups, divide_by_sd=True), zeros)
    assert torch.equal(baselines.grpo(rewards, mask, groups, divide_by_sd=False), zeros)
    assert torch.equal(baselines.reinforce_plus_plus_baseline(rewards, mask, groups), zeros)
    assert torch.equal(baselines.reinforce(rewards, mask, 1.0, True), zeros)
    assert torch.equal(baselines.reinforce_plus_plus(rewards, mask, 1.0), zeros)


def test_without_division_grpo_is_rloo_times_others_over_all(make_batch):
    batch = make_batch(4)
    batch.mask[1, 3] = True
    groups = torch.zeros(6, dtype=torch.long)
    rloo = baselines.rloo(batch.rewards, batch.mask, groups)
    torch.testing.assert_close(baselines.grpo(batch.rewards, batch.mask, groups, divide_by_sd=False), rloo * 5 / 6)


def test_equal_group_fraction_by_hand():
    # Groups 7 (differs), 3 (equal), 5 (equal), 1 (a single row, not counted)
    scores = torch.tensor([1.0, 2, 0.1, 0.1, 0.1, -5, -5, 3])
    groups = torch.tensor([7, 7, 3, 3, 3, 5, 5, 1])
    assert baselines.equal_group_fraction(scores, groups).item() == pytest.approx(2 / 3)
    assert baselines.equal_group_fraction(scores[-1:], groups[-1:]) == 0
