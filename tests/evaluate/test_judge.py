"""What held-out pairs tell of a reward model, by hand."""

import math

import numpy as np
import pytest

from keel.evaluate.judge import calibration, judge_report, length_report


def test_calibration_by_hand():
    """Two pairs at 3 to 1, one of them right; two at 9 to 1, both right: 1/2 |1/2 - 3/4| + 1/2 |1 - 9/10|."""
    error, bins = calibration([math.log(3), -math.log(3), math.log(9), math.log(9)])
    assert error == pytest.approx(0.5 * 0.25 + 0.5 * 0.1)
    assert bins == [
        {"pairs": 2, "confidence": pytest.approx(0.75), "right": 0.5},
        {"pairs": 2, "confidence": pytest.approx(0.9), "right": 1.0},
    ]


def test_calibration_of_the_undecided_and_of_the_certain():
    assert calibration([0.0, 0.0]) == (0.0, [{"pairs": 2, "confidence": 0.5, "right": 0.5}])
    assert calibration([1000.0])[0] == 0.0 and calibration([-1000.0])[0] == 1.0


def test_answers_drawn_from_the_model_are_calibrated():
    rng = np.random.default_rng(0)
    margins = rng.normal(size=20_000)
    came = np.where(rng.random(20_000) < 1 / (1 + np.exp(-margins)), margins, -margins)
    assert calibration(came.tolist())[0] < 0.01
    assert calibration((3 * came).tolist())[0] > 0.1  # too sure


def test_length_by_hand():
    """Scores follow length in the first group and run against it in the second; group means do not count."""
    scores, lengths = [[1.0, 2.0, 3.0], [10.0, 8.0]], [[5, 6, 7], [100, 102]]
    pairs = [[(2, 0), (0, 1)], [(1, 0)]]
    found = length_report(scores, lengths, pairs)
    # Products 1 + 0 + 1 - 1 - 1 over the root of (1 + 0 + 1 + 1 + 1)^2.
    assert found["length_correlation"] == pytest.approx(0.0)
    assert found["longer_preferred"] == pytest.approx(2 / 3)
    assert found["accuracy_longer_preferred"] == 0.5 and found["accuracy_shorter_preferred"] == 0.0


def test_a_score_that_is_the_length():
    found = length_report([[3.0, 5.0, 9.0]], [[3, 5, 9]], [[(1, 0), (0, 2)]])
    assert found["length_correlation"] == pytest.approx(1.0)
    assert (found["accuracy_longer_preferred"], found["accuracy_shorter_preferred"]) == (1.0, 0.0)


def test_what_is_constant_or_absent():
    found = judge_report([[1.0, 1.0]], [[4, 4]], [[(0, 1)]])
    assert found == {
        "margin": 0.0,
        "calibration_error": 0.0,
        "calibration": [{"pairs": 1, "confidence": 0.5, "right": 0.5}],
        "length_correlation": 0.0,
    }
