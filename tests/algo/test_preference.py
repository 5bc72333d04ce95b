import math

import pytest
import torch

from keel.algo.preference import bradley_terry


def test_by_hand():
    # Margins log 3, 0, -log 3: probabilities 3/4, 1/2, 1/4
    chosen, rejected = torch.tensor([math.log(3), 1.0, 0.0]), torch.tensor([0.0, 1.0, math.log(3)])
    chosen.requires_grad_()
    loss, metrics = bradley_terry(chosen, rejected, 3)
    assert loss.item() == pytest.approx(-(math.log(3 / 4) + math.log(1 / 2) + math.log(1 / 4)) / 3)
    assert metrics["accuracy"].item() == pytest.approx(1 / 3)
    assert metrics["margin"].item() == pytest.approx(0, abs=1e-6)
    loss.backward()
    torch.testing.assert_close(chosen.grad, torch.tensor([-1 / 4, -1 / 2, -3 / 4]) / 3)


def test_split_and_a_common_shift_change_nothing():
    chosen, rejected = torch.randn(5), torch.randn(5)
    loss, metrics = bradley_terry(chosen, rejected, 5)
    parts = [bradley_terry(chosen[s], rejected[s], 5) for s in (slice(0, 2), slice(2, None))]
    torch.testing.assert_close(parts[0][0] + parts[1][0], loss)
    for name, value in metrics.items():
        torch.testing.assert_close(parts[0][1][name] + parts[1][1][name], value)
    torch.testing.assert_close(bradley_terry(chosen + 3, rejected + 3, 5)[0], loss)


def test_extreme_margins_are_finite():
    chosen = torch.tensor([1e4, -1e4], requires_grad=True)
    loss, _ = bradley_terry(chosen, torch.zeros(2), 2)
    loss.backward()
    assert loss.item() == pytest.approx(5e3)
    torch.testing.assert_close(chosen.grad, torch.tensor([0.0, -0.5]))
