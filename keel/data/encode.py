"""The one encoder of all stages, from a prompt and a response to token ids, and the padding of batches.

A response is encoded apart from its prompt, as the sampler makes it, so the prompt's ids are always a prefix of the
sequence. Padding is told apart by position (masks and lengths), never by value: the padding id may equal the end token.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from keel.errors import ConfigError, DataError, ModelError
from keel.types import Prompt, TokenSequence

DEFAULT_CHAT_NAME = "keel-default"
"""How the template below is called in manifests and on screen."""

DEFAULT_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "### {{ message['role'] | capitalize }}:\n{{ message['content'] }}\n\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}### Assistant:\n{% endif %}"
)
"""The chat template of tokenizers that have none: plain words, because a base model knows no special tokens of turns,
and a line break before the reply, so that its first token is the same as at the start of any line."""

PROBES = ("Yes.", "<think>\nLet me see.\n</think>\n\nYes.")
"""Replies by which `drift` tries a template; many drop the reasoning of earlier turns."""

DRIFT_SHOWN = 12
"""Tokens that it shows on each side of the first difference."""

BUSY_TOKENS = 1024
"""Tokens from which a forward pass of even a small model gains nothing by being larger (docs/decisions.md)."""


MIN_TOKENS = 256
"""Less than this is not worth a worker of its own."""


@dataclass
class Encoder:
    """Makes the ids of prompts and of prompts with responses.

    Args:
        tokenizer: of the policy.
        template: "chat" renders the messages with the tokenizer's chat template, or with `DEFAULT_CHAT_TEMPLATE` where
            it has none; "plain" takes the text of a single message as it is.
        max_prompt_tokens: longer prompts lose tokens at their start, never the end; a leading BOS stays.
        max_response_tokens: with the end token; longer responses lose their end, and have no end token then.
        eos_ids: every token that ends a response; the first is the one appended to responses. See `eos_ids_of`.

    Attributes:
        counts: "prompts cut", "responses cut", "responses with an end token inside", one for each call that did so.
        template_name: "plain", "tokenizer" or "keel-default".
        chat_template: what "chat" renders with (Jinja); to be saved with a trained model. None for "plain".
    """

    tokenizer: PreTrainedTokenizerBase
    template: Literal["chat", "plain"]
    max_prompt_tokens: int
    max_response_tokens: int
    eos_ids: tuple[int, ...]
    counts: Counter[str] = field(default_factory=Counter, init=False)
    template_name: str = field(default="plain", init=False)
    chat_template: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        for name in ("max_prompt_tokens", "max_response_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}.", where=name, remedy="Give at least 1.")
        assert self.eos_ids, "eos_ids_of gives at least one"
        self._bos = _own_bos(self.tokenizer)
        if self.template == "chat" and self.tokenizer.chat_template:
            self.template_name, self.chat_template = "tokenizer", _own_template(self.tokenizer)
        elif self.template == "chat":
            bos = "{{ bos_token }}" if self._bos else ""
            self.template_name, self.chat_template = DEFAULT_CHAT_NAME, bos + DEFAULT_CHAT_TEMPLATE

    @property
    def eos_id(self) -> int:
        """The end token that is appended to responses."""
        return self.eos_ids[0]

    @property
    def pad_id(self) -> int:
        """The tokenizer's padding token, or the end token where it has none."""
        pad = self.tokenizer.pad_token_id
        return pad if isinstance(pad, int) else self.eos_id

    def prompt_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """The prompt's ids, at most `max_prompt_tokens` of them.

        A chat template says itself where BOS stands, so its text is encoded without special tokens; a plain prompt
        begins with BOS if the tokenizer adds one.

        Raises:
            DataError: the template refuses the messages, "plain" meets several, or there is no token.
        """
        (ids,) = self._ids([self._text(prompt)])
        return self._fitted(ids, prompt)

    def each_prompt_ids(self, prompts: Sequence[Prompt]) -> list[tuple[int, ...] | DataError]:
        """`prompt_ids` of many prompts at once, which is faster; an error stands in the place of its prompt."""
        texts: list[str] = []
        found: list[tuple[int, ...] | DataError] = []
        for prompt in prompts:
            try:
                texts.append(self._text(prompt))
                found.append(())
            except DataError as error:
                found.append(error)
        ids = iter(self._ids(texts) if texts else [])
        for at, prompt in enumerate(prompts):
            if not isinstance(found[at], DataError):
                try:
                    found[at] = self._fitted(next(ids), prompt)
                except DataError as error:
                    found[at] = error
        return found

    def _text(self, prompt: Prompt) -> str:
        if self.template == "chat":
            return self.render(prompt)
        if len(prompt.messages) == 1:
            return prompt.text
        raise DataError(
            f"The plain template takes one message; this prompt has {len(prompt.messages)}.",
            where=prompt.source,
            remedy="Use the chat template, which keeps who said what.",
        )

    def _fitted(self, ids: tuple[int, ...], prompt: Prompt) -> tuple[int, ...]:
        """The ids of a prompt's text with the beginning that they lack, cut to the limit."""
        ids = ids if self.template == "chat" else self._bos + ids
        if not ids:
            raise DataError("The prompt has no token.", where=prompt.source, remedy="Give it some text.")
        if len(ids) > self.max_prompt_tokens:
            self.counts["prompts cut"] += 1
            has_bos = ids[0] == self.tokenizer.bos_token_id and self.max_prompt_tokens > 1
            head = ids[:1] if has_bos else ()
            ids = head + ids[len(ids) - self.max_prompt_tokens + len(head) :]
        return ids

    def sequence(self, prompt: Prompt, response: str) -> TokenSequence:
        """Prompt and response, with exactly one end token, the last, unless the response had to be cut.

        Text after an end token written in the response is left out, as a sampler would never come to it, and counted.
        """
        return self.sequences(prompt, [response])[0]

    def sequences(self, prompt: Prompt, responses: Sequence[str]) -> list[TokenSequence]:
        """`sequence` of several responses to one prompt, whose ids are made once."""
        prompt_ids = self.prompt_ids(prompt)
        return [TokenSequence(prompt_ids, ids) for ids in self.responses(responses)]

    def turns(self, prompt: Prompt, response: str) -> list[TokenSequence]:
        """Every turn of the assistant, those in the prompt too, each after exactly what a sampler would be asked there.

        A turn whose ids, prompt included, are the beginning of the next one's prompt is one sequence with it; what
        stands between them (other speakers, tools, the template) is a gap in `response_mask`. Where the template
        writes earlier turns otherwise (`drift`), or the next prompt is cut, the next turn begins a sequence of its own.
        Empty turns, and one that nothing precedes, carry no loss.
        """
        messages = (*prompt.messages, _says(response))
        found: list[TokenSequence] = []
        for at, message in enumerate(messages):
            if at and message["role"] == "assistant" and message["content"].strip():
                one = self.sequence(replace(prompt, messages=messages[:at]), message["content"])
                joined = _joined(found[-1], one) if found else None
                found[-1:] = [joined] if joined else [*found[-1:], one]
        return found

    def drift(self) -> str:
        """Where the template writes an earlier turn of the assistant otherwise than it was trained: what was trained
        and what later prompts hold, in a few words. Empty where they are alike."""
        if self.template == "plain":
            return ""
        asked, again = ({"role": "user", "content": text} for text in ("Is it so?", "Why?"))
        for reply in PROBES:
            try:
                prompts = [self.render(Prompt(turns)) for turns in ((asked,), (asked, _says(reply), again))]
            except DataError:  # a template for one turn, or for other roles: rows show it, where there are such
                continue
            before, later, own = self._ids([*prompts, reply])
            trained = (*before, *own, self.eos_id)
            if later[: len(trained)] != trained:
                at = next(at for at, token in enumerate((*trained, None)) if (*later, None)[at] != token)
                start = max(0, at - DRIFT_SHOWN)
                told = (self.tokenizer.decode(list(ids[start : at + DRIFT_SHOWN])) for ids in (trained, later))
                return "trained: {!r}, in later prompts: {!r}".format(*told)
        return ""

    def responses(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """The ids of responses alone, each with its end token."""
        return [self._response_ids(ids) for ids in self._ids(texts)] if texts else []

    def _response_ids(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        end = next((at for at, token in enumerate(ids) if token in self.eos_ids), None)
        if end is None:
            ids += (self.eos_id,)
        else:
            if any(token not in self.eos_ids for token in ids[end:]):
                self.counts["responses with an end token inside"] += 1
            ids = ids[: end + 1]
        if len(ids) > self.max_response_tokens:
            self.counts["responses cut"] += 1
            ids = ids[: self.max_response_tokens]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens and otherwise as the tokens spell it."""
        text = self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def fingerprint(self) -> str:
        """SHA-256 over everything that decides the ids: tokenizer, template, limits and end tokens."""
        options = {
            "tokenizer": _serialised(self.tokenizer),
            "bos": [self.tokenizer.bos_token, *self._bos],
            "eos": self.eos_ids,
            "template": [self.template_name, self.chat_template],
            "limits": [self.max_prompt_tokens, self.max_response_tokens],
        }
        return hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()

    def render(self, prompt: Prompt) -> str:
        """The text that the chat template makes of the prompt. Raises DataError where it refuses the messages."""
        try:
            text = self.tokenizer.apply_chat_template(
                list(prompt.messages), chat_template=self.chat_template, tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise DataError(
                f"The chat template refuses these messages: {error}",
                where=prompt.source,
                remedy="Mend the row's roles or their order, or give the tokenizer a template that takes them.",
            ) from error
        assert isinstance(text, str)
        return text

    def _ids(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        # verbose=False: a text over the model's length is cut here, by our own limits, and needs no warning
        made = self.tokenizer(
            list(texts),
            add_special_tokens=False,
            verbose=False,
            return_attention_mask=False,
            return_token_type_ids=False,
        )
        return [tuple(ids) for ids in made["input_ids"]]


def eos_ids_of(
    tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None = None
) -> tuple[int, ...]:
    """Every token that ends a response: the tokenizer's own first, then those of the generation config.

    Raises:
        ModelError: the tokenizer has no end token.
    """
    own = tokenizer.eos_token_id
    if not isinstance(own, int):
        raise ModelError(
            "The tokenizer has no end token (EOS), so a model could never learn to stop.",
            where=str(tokenizer.name_or_path),
            remedy='Set "eos_token" in its tokenizer_config.json to the token that ends a text, then try again.',
        )
    more = generation_config.eos_token_id if generation_config is not None else None
    more = [more] if isinstance(more, int) else more or []
    return tuple(dict.fromkeys([own, *more]))


def pad_sequences(sequences: Sequence[TokenSequence], pad_id: int) -> tuple[Tensor, Tensor, Tensor]:
    """A batch of sequences, padded on the right to the longest.

    Returns:
        ids_BS: int64.
        response_mask_BS: bool, True at the positions of response tokens, end tokens included, False in their gaps.
        lengths_B: int64, tokens of each row that are no padding.
    """
    lengths = [len(sequence) for sequence in sequences]
    ids_BS = torch.full((len(lengths), max(lengths)), pad_id, dtype=torch.long)
    response_mask_BS = torch.zeros(ids_BS.shape, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        ids_BS[row, : lengths[row]] = torch.tensor(sequence.prompt_ids + sequence.response_ids)
        mask = sequence.response_mask
        response_mask_BS[row, len(sequence.prompt_ids) : lengths[row]] = True if mask is None else torch.tensor(mask)
    return ids_BS, response_mask_BS, torch.tensor(lengths)


def micro_batches(lengths: Sequence[int], tokens: int, workers: int = 1) -> list[list[int]]:
    """Row numbers in groups of similar length, the longest first.

    A group's padded size (rows x longest) is at most `tokens`; a row that is longer alone makes a group of its own. A
    group that is large enough to keep the processor busy takes no row that would be more than a tenth padding. Several
    workers get as many groups each, alike in size, unless there is too little work for them.
    Every row is in exactly one group, and equal lengths keep their order.
    """
    assert tokens >= 1, "the configuration admits no empty budget"
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    groups: list[list[int]] = []
    for row in order:
        if groups and _fits(len(groups[-1]), lengths[groups[-1][0]], lengths[row], tokens):
            groups[-1].append(row)
        else:
            groups.append([row])
    if workers == 1 or sum(lengths) < workers * MIN_TOKENS or len(lengths) < workers:
        return groups
    for count in range(workers * -(-len(groups) // workers), len(lengths) + 1, workers):
        even = _even(order, lengths, count)
        if all(len(group) * lengths[group[0]] <= tokens for group in even):
            return even
    return groups


def padding_share(lengths: Sequence[int], groups: Sequence[Sequence[int]]) -> float:
    """Padding among the tokens of groups of rows, each as wide as its longest row; 0 where there are none."""
    whole = sum(len(group) * max(lengths[row] for row in group) for group in groups)
    return 1 - sum(lengths[row] for group in groups for row in group) / whole if whole else 0.0


def _fits(rows: int, longest: int, length: int, tokens: int) -> bool:
    alike = length >= 0.9 * longest or rows * longest < BUSY_TOKENS
    return alike and (rows + 1) * longest <= tokens


def _even(order: Sequence[int], lengths: Sequence[int], count: int) -> list[list[int]]:
    """Rows in that order, cut into `count` groups of about the same number of tokens; none is empty."""
    share, seen = sum(lengths) / count, 0
    groups: list[list[int]] = [[] for _ in range(count)]
    for place, row in enumerate(order):
        left = len(order) - place  # rows that are still to come, this one among them
        at = min(count - 1, int((seen + lengths[row] / 2) / share))
        last = next((i for i in reversed(range(count)) if groups[i]), -1)
        at = min(max(at, last, count - left), last + 1)
        groups[at].append(row)
        seen += lengths[row]
    return groups


def _says(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def _joined(first: TokenSequence, then: TokenSequence) -> TokenSequence | None:
    """Both as one, where the first is the beginning of what the second is asked."""
    known = first.prompt_ids + first.response_ids
    if then.prompt_ids[: len(known)] != known:
        return None
    gap = then.prompt_ids[len(known) :]
    mask = first.spoken + (False,) * len(gap) + then.spoken
    return TokenSequence(first.prompt_ids, first.response_ids + gap + then.response_ids, mask)


def _own_bos(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """BOS if the tokenizer puts it before a text by itself. Found by trial, as no attribute tells it for every kind."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    adds = full != bare and full[0] == tokenizer.bos_token_id
    return (full[0],) if adds else ()


def _own_template(tokenizer: PreTrainedTokenizerBase) -> str:
    try:
        return tokenizer.get_chat_template()
    except ValueError as error:  # several templates by name, none of them "default"
        raise ModelError(
            "The tokenizer has several chat templates and none is its default.",
            where=str(tokenizer.name_or_path),
            remedy='Rename the one to use to "default" in the tokenizer\'s folder.',
        ) from error


def _serialised(tokenizer: PreTrainedTokenizerBase) -> object:
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a tokenizer in Python: its class and vocabulary are all it shows
        return [type(tokenizer).__name__, tokenizer.get_vocab()]
    content = json.loads(backend.to_str())
    # left behind by whoever padded or truncated with it last; neither decides our ids
    return {name: value for name, value in content.items() if name not in ("padding", "truncation")}
