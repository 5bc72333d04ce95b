"""Policy losses, KL estimators and entropy against veRL 0.9.1 and OpenRLHF 0.11.2, to 1e-5, gradients included."""

import torch
from torch import Tensor

from keel.algo.kl import k1, k2, k3
from keel.algo.logprobs import token_logprobs
from keel.algo.policy_loss import ppo_clip
from tests.golden.cases import Case, same


def clipped(case: Case, rows: slice, denominator: float | Tensor, dual: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, gradient and number of clipped tokens of some rows."""
    logprobs = case["in.logprobs"][rows].requires_grad_()
    loss, metrics = ppo_clip(
        logprobs,
        case["in.old_logprobs"][rows],
        case["in.advantages"][rows],
        case.mask[rows],
        denominator,
        clip_low=case.number("in.clip_low"),
        clip_high=case.number("in.clip_high"),
        dual_clip=case.number("in.dual_clip") if dual else None,
    )
    return loss.detach(), torch.autograd.grad(loss, logprobs)[0], metrics["clip_fraction"]


def test_clipped_loss(case: Case):
    loss, gradient, _ = clipped(case, slice(None), case.count, dual=False)
    same(loss, case["out.policy_loss_clip"])
    same(gradient, case["out.policy_grad_clip"])


def test_dual_clipped_loss_in_every_aggregation(case: Case):
    rows = len(case.mask)
    # What each mode divides the tokens of one row by.
    denominators = {
        "token-mean": [case.count] * rows,
        "seq-mean-token-sum": [rows] * rows,
        "seq-mean-token-mean": [rows * n for n in case.mask.sum(1)],
    }
    modes = {key.partition(":")[2] for key in case.arrays if key.startswith("out.policy_loss_dual:")}
    assert modes and modes <= denominators.keys()
    for mode in modes:
        parts = [clipped(case, slice(b, b + 1), denominators[mode][b], dual=True) for b in range(rows)]
        loss, gradient, count = (torch.stack(x) for x in zip(*parts, strict=True))
        same(loss.sum(), case[f"out.policy_loss_dual:{mode}"])
        same(gradient[:, 0], case[f"out.policy_grad_dual:{mode}"])
        # A share of tokens in every mode.
        same(count.sum() / case.count, case[f"out.clipfrac:{mode}"])


def test_kl_estimators(case: Case):
    for estimator, key in ((k1, "out.kl_k1"), (k2, "out.kl_k2"), (k3, "out.kl_k3")):
        same(estimator(case["in.logprobs"], case["in.ref_logprobs"]), case[key])


def test_logprobs_and_entropy(case: Case):
    logits, ids = case["in.logits"].flatten(0, 1), torch.as_tensor(case.arrays["in.ids"])
    # The identity as output embedding makes the logits their own hidden states.
    weight = torch.eye(logits.shape[1])
    logprobs, _ = token_logprobs(logits, weight, None, ids.flatten(), 0.7, at_once=50 * weight.shape[0])
    _, entropy = token_logprobs(logits, weight, None, ids.flatten(), 1.0, at_once=50 * weight.shape[0])
    same(logprobs.reshape(ids.shape), case["out.logprob_T0.7"])
    same(entropy.reshape(ids.shape), case["out.entropy_T1"])
