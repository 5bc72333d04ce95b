"""The records and batches that travel between Keel's parts, and the legend of axis suffixes.

Axes (a tensor's name ends in them, in order):

    B responses      T response tokens      S sequence tokens (prompt + response)      N tokens of a packed micro-batch
    V vocabulary     H hidden width         P prompts                                  G responses per prompt

Everything over T is right-padded: column t of row b is the t-th token of response b, whatever the prompt's length.
`response_mask_BT` is True on the response's own tokens (EOS included), False on padding.

A worked example, two prompts with one response each, EOS = 2, padding = 0:

    prompt_ids            [[5, 6, 7], [5, 8]]
    response_ids_BT       [[11, 12, 2], [13, 14, 15]]     row 0 ended by itself, row 1 ran into the limit of 3 tokens
    response_mask_BT      [[1, 1, 1], [1, 1, 1]]
    finish                ["stop", "length"]
    sequence of row 0     5 6 7 11 12 2                   token 11's log-prob comes from the hidden state at token 7
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # files are read, and shown by `keel inspect`, without torch
    from torch import Tensor

Finish = Literal["stop", "length"]
"""Why a response ended: the model chose an end token, or it ran into the limit."""


@dataclass(frozen=True)
class Prompt:
    """What the policy answers.

    messages: chat turns, each {"role", "content"}, the last one not from the assistant.
    columns: the row's other columns, given to reward functions untouched.
    source: "file:line" or another place that a person can look up.
    origin: which of the recipe's paths it was read from, counted from 0.
    """

    messages: tuple[dict[str, str], ...]
    columns: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    origin: int = 0

    @property
    def text(self) -> str:
        """The content of the last message."""
        return self.messages[-1]["content"]


@dataclass(frozen=True)
class Demonstration:
    """A prompt and a reply to imitate."""

    prompt: Prompt
    response: str


@dataclass(frozen=True)
class PreferencePair:
    """Two replies to one prompt, of which people preferred the first.

    margin: how much better it was found, in the unit of its file; 0 where no one asked for it.
    """

    prompt: Prompt
    chosen: str
    rejected: str
    margin: float = 0.0


@dataclass(frozen=True)
class Thumb:
    """A reply with a thumb up (desirable) or down, without another to compare it with."""

    prompt: Prompt
    response: str
    desirable: bool


@dataclass(frozen=True)
class TokenSequence:
    """Token ids of one prompt with one response (end token included where there is one).

    response_mask: of `response_ids`, True where the model speaks. What users and tools say between its turns is a gap.
        None: the model speaks throughout.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    response_mask: tuple[bool, ...] | None = None

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def spoken(self) -> tuple[bool, ...]:
        """`response_mask`, written out."""
        return (True,) * len(self.response_ids) if self.response_mask is None else self.response_mask


@dataclass
class Rollouts:
    """Responses sampled from the policy. See the example above for the layout.

    sampler_logprobs_BT: float32 log-probabilities as the sampler saw them, at the sampling temperature.
    texts: responses decoded without special tokens.
    version: the number of policy updates behind the weights that made them.
    """

    prompts: list[Prompt]
    prompt_ids: list[tuple[int, ...]]
    response_ids_BT: Tensor
    response_mask_BT: Tensor
    sampler_logprobs_BT: Tensor
    finish: list[Finish]
    texts: list[str]
    version: int

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def lengths_B(self) -> Tensor:
        """Tokens per response, end token included (int64)."""
        return self.response_mask_BT.sum(1)

    def sequences(self) -> list[TokenSequence]:
        """Each row as ids of prompt and response."""
        lengths = self.lengths_B.tolist()
        rows = self.response_ids_BT.tolist()
        return [TokenSequence(p, tuple(r[:n])) for p, r, n in zip(self.prompt_ids, rows, lengths, strict=True)]

    def select(self, rows: Sequence[int]) -> Rollouts:
        """The given rows, in that order, T cut to the longest of them."""
        import torch

        index = torch.as_tensor(rows, dtype=torch.long)
        width = max(1, int(self.lengths_B[index].max()))
        return Rollouts(
            [self.prompts[i] for i in rows],
            [self.prompt_ids[i] for i in rows],
            self.response_ids_BT[index, :width],
            self.response_mask_BT[index, :width],
            self.sampler_logprobs_BT[index, :width],
            [self.finish[i] for i in rows],
            [self.texts[i] for i in rows],
            self.version,
        )


@dataclass
class Experience:
    """Rollouts with all that an update needs; every tensor float32 and detached.

    scores_B: the reward of each response, before KL, as it is trained on.
    policy_logprobs_BT: the trainer's own log-probabilities before the update (the denominator of the ratio).
    values_BT, returns_BT: the critic's predictions before the update, and what it is trained towards, in units of
        reward; None where the advantage needs no critic.
    """

    rollouts: Rollouts
    scores_B: Tensor
    policy_logprobs_BT: Tensor
    reference_logprobs_BT: Tensor
    values_BT: Tensor | None
    kl_BT: Tensor
    rewards_BT: Tensor
    advantages_BT: Tensor
    returns_BT: Tensor | None
