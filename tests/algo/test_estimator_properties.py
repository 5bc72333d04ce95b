"""What every advantage estimator keeps, whatever its formula."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from keel.algo import baselines
from keel.algo.advantages import gae, length_adaptive_lambda
from keel.algo.shaping import monte_carlo_returns

SEEDS = st.integers(0, 2**31)
GAMMA = 0.9
ESTIMATORS: dict[str, Callable[[SimpleNamespace], Tensor]] = {
    "gae": lambda r: gae(r.rewards, r.values, r.mask, GAMMA, 0.95)[0],
    "gae, lambda by length": lambda r: gae(
        r.rewards, r.values, r.mask, GAMMA, length_adaptive_lambda(r.mask.sum(1), 0.5)
    )[0],
    "reinforce": lambda r: baselines.reinforce(r.rewards, r.mask, GAMMA, False),
    "reinforce, baseline": lambda r: baselines.reinforce(r.rewards, r.mask, GAMMA, True),
    "reinforce_plus_plus": lambda r: baselines.reinforce_plus_plus(r.rewards, r.mask, GAMMA),
    "reinforce_plus_plus_baseline": lambda r: baselines.reinforce_plus_plus_baseline(r.rewards, r.mask, r.groups),
    "rloo": lambda r: baselines.rloo(r.rewards, r.mask, r.groups),
    "grpo": lambda r: baselines.grpo(r.rewards, r.mask, r.groups, divide_by_sd=True),
    "dr_grpo": lambda r: baselines.grpo(r.rewards, r.mask, r.groups, divide_by_sd=False),
    "remax": lambda r: baselines.remax(r.rewards, r.mask, r.scores, GAMMA),
}
WHITENED = ["reinforce_plus_plus", "reinforce_plus_plus_baseline"]
every_estimator = pytest.mark.parametrize("estimator", ESTIMATORS.values(), ids=ESTIMATORS.keys())


@pytest.fixture(scope="session")
def make_rows(make_batch):
    """For a seed: six rows of up to nine tokens with gaps, one of them empty, in two groups."""
    return lambda seed: SimpleNamespace(**vars(make_batch(seed)), groups=torch.tensor([4, 9, 9, 4, 9, 4]))


def changed(rows: SimpleNamespace, change: Callable[[Tensor], Tensor], names: str) -> SimpleNamespace:
    return SimpleNamespace(**vars(rows) | {name: change(getattr(rows, name)) for name in names.split()})


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5)


@every_estimator
@settings(max_examples=20)
@given(seed=SEEDS)
def test_one_advantage_a_trainable_token_whatever_stands_elsewhere(make_rows, spoil, estimator, seed):
    rows = make_rows(seed)
    advantages = estimator(rows)
    assert torch.equal(advantages != 0, rows.mask)
    assert advantages.dtype == torch.float32
    spoiled = changed(rows, lambda x: spoil(x, rows.mask), "rewards values")
    spoiled.scores[1] = float("nan")  # of the row without tokens
    assert torch.equal(estimator(spoiled), advantages)


@every_estimator
@settings(max_examples=20)
@given(seed=SEEDS)
def test_order_of_rows_changes_nothing(make_rows, estimator, seed):
    rows = make_rows(seed)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    moved = changed(rows, lambda x: x[order], "rewards values mask scores groups")
    close(estimator(moved), estimator(rows)[order])


@every_estimator
@settings(max_examples=20)
@given(seed=SEEDS)
def test_side_of_the_padding_and_gaps_change_nothing(make_rows, estimator, seed):
    rows = make_rows(seed)
    expected = estimator(rows)[rows.mask]
    # A stable sort of the mask moves tokens to one side and keeps their order.
    to_left = rows.mask.int().argsort(dim=1, descending=True, stable=True)
    to_right = rows.mask.int().argsort(dim=1, stable=True)

    def more_gaps(x: Tensor) -> Tensor:
        wide = torch.full((6, 21), 0 if x.dtype == torch.bool else 1e6).to(x.dtype)
        wide[:, 3::2] = x
        return wide

    for move in (lambda x: x.gather(1, to_left), lambda x: x.gather(1, to_right), more_gaps):
        moved = changed(rows, move, "rewards values mask")
        close(estimator(moved)[moved.mask], expected)


@every_estimator
@settings(max_examples=20)
@given(seed=SEEDS)
def test_a_row_without_tokens_changes_nothing(make_rows, estimator, seed):
    rows = make_rows(seed)
    kept = changed(rows, lambda x: x[[0, 2, 3, 4, 5]], "rewards values mask scores groups")
    close(estimator(rows)[[0, 2, 3, 4, 5]], estimator(kept))


@every_estimator
@pytest.mark.parametrize("reward", [0.0, 5.0, -1e4])
@pytest.mark.parametrize("lengths", [[1], [0], [3, 0], [1, 1, 1], [4, 4]], ids=str)
def test_small_and_equal_batches_are_finite_and_free_of_gradient(estimator, lengths, reward):
    mask = torch.arange(4) < torch.tensor(lengths)[:, None]
    rewards = torch.full(mask.shape, reward, requires_grad=True)
    rows = SimpleNamespace(
        mask=mask,
        rewards=rewards,
        values=torch.ones(mask.shape, requires_grad=True),
        scores=torch.ones(len(lengths)),
        groups=torch.zeros(len(lengths), dtype=torch.long),
    )
    advantages = estimator(rows)
    assert advantages.isfinite().all() and not advantages.requires_grad
    assert not advantages[~mask].any()


@pytest.mark.parametrize("name", WHITENED)
@given(seed=SEEDS)
def test_whitened_has_mean_0_and_sd_1_over_exactly_the_trainable_tokens(make_rows, name, seed):
    rows = make_rows(seed)
    white = ESTIMATORS[name](rows)[rows.mask]
    assert white.mean().item() == pytest.approx(0, abs=1e-6)
    assert white.std().item() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("offset", [0.0, 1e3])
@pytest.mark.parametrize("name", ["rloo", "grpo", "dr_grpo", "reinforce_plus_plus_baseline"])
def test_an_offset_of_the_scores_changes_nothing_within_groups(make_rows, name, offset):
    rows = changed(make_rows(7), Tensor.double, "rewards")
    at_last = rows.mask & (rows.mask.flip(1).cumsum(1).flip(1) == 1)
    moved = changed(rows, lambda x: torch.where(at_last, x + offset, x), "rewards")
    close(ESTIMATORS[name](moved), ESTIMATORS[name](rows))


@given(SEEDS, st.floats(0, 1))
def test_gae_with_lambda_1_and_no_values_is_reinforce(make_rows, seed, gamma):
    rows = make_rows(seed)
    advantages, _ = gae(rows.rewards, torch.zeros_like(rows.values), rows.mask, gamma, 1.0)
    assert torch.equal(advantages, baselines.reinforce(rows.rewards, rows.mask, gamma, False))


@given(SEEDS)
def test_gamma_0_sees_only_the_next_reward(make_rows, seed):
    rows = make_rows(seed)
    only_next = torch.where(rows.mask, rows.rewards, 0.0)
    assert torch.equal(baselines.reinforce(rows.rewards, rows.mask, 0.0, False), only_next)
    advantages, _ = gae(rows.rewards, rows.values, rows.mask, 0.0, 0.95)
    close(advantages, torch.where(rows.mask, rows.rewards - rows.values, 0.0))


@given(SEEDS)
def test_gamma_1_with_a_reward_at_the_end_is_the_score_on_every_token(make_rows, seed):
    rows = make_rows(seed)
    at_last = rows.mask & (rows.mask.flip(1).cumsum(1).flip(1) == 1)
    rewards = torch.where(at_last, rows.scores[:, None], 0.0)
    everywhere = torch.where(rows.mask, rows.scores[:, None], 0.0)
    assert torch.equal(monte_carlo_returns(rewards, rows.mask, 1.0), everywhere)
    assert not baselines.remax(rewards, rows.mask, rows.scores, 1.0).any()
