"""The simulated annotators are Bradley-Terry, and their ceiling is the best accuracy there is."""

import math

import numpy as np
import pytest

from keel.sandbox import pairwise_accuracy, pairwise_ceiling, rank


def test_ceiling_worked_by_hand() -> None:
    # sigmoid(0) = 1/2; sigmoid(ln 3) = 3/4; sigmoid(ln 9) = 9/10
    assert pairwise_ceiling([0.0, math.log(3), -math.log(9)], 1.0) == pytest.approx((0.5 + 0.75 + 0.9) / 3)
    assert pairwise_ceiling([2 * math.log(3)], 2.0) == pytest.approx(0.75)


def test_expected_accuracy_by_hand():
    """Right about 3 to 1, wrong about 1 to 9 (the first reply is the worse one), undecided about the third."""
    gaps = [math.log(3), -math.log(9), math.log(4)]
    assert pairwise_accuracy(gaps, [1, 1, 0.5], 1.0) == pytest.approx((0.75 + 0.1 + 0.5) / 3)
    assert pairwise_accuracy(gaps, [0, 0, 1], 1.0) == pytest.approx((0.25 + 0.9 + 0.8) / 3)


def test_little_noise_ranks_by_gold() -> None:
    assert rank([0.5, 3.0, -1.0, 2.0], 1e-6, np.random.default_rng(0)) == [1, 3, 0, 2]


def test_every_pair_of_a_ranking_is_bradley_terry() -> None:
    golds, temperature, count, rng = [0.0, 1.0, 2.5, 0.4], 0.8, 20_000, np.random.default_rng(1)
    before = np.zeros((4, 4))
    for _ in range(count):
        place = np.argsort(rank(golds, temperature, rng))
        before += place[:, None] < place[None, :]
    for a in range(4):
        for b in range(a):
            expected = 1 / (1 + math.exp(-(golds[a] - golds[b]) / temperature))
            assert before[a, b] / count == pytest.approx(expected, abs=5 * 0.5 / math.sqrt(count))


def test_a_judge_who_knows_gold_reaches_the_ceiling() -> None:
    rng = np.random.default_rng(2)
    pairs = rng.normal(size=(20_000, 2)) * 1.8
    agreed = [(pair[0] > pair[1]) == (rank(list(pair), 0.6, rng)[0] == 0) for pair in pairs]
    assert np.mean(agreed) == pytest.approx(pairwise_ceiling((pairs[:, 0] - pairs[:, 1]).tolist(), 0.6), abs=0.012)


def test_the_same_generator_state_gives_the_same_ranking() -> None:
    golds = list(np.linspace(0, 1, 8))
    assert rank(golds, 1.0, np.random.default_rng(4)) == rank(golds, 1.0, np.random.default_rng(4))
    assert sorted(rank(golds, 1.0, np.random.default_rng(4))) == list(range(8))
