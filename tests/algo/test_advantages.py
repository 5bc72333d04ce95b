import torch
from hypothesis import given
from hypothesis import strategies as st

from keel.algo.advantages import gae, length_adaptive_lambda
from keel.algo.shaping import monte_carlo_returns

SEEDS = st.integers(0, 2**31)
UNIT = st.floats(0, 1)


def test_by_hand():
    # gamma 0.5, lambda 0.5; deltas from the end: 4 - 1 = 3, 2 + 0.5 * 1 - 2 = 0.5, 0 + 0.5 * 2 - 1 = 0
    # advantages: 3, 0.5 + 0.25 * 3 = 1.25, 0 + 0.25 * 1.25 = 0.3125
    rewards, values = torch.tensor([[0.0, 2.0, 4.0]]), torch.tensor([[1.0, 2.0, 1.0]])
    advantages, returns = gae(rewards, values, torch.ones(1, 3).bool(), 0.5, 0.5)
    assert torch.equal(advantages, torch.tensor([[0.3125, 1.25, 3.0]]))
    assert torch.equal(returns, torch.tensor([[1.3125, 3.25, 4.0]]))


def test_gaps_are_stepped_over_by_hand():
    rewards, values = torch.tensor([[0.0, 7.0, 2.0, 7.0, 4.0, 7.0]]), torch.tensor([[1.0, 7.0, 2.0, 7.0, 1.0, 7.0]])
    mask = torch.tensor([[1, 0, 1, 0, 1, 0]]).bool()
    advantages, returns = gae(rewards, values, mask, 0.5, 0.5)
    assert torch.equal(advantages, torch.tensor([[0.3125, 0, 1.25, 0, 3.0, 0]]))
    assert torch.equal(returns, torch.tensor([[1.3125, 0, 3.25, 0, 4.0, 0]]))


def test_truncated_rows_bootstrap_by_hand():
    # Last delta of row 0: 1 + 0.5 * 8 - 2 = 3; row 1 ended: 1 - 2 = -1.
    rewards, values = torch.tensor([[1.0, 9.0], [1.0, 9.0]]), torch.tensor([[2.0, 9.0], [2.0, 9.0]])
    mask = torch.tensor([[True, False], [True, False]])
    advantages, _ = gae(rewards, values, mask, 0.5, 0.9, torch.tensor([8.0, 0.0]))
    assert torch.equal(advantages, torch.tensor([[3.0, 0.0], [-1.0, 0.0]]))


@given(SEEDS, UNIT)
def test_lambda_1_is_return_minus_value(make_batch, seed, gamma):
    batch = make_batch(seed)
    advantages, returns = gae(batch.rewards, batch.values, batch.mask, gamma, 1.0)
    to_go = monte_carlo_returns(batch.rewards, batch.mask, gamma)
    torch.testing.assert_close(advantages, torch.where(batch.mask, to_go - batch.values, 0.0), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(returns, to_go, atol=1e-5, rtol=1e-5)


@given(SEEDS, UNIT)
def test_lambda_0_is_the_td_error(make_batch, seed, gamma):
    batch = make_batch(seed)
    last = torch.arange(6.0)
    advantages, _ = gae(batch.rewards, batch.values, batch.mask, gamma, 0.0, last)
    for row in range(len(batch.mask)):
        chosen = batch.mask[row]
        rewards, values = batch.rewards[row][chosen], batch.values[row][chosen]
        following = torch.cat([values, last[row : row + 1]])[1:] if len(values) else values
        torch.testing.assert_close(advantages[row][chosen], rewards + gamma * following - values)


@given(SEEDS, UNIT, UNIT)
def test_equals_the_sum_of_equation_16(make_batch, seed, gamma, lam):
    batch = make_batch(seed)
    advantages, _ = gae(batch.rewards, batch.values, batch.mask, gamma, lam)
    values = batch.values[0][batch.mask[0]].tolist()
    rewards = batch.rewards[0][batch.mask[0]].tolist()
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, [*values[1:], 0.0], values, strict=True)]
    expected = [sum((gamma * lam) ** k * d for k, d in enumerate(deltas[t:])) for t in range(len(deltas))]
    torch.testing.assert_close(advantages[0][batch.mask[0]], torch.tensor(expected), atol=1e-5, rtol=1e-5)


@given(SEEDS)
def test_one_advantage_a_trainable_token_whatever_the_padding_and_the_order(make_batch, spoil, seed):
    batch = make_batch(seed)
    advantages, returns = gae(batch.rewards, batch.values, batch.mask, 0.99, 0.95)
    assert torch.equal(advantages != 0, batch.mask)
    dirty = gae(spoil(batch.rewards, batch.mask), spoil(batch.values, batch.mask), batch.mask, 0.99, 0.95)
    assert torch.equal(advantages, dirty[0]) and torch.equal(returns, dirty[1])
    order = torch.randperm(len(batch.mask), generator=torch.Generator().manual_seed(seed))
    moved = gae(batch.rewards[order], batch.values[order], batch.mask[order], 0.99, 0.95)
    assert torch.equal(advantages[order], moved[0]) and torch.equal(returns[order], moved[1])


def test_a_perfect_critic_has_no_advantage(make_batch):
    batch = make_batch(5)
    values = monte_carlo_returns(batch.rewards, batch.mask, 0.9)
    advantages, _ = gae(batch.rewards, values, batch.mask, 0.9, 0.95)
    torch.testing.assert_close(advantages, torch.zeros_like(advantages), atol=1e-6, rtol=0)


def test_results_carry_no_gradient(make_batch):
    batch = make_batch(5)
    advantages, returns = gae(batch.rewards, batch.values.requires_grad_(), batch.mask, 0.9, 0.95)
    assert not advantages.requires_grad and not returns.requires_grad


@given(SEEDS, UNIT)
def test_one_lambda_a_row_is_each_row_by_itself(make_batch, seed, gamma):
    batch = make_batch(seed)
    lams = torch.linspace(0, 1, 6)
    whole = gae(batch.rewards, batch.values, batch.mask, gamma, lams, batch.scores)
    for b, lam in enumerate(lams.tolist()):
        row = slice(b, b + 1)
        alone = gae(batch.rewards[row], batch.values[row], batch.mask[row], gamma, lam, batch.scores[row])
        torch.testing.assert_close((whole[0][row], whole[1][row]), alone, atol=1e-6, rtol=1e-5)


def test_another_lambda_for_the_critic_is_a_second_call_by_hand():
    # As in test_by_hand; with lambda 1 the targets are the rewards to go: 4, 2 + 0.5 * 4, 0.5 * 4.
    rewards, values, mask = torch.tensor([[0.0, 2.0, 4.0]]), torch.tensor([[1.0, 2.0, 1.0]]), torch.ones(1, 3).bool()
    advantages, _ = gae(rewards, values, mask, 0.5, 0.5)
    _, targets = gae(rewards, values, mask, 0.5, 1.0)
    assert torch.equal(advantages, torch.tensor([[0.3125, 1.25, 3.0]]))
    assert torch.equal(targets, torch.tensor([[2.0, 4.0, 4.0]]))


def test_length_adaptive_lambda_by_hand():
    # alpha 0.05: the horizon 1 / (1 - lambda) is 0.05 * length; 20 tokens and fewer have none.
    lam = length_adaptive_lambda(torch.tensor([0, 1, 20, 40, 200, 2000]), 0.05)
    torch.testing.assert_close(lam, torch.tensor([0, 0, 0, 0.5, 0.9, 0.99]))
    assert lam.dtype == torch.float32
