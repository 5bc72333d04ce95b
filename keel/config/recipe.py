"""A whole recipe: which sections it has, what they need of each other, and the defaults that depend on it."""

import os
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from keel.config.base import Count, Positive, Section, Threads
from keel.config.online import PpoConfig
from keel.config.stages import (
    LOSSES_OF,
    EvalConfig,
    ModelConfig,
    PreferenceConfig,
    RewardConfig,
    SandboxConfig,
    SftConfig,
)

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
KL_TARGET = 6.0
"""Nats per response; the target of Ziegler et al. 2019 (arXiv:1909.08593), section 2.2 and its released code."""
KL_HORIZON = 10_000
"""Episodes; same source."""
LORA_RANK = 16
CLIP = {"clip": 0.2, "cispo": 0.2, "gspo": 3e-4}


class Recipe(Section):
    """A whole run: which model, which stages, which settings. Stages that are null are left out."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The run folder's name under `root`."""
    root: str = "runs"
    """Where run folders are made."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Of everything random: same machine, same seed, same bytes."""
    threads: Threads | None = None
    """CPU threads. Null: as many as there are cores that this process may use."""
    keep_checkpoints: Positive = 2
    """The newest checkpoints of a stage that are kept."""
    skip_bad_steps: Count = 0
    """So many steps of a stage may be left out because a number in them is not finite (loss, gradient, log-probability)
    or a batch could not be scored; the next one stops the run. 0: the first one does."""
    model: ModelConfig
    """The model that is trained and how its four roles are held."""
    sandbox: SandboxConfig | None = None
    """The embedded world, with model.path sandbox."""
    sft: SftConfig | None = None
    """Supervised fine-tuning."""
    reward: RewardConfig | None = None
    """The reward model."""
    preference: PreferenceConfig | None = None
    """DPO and its relatives, in PPO's place."""
    ppo: PpoConfig | None = None
    """PPO."""
    eval: EvalConfig | None = None
    """Evaluation."""

    @property
    def uses_lora(self) -> bool:
        """Whether any stage trains adapters."""
        return self.model.backbone == "shared" or (self.sft is not None and self.sft.tuning == "lora")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _check_sandbox(self)
        _check_stages(self)
        if not self.uses_lora and (self.model.lora_rank or self.model.lora_alpha):
            raise ValueError(
                "model.lora_rank and model.lora_alpha do nothing: backbone is separate and no stage uses lora"
            )
        if self.model.rest_frozen and not _rests(self):
            raise ValueError(
                "model.rest_frozen does nothing: no frozen role is held that training does not need all the time"
            )
        if self.sft and self.sft.loss_on == "every" and self.model.template == "plain":
            raise ValueError("sft.loss_on every does nothing with model.template plain, which has a single turn")
        if self.sft and self.sft.tuning == "full" and self.model.dtype == "bfloat16":
            raise ValueError(
                "sft.tuning full with model.dtype bfloat16 would lose steps smaller than bfloat16 can hold; "
                "use sft.tuning lora or model.dtype float32"
            )
        return self

    def resolved(self) -> "Recipe":
        """A copy in which every null that stands for a default is filled in."""
        copy = self.model_copy(deep=True)
        copy.threads = copy.threads or usable_cores()
        if copy.uses_lora:
            copy.model.lora_rank = copy.model.lora_rank or LORA_RANK
            copy.model.lora_alpha = copy.model.lora_alpha or 2.0 * copy.model.lora_rank
        more = 10.0 if copy.model.backbone == "shared" else 1.0
        if copy.sft:
            copy.sft.learning_rate = copy.sft.learning_rate or (2e-4 if copy.sft.tuning == "lora" else 2e-5)
        if copy.reward:
            copy.reward.learning_rate = copy.reward.learning_rate or 1e-5 * more
        if copy.preference:
            _resolve_preference(copy.preference, copy.model.backbone)
        if copy.ppo:
            copy.ppo.policy.learning_rate = copy.ppo.policy.learning_rate or 1e-6 * more
            _resolve_ppo(copy.ppo, 1e-5 * more)
        if copy.ppo and copy.ppo.kl.controller == "adaptive":
            copy.ppo.kl.target = copy.ppo.kl.target or KL_TARGET
            copy.ppo.kl.horizon = copy.ppo.kl.horizon or KL_HORIZON
        ranked = copy.reward or copy.preference
        if ranked and copy.sandbox:
            ranked.prompts = ranked.prompts or 1500
            ranked.responses_per_prompt = ranked.responses_per_prompt or 4
        return copy


def _resolve_ppo(ppo: PpoConfig, critic_rate: float) -> None:
    policy, critic = ppo.policy, ppo.critic
    if ppo.has_critic:
        critic.learning_rate = critic.learning_rate or critic_rate
        critic.lam = ppo.lam if critic.lam is None else critic.lam
    if policy.loss in CLIP:
        policy.clip = policy.clip or CLIP[policy.loss]
        policy.clip_high = policy.clip_high or policy.clip
    if policy.loss == "kl_penalty":
        policy.old_kl_target = policy.old_kl_target or 0.01
    usual = "sequence_mean_token_mean" if policy.loss == "gspo" else "token_mean"
    policy.aggregation = policy.aggregation or ("constant" if ppo.advantage == "dr_grpo" else usual)


def _resolve_preference(preference: PreferenceConfig, backbone: str) -> None:
    loss = preference.loss
    preference.beta = preference.beta or (2.0 if loss == "simpo" else 0.1)
    full, adapters = (8e-6, 8e-5) if loss == "orpo" else (1e-6, 1e-5)
    preference.learning_rate = preference.learning_rate or (adapters if backbone == "shared" else full)
    defaults = {
        "gamma": preference.beta / 2,
        "label_smoothing": 0.1,
        "desirable_weight": 1.0,
        "undesirable_weight": 1.0,
    }
    for name, losses in LOSSES_OF.items():
        if loss in losses and getattr(preference, name) is None:
            setattr(preference, name, defaults[name])


def usable_cores() -> int:
    """Cores that this process may use: by its affinity (taskset, a batch system) and its control group's quota (a
    container), of which `os.cpu_count` knows nothing: a thread too many waits for its turn, and all others for it."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    try:
        quota, period = map(int, CPU_QUOTA.read_text().split())
    except (OSError, ValueError):  # no such group, or "max"
        return cores
    return max(1, min(cores, quota // period))


def _rests(recipe: Recipe) -> bool:
    """Whether some stage holds a frozen role beside training: the reward stage, online training with a KL penalty. An
    exact KL in the loss needs the reference in every pass of the update; a frozen reward model has had its stage."""
    kl = recipe.ppo.kl if recipe.ppo else None
    idle = kl is not None and kl.coefficient > 0 and not (kl.place == "loss" and kl.estimator == "exact")
    return recipe.reward is not None or idle


def _check_sandbox(recipe: Recipe) -> None:
    stages = {
        "sft": recipe.sft,
        "reward": recipe.reward,
        "preference": recipe.preference,
        "ppo": recipe.ppo,
        "ppo.ptx": recipe.ppo and recipe.ppo.ptx,
    }
    if (recipe.model.path == "sandbox") != (recipe.sandbox is not None):
        raise ValueError("model.path sandbox and the section sandbox belong together; give both or neither")
    for name, stage in stages.items():
        if stage is None:
            continue
        if recipe.sandbox and stage.data is not None:
            raise ValueError(f"{name}.data does nothing in the sandbox, which makes its own; remove it")
        if not recipe.sandbox and stage.data is None:
            raise ValueError(f"{name}.data is missing: name a file as {name}.data.path")
        if stage.data and stage.data.first_words and name != "ppo":
            raise ValueError(f"{name}.data.first_words does nothing: only prompts are cut to their first words")
    for name, stage in (("reward", recipe.reward), ("preference", recipe.preference)):
        if stage is None or not (stage.prompts or stage.responses_per_prompt):
            continue
        if not recipe.sandbox:
            raise ValueError(
                f"{name}.prompts and {name}.responses_per_prompt do nothing outside the sandbox; remove them"
            )
        if name == "preference" and recipe.reward:
            raise ValueError(
                "preference.prompts and preference.responses_per_prompt do nothing: the pairs are those that the "
                "reward stage collects"
            )
        if (stage.prompts or 0) > recipe.sandbox.prompts:
            raise ValueError(f"{name}.prompts {stage.prompts} is more than sandbox.prompts {recipe.sandbox.prompts}")
    if recipe.sandbox and recipe.sft and recipe.sft.loss_on == "every":
        raise ValueError("sft.loss_on every does nothing in the sandbox, whose demonstrations have one turn; remove it")
    reward = recipe.reward
    if recipe.sandbox and reward and reward.margin:
        raise ValueError("reward.margin does nothing in the sandbox, whose annotators do not say how sure they are")
    if recipe.sandbox and reward and reward.weighting == "prompt" and reward.responses_per_prompt == 2:
        raise ValueError("reward.weighting prompt does nothing with responses_per_prompt 2: a prompt has one pair")
    if recipe.sandbox and recipe.eval and recipe.eval.prompts > recipe.sandbox.heldout_prompts:
        raise ValueError(
            f"eval.prompts {recipe.eval.prompts} is more than sandbox.heldout_prompts {recipe.sandbox.heldout_prompts}"
        )


def _check_stages(recipe: Recipe) -> None:
    if recipe.ppo and recipe.ppo.reward == "model" and recipe.reward is None:
        raise ValueError("ppo.reward is model, but there is no reward stage; add `reward:` or name a function")
    if recipe.ppo and recipe.ppo.reward != "model" and recipe.reward is not None:
        raise ValueError(f"the reward stage does nothing: ppo.reward is {recipe.ppo.reward}; remove one of the two")
    if recipe.ppo and recipe.preference:
        raise ValueError(
            "preference and ppo both make the final policy from the SFT model; give one, or two recipes of the same sft"
        )
    if recipe.eval and not (recipe.ppo or recipe.preference or recipe.eval.best_of):
        raise ValueError(
            "eval compares with the SFT model, but there is no ppo stage, no preference stage and no best_of"
        )
    if recipe.eval and recipe.eval.best_of and not (recipe.reward or recipe.ppo):
        raise ValueError("eval.best_of takes the best by a reward, but there is none; add `reward:`")
    if recipe.sandbox and not recipe.sft:
        raise ValueError("the sandbox's base model needs an sft stage before it answers")
