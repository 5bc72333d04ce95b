"""Preference losses against OpenRLHF 0.11.2, to 1e-5. The files hold no gradients of these."""

from torch import Tensor

from keel.algo.preference import bradley_terry, dpo, ipo
from tests.golden.cases import Case, same

BETA = 0.1


def four(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Policy's and reference's log-probabilities, chosen and rejected."""
    return case["in.dpo_pc"], case["in.dpo_pr"], case["in.dpo_rc"], case["in.dpo_rr"]


def test_dpo(case: Case):
    loss, metrics = dpo(*four(case), BETA, len(case["in.dpo_pc"]))
    same(loss, case["out.dpo"])
    pc, pr, rc, rr = four(case)
    same(metrics["margin"], BETA * ((pc - rc) - (pr - rr)).mean())


def test_conservative_dpo(case: Case):
    same(dpo(*four(case), BETA, len(case["in.dpo_pc"]), label_smoothing=0.1)[0], case["out.cdpo_0.1"])


def test_ipo(case: Case):
    same(ipo(*four(case), BETA, len(case["in.dpo_pc"]))[0], case["out.ipo"])


def test_bradley_terry_with_margin(case: Case):
    chosen, rejected = case["in.score"], case["in.greedy_score"]
    same(bradley_terry(chosen, rejected, len(chosen))[0], case["out.bradley_terry"])
    loss, _ = bradley_terry(chosen, rejected, len(chosen), margin_B=case["in.margin"])
    same(loss, case["out.bradley_terry_margin"])
