import math

import pytest
import torch

from keel.algo.importance import truncated_importance, weighted_mean


def test_truncated_importance_by_hand():
    old = torch.tensor([[0.5, 0.5, 0.1, float("nan")]]).log()
    sampler = torch.tensor([[0.25, 0.1, 0.2, 0.3]]).log()
    mask = torch.tensor([[True, True, True, False]])
    weights = truncated_importance(old.requires_grad_(), sampler, mask, 3.0)
    torch.testing.assert_close(weights, torch.tensor([[2.0, 3.0, 0.5, 0.0]]))
    assert not weights.requires_grad


def test_weights_move_an_expectation_from_the_sampler_to_the_trainer():
    old, sampler = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.2, 0.2, 0.6]])
    value = torch.tensor([[1.0, -2.0, 5.0]])
    everything = torch.ones(1, 3).bool()
    weights = truncated_importance(old.log(), sampler.log(), everything, math.inf)
    torch.testing.assert_close((sampler * weights * value).sum(), (old * value).sum())
    # Truncated, the first token (ratio 2.5) weighs less.
    weights = truncated_importance(old.log(), sampler.log(), everything, 2.0)
    torch.testing.assert_close((sampler * weights * value).sum(), (old * value).sum() - 0.2 * 0.5)


def test_equal_policies_weigh_1_and_extremes_are_finite():
    logprobs = torch.tensor([[-1.0, -100.0, 0.0, -1e30]])
    everything = torch.ones(1, 4).bool()
    assert torch.equal(truncated_importance(logprobs, logprobs, everything, 2.0), torch.ones(1, 4))
    sampler = torch.tensor([[-101.0, 0.0, -math.inf, 0.0]])
    assert truncated_importance(logprobs, sampler, everything, 2.0).tolist() == [[2.0, pytest.approx(0), 2.0, 0.0]]
    assert truncated_importance(logprobs, sampler, everything, math.inf).isfinite().all()


def test_weighted_mean_by_hand():
    x = torch.tensor([[1.0, 2.0, 3.0]], requires_grad=True)
    mask = torch.tensor([[True, True, False]])
    mean = weighted_mean(x, mask, 4, torch.tensor([[0.5, 2.0, float("nan")]]))
    mean.backward()
    assert mean.item() == (0.5 + 4.0) / 4
    assert x.grad is not None and x.grad.tolist() == [[0.125, 0.5, 0.0]]
    assert weighted_mean(x, mask, 4, None).item() == 0.75
