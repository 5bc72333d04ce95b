"""What holds for every policy loss, on random batches."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from keel.algo.policy_loss import cispo, gspo, kl_penalised, policy_gradient, ppo_clip

Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]
LOSSES: dict[str, Loss] = {
    "policy_gradient": policy_gradient,
    "ppo_clip": partial(ppo_clip, clip_low=0.2, clip_high=0.28),
    "dual_clip": partial(ppo_clip, clip_low=0.2, clip_high=0.2, dual_clip=1.5),
    "gspo": partial(gspo, clip_low=0.02, clip_high=0.03),
    "cispo": partial(cispo, clip_low=1.0, clip_high=0.2),
    "kl_penalised": partial(kl_penalised, beta=0.7),
}
UNCLIPPED: dict[str, Loss] = {
    "ppo_clip": partial(ppo_clip, clip_low=math.inf, clip_high=math.inf),
    "gspo": partial(gspo, clip_low=math.inf, clip_high=math.inf),
    "cispo": partial(cispo, clip_low=math.inf, clip_high=math.inf),
    "kl_penalised": partial(kl_penalised, beta=0.0),
}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
SEEDS = st.integers(0, 2**31)
few = settings(max_examples=20)


class Result(NamedTuple):
    loss: Tensor
    gradient: Tensor
    metrics: dict[str, Tensor]


def run(loss: Loss, inputs: list[Tensor], mask: Tensor, denominator: Any, weights: Tensor | None = None) -> Result:
    """inputs: log-probabilities, old log-probabilities, advantages."""
    logprobs = inputs[0].clone().requires_grad_()
    value, metrics = loss(logprobs, *inputs[1:], mask, denominator, weights)
    value.backward()
    assert logprobs.grad is not None
    return Result(value.detach(), logprobs.grad, metrics)


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)


@every_loss
@few
@given(seed=SEEDS)
def test_at_ratio_1_the_gradient_is_the_policy_gradient(make_batch, loss, seed):
    batch = make_batch(seed)
    result = run(loss, [batch.old_logprobs, batch.old_logprobs, batch.advantages], batch.mask, 7)
    close(result.gradient, torch.where(batch.mask, -batch.advantages / 7, 0.0))
    assert result.metrics.pop("ratio_max") == 1
    assert not any(result.metrics.values())


@pytest.mark.parametrize("loss", UNCLIPPED.values(), ids=UNCLIPPED.keys())
@few
@given(seed=SEEDS)
def test_a_clip_at_infinity_gives_importance_weighting(make_batch, loss, seed):
    batch = make_batch(seed)
    result = run(loss, [batch.logprobs, batch.old_logprobs, batch.advantages], batch.mask, 7)
    log_ratio = torch.where(batch.mask, batch.logprobs - batch.old_logprobs, 0.0)
    if loss is UNCLIPPED["gspo"]:
        log_ratio = (log_ratio.sum(1) / batch.mask.sum(1).clamp(min=1))[:, None]
    close(result.gradient, torch.where(batch.mask, -log_ratio.exp() * batch.advantages / 7, 0.0))
    assert not result.metrics.get("clip_fraction", torch.zeros(()))


@every_loss
@few
@given(seed=SEEDS, weighted=st.booleans())
def test_padding_order_and_split_change_nothing(make_batch, spoil, loss, seed, weighted):
    batch = make_batch(seed)
    inputs, mask, count = [batch.logprobs, batch.old_logprobs, batch.advantages], batch.mask, batch.mask.sum()
    weights = batch.values.abs() if weighted else None
    whole = run(loss, inputs, mask, count, weights)

    def weights_of(change: Callable[[Tensor], Tensor]) -> Tensor | None:
        return None if weights is None else change(weights)

    # Content of the padding.
    dirty = run(loss, [spoil(x, mask) for x in inputs], mask, count, weights_of(lambda w: spoil(w, mask)))
    assert torch.equal(dirty.loss, whole.loss) and torch.equal(dirty.gradient, whole.gradient)
    assert dirty.metrics == whole.metrics

    # Side of the padding: all tokens of a row to its right end.
    places = mask.int().argsort(dim=1, stable=True)
    left = run(
        loss,
        [x.gather(1, places) for x in inputs],
        mask.gather(1, places),
        count,
        weights_of(lambda w: w.gather(1, places)),
    )
    close(left.loss, whole.loss)
    close(left.gradient, whole.gradient.gather(1, places))
    close(left.metrics, whole.metrics)

    # Order of the rows.
    order = torch.randperm(len(mask), generator=torch.Generator().manual_seed(seed))
    moved = run(loss, [x[order] for x in inputs], mask[order], count, weights_of(lambda w: w[order]))
    close(moved.loss, whole.loss)
    close(moved.gradient, whole.gradient[order])
    close(moved.metrics, whole.metrics)

    # Split into micro-batches.
    parts = [
        run(loss, [x[rows] for x in inputs], mask[rows], count, weights_of(lambda w, rows=rows: w[rows]))
        for rows in (slice(0, 1), slice(1, 2), slice(2, None))
    ]
    close(sum(part.loss for part in parts), whole.loss)
    close(torch.cat([part.gradient for part in parts]), whole.gradient)
    for name, value in whole.metrics.items():
        values = torch.stack([part.metrics[name] for part in parts])
        close(values.max() if name.endswith("_max") else values.sum(), value)


@every_loss
@few
@given(seed=SEEDS)
def test_the_loss_is_minus_the_weighted_mean_of_the_tokens_own_objectives(make_batch, loss, seed):
    batch = make_batch(seed)
    inputs, mask, weights = [batch.logprobs, batch.old_logprobs, batch.advantages], batch.mask, batch.values.abs()
    # Weight 1 on one column and 0 on the others takes the objectives apart.
    columns = torch.eye(mask.shape[1])
    apart = [run(loss, inputs, mask, 1, column.expand(mask.shape)) for column in columns]
    rows = [run(loss, [x[b : b + 1] for x in inputs], mask[b : b + 1], 1, weights[b : b + 1]) for b in range(len(mask))]
    whole = run(loss, inputs, mask, 7, weights)
    close(sum(row.loss for row in rows) / 7, whole.loss)
    close(sum(part.gradient for part in apart) * weights / 7, whole.gradient)
    assert all(part.metrics == whole.metrics for part in apart)


@every_loss
@pytest.mark.parametrize("shift", [100.0, -100.0])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_extreme_log_ratios_stay_finite(loss, shift, sign):
    # Row 0 has a broken token, row 1 nothing at all, row 2 is sound.
    logprobs = torch.tensor([[shift, 0.0], [shift, shift], [0.0, 0.0]])
    mask = torch.tensor([[True, True], [False, False], [True, False]])
    result = run(loss, [logprobs, torch.zeros(3, 2), torch.full((3, 2), sign)], mask, 3)
    assert result.loss.isfinite() and result.gradient.isfinite().all()
    assert result.gradient[2, 0] == -sign / 3 and not result.gradient[1].any() and result.gradient[2, 1] == 0
    assert all(x.isfinite() for x in result.metrics.values()) and result.metrics["log_ratio_abs_max"] == 100
    assert result.metrics["ratio_max"].item() == pytest.approx(math.exp(20) if shift > 0 else 1, rel=1e-5)


@pytest.mark.parametrize("loss", [LOSSES["ppo_clip"], LOSSES["dual_clip"], LOSSES["kl_penalised"]])
@pytest.mark.parametrize("shift", [math.inf, -math.inf])
def test_a_token_that_became_impossible_has_no_gradient_where_the_ratio_decides(loss, shift):
    inputs = [torch.tensor([[shift, 0.0]]), torch.zeros(1, 2), torch.ones(1, 2)]
    result = run(loss, inputs, torch.ones(1, 2).bool(), 2)
    assert result.loss.isfinite() and result.gradient.tolist() == [[0.0, -0.5]]


@every_loss
def test_one_token_and_no_token(loss):
    inputs = [torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), torch.tensor([[2.0]])]
    result = run(loss, inputs, torch.tensor([[True]]), 1)
    assert result.loss.isfinite() and result.gradient.isfinite().all()
    nothing = run(loss, inputs, torch.tensor([[False]]), 1)
    assert nothing.loss == 0 and not nothing.gradient.any() and nothing.metrics["ratio_max"] == 1
