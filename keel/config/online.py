"""Online training: policy, critic, KL, and how they may be combined."""

from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from keel.config.base import Count, Fraction, NonNegative, Positive, Rate, Section, refuse
from keel.config.stages import SourceConfig


class PolicyConfig(Section):
    """The policy's update."""

    learning_rate: Rate | None = None
    """Peak; linear decay to 0. Null: 1e-6 with backbone separate, 1e-5 with shared."""
    loss: Literal["clip", "policy_gradient", "gspo", "cispo", "kl_penalty"] = "clip"
    """clip: PPO's clipped surrogate [arXiv:1707.06347, eq. 7]. policy_gradient: -A log pi, for one step per batch of
    rollouts. gspo: clipped ratio of whole sequences [arXiv:2507.18071]. cispo: clipped importance weights
    [arXiv:2506.13585]. kl_penalty: PPO's other form, an adaptive penalty on the KL from the rollout policy [eq. 8]."""
    clip: Rate | None = None
    """Half width of the clip range of the ratio. Null: 0.2 with clip [PPO, table 3] and cispo, 3e-4 with gspo [its
    section 5.1]."""
    clip_high: Rate | None = None
    """Upper half of the range where it differs, such as 0.28 [clip-higher, DAPO, arXiv:2503.14476]. Null: as clip."""
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """Bound of the ratio where the advantage is negative, such as 3 [arXiv:1912.09729, eq. 5]. Null: none."""
    old_kl_target: Rate | None = None
    """kl_penalty only: nats per token from the rollout policy; the penalty halves or doubles beyond 1.5 times off
    [PPO, section 4]. Null: 0.01 [PPO, table 1]."""
    aggregation: Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"] | None = None
    """How losses per token become one: see docs/algorithms.md. Null: token_mean; with gspo sequence_mean_token_mean,
    with advantage dr_grpo constant, as in their papers."""
    entropy_bonus: NonNegative = 0.0
    """Weight of the entropy per token, added to the objective [PPO, eq. 9] (1/nat)."""
    target_kl: Rate | None = None
    """An update ends before the minibatch whose approximate KL from the rollout policy passes this (nats per token)
    [Spinning Up: 0.01 to 0.05]. Null: never."""
    importance_cap: Rate | None = None
    """Truncated importance sampling between sampler and trainer: weights up to this, such as 2 [Yao et al. 2025, "Your
    efficient RL framework secretly brings you off-policy RL training"]. Null: off."""
    max_grad_norm: Rate = 1.0
    """Gradients are scaled down to this norm [LM human preferences, arXiv:1909.08593, released code]."""

    @model_validator(mode="after")
    def _useful(self) -> Self:
        clipped = self.loss in ("clip", "gspo", "cispo")
        refuse(self, {"clip": not clipped, "clip_high": not clipped}, f"policy.loss {self.loss} clips nothing")
        refuse(self, {"dual_clip": self.loss != "clip"}, f"only policy.loss clip has it, not {self.loss}")
        refuse(self, {"old_kl_target": self.loss != "kl_penalty"}, f"policy.loss {self.loss} has no such penalty")
        return self


class CriticConfig(Section):
    """The critic's update, with `advantage: gae`. It starts as a copy of the reward model, where there is one."""

    learning_rate: Rate | None = None
    """Peak; linear decay to 0. Null: 1e-5 with backbone separate, 1e-4 with shared."""
    lam: Fraction | None = None
    """Lambda of the returns that the critic learns, such as 1 [VAPO, arXiv:2504.05118]. Null: ppo.lam."""
    clip: Rate | None = 0.2
    """Clip range of the value around its value before the update [PPO2, LM human preferences]. Null: none."""
    popart: bool = False
    """Learn returns in units of their running mean and sd; when those move, the head is rescaled so that its outputs
    stay [PopArt, arXiv:1602.07714]. The clip range is then in standard deviations."""
    max_grad_norm: Rate = 1.0
    """Gradients are scaled down to this norm."""
    warmup_explained_variance: Fraction = 0.3
    """The policy waits until the critic explains this share of the variance of returns on fresh rollouts ..."""
    warmup_cap: Count = 10
    """... or until so many updates have passed (updates)."""

    @model_validator(mode="after")
    def _useful(self) -> Self:
        refuse(self, {"warmup_explained_variance": self.warmup_cap == 0}, "warmup_cap 0 is no warm-up")
        return self


class PtxConfig(Section):
    """Language modelling mixed into the policy's update, so that what SFT or pretraining taught is not lost."""

    data: SourceConfig | None = None
    """Demonstrations. Null in the sandbox: those of SFT."""
    coefficient: Rate = 1.0
    """Weight of their mean loss per token. InstructGPT's 27.8 [arXiv:2203.02155, appendix C.4] weighs a sum differently
    and is not comparable."""
    batch: Positive = 32
    """Demonstrations per optimizer step."""


class KlConfig(Section):
    """The penalty that keeps the policy near the reference."""

    estimator: Literal["k1", "k2", "k3", "exact"] = "k1"
    """Per token: the log-ratio, half its square, or the low-variance form [Schulman 2020]; exact sums over the whole
    vocabulary."""
    place: Literal["reward", "loss"] = "reward"
    """reward: taken from each token's reward [arXiv:1909.08593]. loss: a term of the policy's loss [GRPO,
    arXiv:2402.03300], whose gradient is that of the KL per token whichever estimator shows its value."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """adaptive: the coefficient follows the target in proportion [arXiv:1909.08593, section 2.2]."""
    coefficient: NonNegative = 0.05
    """Weight of the penalty (reward per nat), at the start. 0: no penalty, and a separate reference is not loaded."""
    target: Rate | None = None
    """Adaptive only: nats per response. Null: 6."""
    horizon: Rate | None = None
    """Adaptive only: episodes over which the coefficient adapts. Null: 10 000."""

    @model_validator(mode="after")
    def _useful(self) -> Self:
        if self.controller == "fixed" and (self.target is not None or self.horizon is not None):
            raise ValueError(
                "target and horizon do nothing with controller fixed; set both to null, or controller to adaptive"
            )
        if self.coefficient == 0:
            refuse(self, {"place": True, "estimator": True}, "a coefficient of 0 is no penalty")
        if self.controller == "adaptive" and self.coefficient == 0:
            raise ValueError("an adaptive coefficient that starts at 0 stays 0; start above 0 or use controller fixed")
        return self


class ScoringConfig(Section):
    """What a reward function or a remote scorer may cost, and what becomes of a response that it fails on."""

    timeout: Rate = 60.0
    """Of one call of the function, or of one request (seconds)."""
    max_failed: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of a batch that may fail; those responses are left out of the update. More end the run. 0: none may."""
    retries: Count = 5
    """Remote only: repetitions of a request that fails in passing, after 1, 2, 4, ... seconds (at most 30)."""
    rows_per_request: Positive = 16
    """Remote only: responses per request."""
    token_env: Annotated[str, Field(pattern=r"^[A-Z_][A-Z0-9_]*$")] | None = None
    """Remote only: environment variable that holds a token, sent as `Authorization: Bearer` and written nowhere. Null:
    no token."""


class PpoConfig(Section):
    """Online training against a reward: PPO, or another policy gradient by the literals of `advantage` and
    `policy.loss`."""

    data: SourceConfig | None = None
    """Prompts. Null in the sandbox."""
    reward: str = "model"
    """model: the reward model of the reward stage. Else a Python function: `file.py:name` or `package.module:name`,
    called as name(prompt=..., response=..., finish_reason=..., and the row's other columns that it names) -> float. Or
    a remote scorer: `https://host/path` (docs/recipes.md)."""
    scoring: ScoringConfig = ScoringConfig()
    """Limits of a function or remote scorer."""
    advantage: Literal[
        "gae",
        "reinforce",
        "reinforce_baseline",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "rloo",
        "remax",
        "grpo",
        "dr_grpo",
    ] = "gae"
    """gae: PPO's, with a critic [arXiv:1506.02438]. The others need no critic: see docs/algorithms.md."""
    normalise_scores: bool = False
    """Scores in units of the running mean and sd of all scores so far, this batch among them."""
    updates: Positive = 100
    """Rollout batches, each followed by one update."""
    rollouts: Positive = 64
    """Responses per update."""
    responses_per_prompt: Positive = 1
    """Responses sampled for each prompt of a batch; rollouts / this is the number of prompts."""
    epochs: Positive = 1
    """Passes over each batch of rollouts; more than 2 overfits the batch [N implementation details of RLHF, 2023]."""
    minibatches: Positive = 4
    """Optimizer steps per epoch."""
    micro_tokens: Positive = 8192
    """Padded tokens per forward pass; bounds memory, never changes the result."""
    temperature: Rate = 1.0
    """Of sampling, and of every log-probability that training uses."""
    gamma: Fraction = 1.0
    """Discount per token."""
    lam: Fraction = 0.95
    """Lambda of GAE [arXiv:1506.02438]."""
    lam_alpha: Rate | None = None
    """Lambda by length, 1 - 1 / (this * tokens), for the policy's advantages, such as 0.05 [VAPO, arXiv:2504.05118,
    eq. 7]. Null: lam for every response."""
    whiten: Literal["mean_and_sd", "sd", "off"] = "mean_and_sd"
    """Advantages of gae over the response tokens of an update: to mean 0 and sd 1, scaled about their mean, or left
    [Huang et al. 2022, The 37 Implementation Details of PPO, detail 7]."""
    truncated: Literal["terminal", "bootstrap", "drop"] = "terminal"
    """Responses that ran into the limit: scored as they stand, continued by the critic's value, or left out."""
    missing_eos_penalty: NonNegative = 0.0
    """Taken from the score of a response that ran into the limit (reward)."""
    policy: PolicyConfig = PolicyConfig()
    """The policy's update."""
    critic: CriticConfig = CriticConfig()
    """The critic's update."""
    kl: KlConfig = KlConfig()
    """The penalty that keeps the policy near the reference."""
    ptx: PtxConfig | None = None
    """PPO-ptx: language modelling mixed into the policy's update [InstructGPT, arXiv:2203.02155]. Null: none."""
    checkpoint_every: Positive = 10
    """Updates between checkpoints."""
    keep_best: Literal["score"] | None = None
    """Keep the checkpoint with the best mean score too, of its last rollouts. Null: the newest alone."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.rollouts % self.responses_per_prompt:
            raise ValueError(
                f"rollouts {self.rollouts} is no multiple of responses_per_prompt {self.responses_per_prompt}"
            )
        if self.minibatches > self.rollouts:
            raise ValueError(f"minibatches {self.minibatches} is more than rollouts {self.rollouts}")
        _check_advantage(self)
        _check_reward(self)
        return self

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained."""
        return self.advantage == "gae"


GROUPED = ("reinforce_plus_plus_baseline", "rloo", "grpo", "dr_grpo")
"""Advantages against the other responses to the same prompt."""


def is_remote(reward: str) -> bool:
    """Whether a reward is asked over HTTP."""
    return reward.partition("://")[0] in ("http", "https")


def _names_function(reward: str) -> bool:
    place, _, function = reward.rpartition(":")
    is_module = all(part.isidentifier() for part in place.split("."))
    return function.isidentifier() and "://" not in reward and (is_module or place.endswith(".py"))


def _check_reward(ppo: PpoConfig) -> None:
    reward = ppo.reward
    if reward == "model":
        refuse(ppo, {"scoring": True}, "a reward model is not called and not asked")
    elif is_remote(reward):
        try:
            url = urlsplit(reward)
            usable = bool(url.hostname) and url.port != 0
        except ValueError:
            usable = False
        # What stands in a recipe is written to the manifest, so it must hold no secret.
        if not usable or "@" in reward or "?" in reward or "#" in reward or not reward.isprintable() or " " in reward:
            raise ValueError(
                "reward is to be https://host/path without user, password or query, which would be written to the "
                "manifest; name an environment variable with the token as ppo.scoring.token_env"
            )
    elif not _names_function(reward):
        raise ValueError(
            "reward names no function and no scorer; give 'file.py:function', 'package.module:function', "
            "'https://host/path' or 'model'"
        )
    else:
        idle = {"retries": True, "rows_per_request": True, "token_env": True}
        refuse(ppo.scoring, idle, "a function is called, not asked over HTTP")


def _check_advantage(ppo: PpoConfig) -> None:
    name, alone = f"advantage {ppo.advantage}", not ppo.has_critic
    refuse(ppo, {"critic": alone, "lam": alone, "lam_alpha": alone}, f"{name} has no critic")
    refuse(ppo, {"whiten": alone}, f"{name} says itself how it is scaled")
    refuse(ppo, {"gamma": ppo.advantage in GROUPED}, f"{name} gives every token of a response the same advantage")
    if ppo.truncated == "drop" and ppo.missing_eos_penalty:
        raise ValueError("missing_eos_penalty does nothing with truncated drop: those responses are left out")
    if ppo.lam_alpha and ppo.lam != PpoConfig.model_fields["lam"].default:
        raise ValueError("lam does nothing with lam_alpha, which sets it by length; for the critic set critic.lam")
    if alone and ppo.truncated == "bootstrap":
        raise ValueError(f"truncated bootstrap needs a critic's value, and {name} has none; use terminal or drop")
    if ppo.advantage in GROUPED and ppo.responses_per_prompt < 2:
        raise ValueError(f"{name} compares responses to one prompt; set responses_per_prompt to 2 or more")
    steps = ppo.epochs * ppo.minibatches
    if ppo.policy.loss == "policy_gradient" and steps > 1:
        raise ValueError(
            f"policy.loss policy_gradient is right for the first of the {steps} optimizer steps per batch of rollouts "
            "only; set epochs and minibatches to 1, or use policy.loss clip"
        )
    if ppo.policy.target_kl and steps == 1:
        raise ValueError("policy.target_kl does nothing: each update is a single optimizer step")
    if ppo.normalise_scores and ppo.advantage in ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "grpo"):
        raise ValueError(f"normalise_scores does nothing: {name} divides by the spread of the scores itself")
