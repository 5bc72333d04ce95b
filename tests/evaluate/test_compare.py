"""Intervals, win rate and KL of the evaluation, by hand."""

import math

import pytest
import torch

from keel.errors import RewardError
from keel.evaluate.compare import compare_scores, distance, kl_per_response, mean_of, win_rate
from keel.evaluate.curves import draw_curves
from keel.evaluate.intervals import clustered_share, mean_interval, t_quantile, wilson


def test_wilson_by_hand():
    """8 of 10: centre (0.8 + 1.9208 / 10) / 1.38416, the example of Wilson's interval in many textbooks."""
    low, high = wilson(0.8, 10)
    assert low == pytest.approx(0.4902, abs=1e-4) and high == pytest.approx(0.9433, abs=1e-4)
    assert wilson(0.0, 5)[0] == 0 and wilson(1.0, 5)[1] == 1
    assert wilson(0.5, 0) == (0.0, 1.0)


def test_clustered_share_by_hand():
    """Groups of 4, 2 and 2 trials with 4, 1 and 0 hits: share 5/8, residuals 1.5, -0.25, -1.25."""
    share, (low, high) = clustered_share([4, 1, 0], [4, 2, 2])
    assert share == 5 / 8
    sd = math.sqrt(3 / 2 * (1.5**2 + 0.25**2 + 1.25**2)) / 8
    assert (low, high) == (
        pytest.approx(max(0, share - 4.302653 * sd), abs=1e-6),
        pytest.approx(min(1, share + 4.302653 * sd), abs=1e-6),
    )
    assert clustered_share([1, 0, 1], [1, 1, 1]) == (2 / 3, wilson(2 / 3, 3))
    same, interval = clustered_share([1, 1, 1, 1], [2, 2, 2, 2])  # no group differs from another
    assert same == 0.5 and interval == (0.5, 0.5)


def test_mean_interval_by_hand():
    low, high = mean_interval([1.0, 2.0, 3.0])
    assert (low + high) / 2 == pytest.approx(2.0)
    assert high - 2.0 == pytest.approx(4.302653 / math.sqrt(3), abs=1e-6)
    low, high = mean_interval([1.0, 3.0])  # sd sqrt(2), so half of it is the quantile itself
    assert (low, high) == (pytest.approx(2 - 12.706205, abs=1e-5), pytest.approx(2 + 12.706205, abs=1e-5))


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.706205), (2, 4.302653), (3, 3.182446), (4, 2.776445), (9, 2.262157), (199, 1.971957)],
)
def test_the_quantile_is_that_of_the_tables(freedom, quantile):
    assert t_quantile(freedom) == pytest.approx(quantile, abs=2e-6)


def test_a_tie_is_half_a_win():
    assert win_rate([1, 2, 3, 4], [2, 2, 1, 5]) == pytest.approx((1 + 0.5 + 0 + 1) / 4)


def test_scores_before_and_after():
    result = compare_scores(torch.tensor([0.0, 2.0]), torch.tensor([1.0, 4.0]))
    assert (result["before"], result["after"], result["before_sd"], result["win_rate"]) == (1.0, 2.5, 1.0, 1.0)


def test_scores_of_one_side():
    assert mean_of("before", torch.tensor([1.0, 3.0])) == {
        "before": 2.0,
        "before_sd": 1.0,
        "before_interval": (pytest.approx(2 - 12.706, abs=1e-3), pytest.approx(2 + 12.706, abs=1e-3)),
    }


def test_one_score_has_no_interval():
    with pytest.raises(RewardError, match="1 of the responses to compare have a score, and an interval needs two"):
        mean_of("before", torch.tensor([math.nan, 3.0]))


def test_kl_sums_the_log_ratio_over_each_response_and_nothing_else():
    policy, reference = torch.tensor([[-1.0, -2.0, 9.0]]), torch.tensor([[-1.5, -3.0, 0.0]])
    assert kl_per_response(policy, reference, torch.tensor([[True, True, False]])) == [pytest.approx(1.5)]


def test_distance_by_hand():
    """KL per response 1.5 and 0.5, so a mean of 1 with sd 0.7071; entropy over three tokens, the fourth is padding."""
    policy, reference = torch.tensor([[-1.0, -2.0], [-1.0, 7.0]]), torch.tensor([[-1.5, -3.0], [-1.5, 0.0]])
    mask = torch.tensor([[True, True], [True, False]])
    found = distance(policy, reference, torch.tensor([[1.0, 2.0], [3.0, 9.0]]), mask)
    assert (found["kl_per_response"], found["entropy_per_token"]) == (1.0, 2.0)
    assert found["kl_interval"] == (pytest.approx(1 - 6.3531, abs=1e-3), pytest.approx(1 + 6.3531, abs=1e-3))


def test_the_picture_is_a_png_with_panels_for_what_is_there(tmp_path):
    rows = [{"step": step, "score": step / 10, "kl_per_response": step / 5} for step in range(1, 6)]
    draw_curves(rows, tmp_path / "curves.png", "test", kl_target=6.0)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_prompts_that_are_not_scored_on_both_sides_are_left_out():
    nan = float("nan")
    found = compare_scores(torch.tensor([1.0, nan, 2.0, 5.0]), torch.tensor([2.0, 9.0, nan, 4.0]))
    assert (found["before"], found["after"], found["win_rate"]) == (3.0, 3.0, 0.5)
