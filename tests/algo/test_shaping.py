import torch
from hypothesis import given
from hypothesis import strategies as st

from keel.algo.shaping import monte_carlo_returns, penalise_unfinished, token_rewards

MASK = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]]).bool()


def test_score_lands_on_the_last_real_token_by_hand():
    scores = torch.tensor([10.0, 20.0, 30.0, 40.0])
    kl = torch.full((4, 4), float("nan")).masked_fill(MASK, 2.0)
    expected = torch.tensor([[-1.0, 9, 0, 0], [-1, 0, 19, 0], [0, 0, 0, 0], [-1, -1, -1, 39]])
    assert torch.equal(token_rewards(scores, kl, 0.5, MASK), expected)


@given(st.integers(0, 2**31), st.floats(0, 1))
def test_rewards_sum_to_the_score_less_the_kl(make_batch, spoil, seed, coefficient):
    batch = make_batch(seed)
    rewards = token_rewards(batch.scores, spoil(batch.kl, batch.mask), coefficient, batch.mask)
    expected = batch.scores - coefficient * torch.where(batch.mask, batch.kl, 0.0).sum(1)
    torch.testing.assert_close(rewards.sum(1), torch.where(batch.mask.any(1), expected, 0.0))
    assert not rewards[~batch.mask].any()


def test_returns_by_hand():
    rewards = torch.tensor([[1.0, 2, 9, 9], [1, 9, 4, 9], [9, 9, 9, 9], [1, 1, 1, 8]])
    expected = torch.tensor([[2.0, 2, 0, 0], [3, 0, 4, 0], [0, 0, 0, 0], [2.75, 3.5, 5, 8]])
    assert torch.equal(monte_carlo_returns(rewards, MASK, 0.5), expected)


def test_undiscounted_return_of_the_first_token_is_the_sum(make_batch):
    batch = make_batch(1)
    returns = monte_carlo_returns(batch.rewards, batch.mask, 1.0)
    torch.testing.assert_close(returns[0, 0], batch.rewards[0][batch.mask[0]].sum())


def test_unfinished_pay_the_penalty():
    scores = penalise_unfinished(torch.tensor([1.0, 2.0, -1.0]), torch.tensor([True, False, False]), 1.5)
    assert torch.equal(scores, torch.tensor([1.0, 0.5, -2.5]))
