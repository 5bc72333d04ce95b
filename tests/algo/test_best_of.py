import math

import pytest
import torch

from keel.algo.best_of import best_of_bound, best_of_log_ratio, rank_of


def test_bound_by_hand():
    assert best_of_bound(1) == 0 and best_of_bound(2) == pytest.approx(math.log(2) - 0.5)
    assert best_of_bound(16) == pytest.approx(1.835, abs=1e-3)


def exact_kl(probabilities: list[float], n: int) -> tuple[float, float]:
    """KL of best-of-n by enumeration of responses in the order of their scores, and by the function under test."""
    below, enumerated, ours = 0.0, 0.0, 0.0
    for p in probabilities:
        chosen = (below + p) ** n - below**n
        enumerated += chosen * math.log(chosen / p)
        if below > 0:
            log_ratio = best_of_log_ratio(
                torch.tensor([below], dtype=torch.float64), torch.tensor([p], dtype=torch.float64).log(), n
            )
        else:  # no response scores lower: pi_n = p^n
            log_ratio = torch.tensor([(n - 1) * math.log(p)], dtype=torch.float64)
        ours += chosen * log_ratio.item()
        below += p
    return enumerated, ours


@pytest.mark.parametrize("n", [2, 4, 16])
def test_kl_by_enumeration(n):
    for probabilities in ([0.5, 0.3, 0.2], [0.05] * 20, [0.9, 0.1], [0.001] * 1000):
        enumerated, ours = exact_kl(probabilities, n)
        assert ours == pytest.approx(enumerated, abs=1e-9)
        assert -1e-9 <= enumerated <= best_of_bound(n)
    assert enumerated == pytest.approx(best_of_bound(n), abs=0.02)  # many small ones: the bound is reached


def test_a_response_of_vanishing_probability_gives_log_n_f_to_the_n_minus_one():
    below, n = torch.tensor([0.5, 1.0, 0.5]), 4
    got = best_of_log_ratio(below, torch.tensor([-50.0, -2000.0, -19.0]), n)
    want = math.log(n) + (n - 1) * below.double().log()
    assert got[:2].tolist() == pytest.approx(want[:2].tolist(), rel=1e-12)
    assert got[2].item() == pytest.approx(want[2].item(), rel=1e-7)  # the two branches meet


def test_ties_are_one_choice():
    """Right or wrong, half of each: the best of n is right unless all are wrong."""
    n = 3
    right = best_of_log_ratio(torch.tensor([0.5]), torch.tensor([math.log(0.5)]), n)
    assert right.item() == pytest.approx(math.log((1 - 0.5**n) / 0.5))


def test_ranks_by_hand():
    """p = 1/2; of four others one is the response itself, one is below, one ties, one is above."""
    others, same = torch.tensor([[2.0, 1.0, 2.0, 3.0]]), torch.tensor([[True, False, False, False]])
    half = torch.tensor([math.log(0.5)])
    below, tied = rank_of(torch.tensor([2.0]), half, others, same)
    assert below.item() == pytest.approx(0.5 / 3) and tied.exp().item() == pytest.approx(0.5 + 0.5 / 3)
    below, tied = rank_of(torch.tensor([0.0]), half, others, ~same & same)  # none below: half of one
    assert below.item() == pytest.approx(0.5 * 0.5 / 4) and tied.item() == pytest.approx(math.log(0.5))


def test_ranks_at_the_ends_are_finite():
    """A response of probability 1, and one of a probability that no float holds."""
    logp, others = torch.tensor([0.0, -2000.0]), torch.ones(2, 3)
    below, tied = rank_of(torch.ones(2), logp, others, torch.tensor([[True] * 3, [False] * 3]))
    assert below.tolist() == pytest.approx([0, 0], abs=1e-12) and tied.exp().tolist() == [1.0, 1.0]
    assert best_of_log_ratio(below, tied, 4).tolist() == pytest.approx([0, 0], abs=1e-9)  # all score the same
