"""From the literals of a recipe to functions of `keel.algo`: which advantage, which policy loss."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keel.algo.advantages import gae, length_adaptive_lambda
from keel.algo.baselines import grpo, reinforce, reinforce_plus_plus, reinforce_plus_plus_baseline, remax, rloo
from keel.algo.importance import truncated_importance
from keel.algo.kl import kl_loss
from keel.algo.masking import masked_mean, masked_whiten
from keel.algo.policy_loss import cispo, gspo, kl_penalised, policy_gradient, ppo_clip
from keel.config import PpoConfig
from keel.types import Experience


@dataclass(frozen=True)
class Now:
    """A micro-batch under the weights of this moment, with gradient: [B, T], 0 outside the responses.

    kl_BT: exact KL to the reference, where the loss has it.
    """

    logprobs_BT: Tensor
    entropy_BT: Tensor
    kl_BT: Tensor | None


@dataclass(frozen=True)
class Before:
    """The same micro-batch as the experience has it, detached, T cut to the longest of its responses."""

    mask_BT: Tensor
    logprobs_BT: Tensor
    sampler_BT: Tensor
    reference_BT: Tensor
    advantages_BT: Tensor
    values_BT: Tensor | None
    returns_BT: Tensor | None

    @classmethod
    def of(cls, experience: Experience, rows: Sequence[int], device: torch.device) -> "Before":
        """The given rows, on the device."""
        rollouts = experience.rollouts
        width = int(rollouts.lengths_B[list(rows)].max())

        def cut(x_BT: Tensor) -> Tensor:
            return x_BT[list(rows), :width].to(device)

        return cls(
            cut(rollouts.response_mask_BT),
            cut(experience.policy_logprobs_BT),
            cut(rollouts.sampler_logprobs_BT),
            cut(experience.reference_logprobs_BT),
            cut(experience.advantages_BT),
            None if experience.values_BT is None else cut(experience.values_BT),
            None if experience.returns_BT is None else cut(experience.returns_BT),
        )


def advantages(
    ppo: PpoConfig,
    rewards_BT: Tensor,
    mask_BT: Tensor,
    values_BT: Tensor | None,
    beyond_B: Tensor | None,
    groups_B: Tensor,
    greedy_B: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """(advantages_BT, returns_BT) by `ppo.advantage`; returns are what the critic learns, None without one.

    values_BT, beyond_B: the critic's, for gae. groups_B: which rows answer one prompt. greedy_B: for remax.
    """
    match ppo.advantage:
        case "gae":
            assert values_BT is not None and ppo.critic.lam is not None
            lengths_B = mask_BT.sum(1)
            lam = length_adaptive_lambda(lengths_B, ppo.lam_alpha) if ppo.lam_alpha else ppo.lam
            out_BT, returns_BT = gae(rewards_BT, values_BT, mask_BT, ppo.gamma, lam, beyond_B)
            if ppo.lam_alpha or ppo.critic.lam != ppo.lam:
                _, returns_BT = gae(rewards_BT, values_BT, mask_BT, ppo.gamma, ppo.critic.lam, beyond_B)
            if ppo.whiten != "off":
                # In float64, where equal numbers whiten to exactly 0.
                out_BT = masked_whiten(out_BT.double(), mask_BT, keep_mean=ppo.whiten == "sd").float()
            return out_BT, returns_BT
        case "reinforce" | "reinforce_baseline":
            return reinforce(rewards_BT, mask_BT, ppo.gamma, ppo.advantage == "reinforce_baseline"), None
        case "reinforce_plus_plus":
            return reinforce_plus_plus(rewards_BT, mask_BT, ppo.gamma), None
        case "reinforce_plus_plus_baseline":
            return reinforce_plus_plus_baseline(rewards_BT, mask_BT, groups_B), None
        case "rloo":
            return rloo(rewards_BT, mask_BT, groups_B), None
        case "remax":
            assert greedy_B is not None
            return remax(rewards_BT, mask_BT, greedy_B, ppo.gamma), None
        case "grpo" | "dr_grpo":
            return grpo(rewards_BT, mask_BT, groups_B, ppo.advantage == "grpo"), None


def policy_objective(
    ppo: PpoConfig, now: Now, old: Before, denominators_B1: Tensor, state: Mapping[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy's loss over a micro-batch: surrogate, less the entropy bonus, plus the KL where the loss has it.

    state: `kl_coefficient` and `old_kl_penalty` are read. Metrics are sums over tokens, but `log_ratio_abs_max`.
    """
    policy, kl = ppo.policy, ppo.kl
    weights_BT = None
    if policy.importance_cap:
        weights_BT = truncated_importance(old.logprobs_BT, old.sampler_BT, old.mask_BT, policy.importance_cap)
    common = (now.logprobs_BT, old.logprobs_BT, old.advantages_BT, old.mask_BT, denominators_B1, weights_BT)
    low, high = policy.clip or 0.0, policy.clip_high or 0.0
    match policy.loss:
        case "clip":
            loss, metrics = ppo_clip(*common, clip_low=low, clip_high=high, dual_clip=policy.dual_clip)
        case "policy_gradient":
            loss, metrics = policy_gradient(*common)
        case "gspo":
            loss, metrics = gspo(*common, clip_low=low, clip_high=high)
        case "cispo":
            loss, metrics = cispo(*common, clip_low=low, clip_high=high)
        case "kl_penalty":
            loss, metrics = kl_penalised(*common, beta=state["old_kl_penalty"])
    del metrics["ratio_max"]  # exp of log_ratio_abs_max says as much
    if policy.entropy_bonus:
        loss = loss - policy.entropy_bonus * masked_mean(now.entropy_BT, old.mask_BT, denominators_B1)
    if kl.place == "loss" and kl.coefficient:
        if kl.estimator == "exact":
            assert now.kl_BT is not None
            penalty = masked_mean(now.kl_BT, old.mask_BT, denominators_B1)
        else:
            penalty, _ = kl_loss(
                now.logprobs_BT,
                old.logprobs_BT,
                old.reference_BT,
                old.mask_BT,
                denominators_B1,
                weights_BT,
                estimator=kl.estimator,
            )
        loss = loss + state["kl_coefficient"] * penalty
    return loss, metrics
