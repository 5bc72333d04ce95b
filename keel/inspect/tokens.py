"""Rows as the trainer sees them: every token with what it is for, and lengths in tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from keel.data.encode import Encoder
from keel.errors import DataError
from keel.inspect.survey import Record, Survey, prompt_of, replies_of
from keel.types import Demonstration, Prompt

Use = Literal["template", "prompt", "response", "end"]
"""template: what the chat template adds, BOS included. prompt: the row's own text. response: supervised. end: the end
token, supervised too."""

INSIDE = "responses with an end token inside"
"""As the encoder counts it."""


@dataclass(frozen=True)
class Token:
    """A token: its id, the text it adds to those before it, and what it is for."""

    id: int
    text: str
    use: Use


class Lengths:
    """Measures records in tokens, before anything is cut, and finds what the encoder's limits will cut. Many at once,
    as a tokenizer is called for all of them.

    Args:
        encoder: as in training, with its limits.
    """

    def __init__(self, encoder: Encoder):
        self.encoder = encoder
        self.wide = replace(encoder, max_prompt_tokens=10**9, max_response_tokens=10**9)

    def __call__(self, records: Sequence[Record], survey: Survey) -> list[dict[str, int] | DataError]:
        """The lengths of each, end token included; the error where the template refuses the prompt."""
        asked = self.wide.each_prompt_ids([prompt_of(record) for record in records])
        texts = [text for record in records for text in replies_of(record).values()]
        before = self.wide.counts[INSIDE]
        replies = iter(self.wide.responses(texts))
        inside = self.wide.counts[INSIDE] > before
        found: list[dict[str, int] | DataError] = []
        for record, prompt_ids in zip(records, asked, strict=True):
            own = {name: len(next(replies)) for name in replies_of(record)}
            if isinstance(prompt_ids, DataError):
                found.append(prompt_ids)
                continue
            place = prompt_of(record).source
            if len(prompt_ids) > self.encoder.max_prompt_tokens:
                survey.find("prompt is cut", place)
            for length in own.values():
                if length > self.encoder.max_response_tokens:
                    survey.find("response is cut", place)
            if inside:  # in some of them: which ones is seen one by one
                before = self.wide.counts[INSIDE]
                self.wide.responses(list(replies_of(record).values()))
                for _ in range(self.wide.counts[INSIDE] - before):
                    survey.find("end token inside the response", place)
            found.append({"prompt": len(prompt_ids), **own})
        return found


def prompt_tokens(encoder: Encoder, prompt: Prompt) -> list[Token]:
    """The prompt's tokens as they are trained on, cut where they are too many."""
    ids = encoder.prompt_ids(prompt)
    uses = _prompt_uses(encoder, prompt, ids)
    return [Token(*each) for each in zip(ids, _texts(encoder, ids), uses, strict=True)]


def response_tokens(encoder: Encoder, response: str) -> list[Token]:
    """The response's tokens as they are trained on: cut where they are too many, else ended by one end token."""
    (ids,) = encoder.responses([response])
    uses: list[Use] = ["end" if token in encoder.eos_ids else "response" for token in ids]
    return [Token(*each) for each in zip(ids, _texts(encoder, ids), uses, strict=True)]


def row_tokens(encoder: Encoder, record: Record, *, every_turn: bool = False) -> dict[str, list[Token]]:
    """A record's prompt and replies by name; with `every_turn` a demonstration's sequences, as `Encoder.turns` makes
    them. Raises DataError where the template refuses the prompt."""
    if every_turn and isinstance(record, Demonstration):
        sequences = turn_tokens(encoder, record)
        return {f"sequence {at}" if sequences[1:] else "sequence": part for at, part in enumerate(sequences, start=1)}
    named = {name: response_tokens(encoder, text) for name, text in replies_of(record).items()}
    return {"prompt": prompt_tokens(encoder, prompt_of(record)), **named}


def turn_tokens(encoder: Encoder, demonstration: Demonstration) -> list[list[Token]]:
    """The sequences of a demonstration whose every turn is learned; what is not learned is the prompt's or the
    template's, as it was before the sequence's last turn."""
    messages = demonstration.prompt.messages
    asked = [at for at, message in enumerate(messages) if at and message["role"] == "assistant"]
    prompts = [replace(demonstration.prompt, messages=messages[:at]) for at in asked] + [demonstration.prompt]
    uses_of = {ids: _prompt_uses(encoder, prompt, ids) for prompt in prompts if (ids := encoder.prompt_ids(prompt))}
    parts: list[list[Token]] = []
    for sequence in encoder.turns(demonstration.prompt, demonstration.response):
        ids = sequence.prompt_ids + sequence.response_ids
        learned = [False] * len(sequence.prompt_ids) + list(sequence.spoken)
        last = len(ids) - learned[::-1].index(False)  # where the last turn begins; a prompt has a token
        tail: list[Use] = ["response"] * (len(ids) - last)
        before = uses_of[ids[:last]] + tail
        ends: list[Use] = ["end" if token in encoder.eos_ids else "response" for token in ids]
        uses: list[Use] = [end if on else use for on, use, end in zip(learned, before, ends, strict=True)]
        parts.append([Token(*each) for each in zip(ids, _texts(encoder, ids), uses, strict=True)])
    return parts


def _prompt_uses(encoder: Encoder, prompt: Prompt, ids: Sequence[int]) -> list[Use]:
    """What each token of the prompt is for; where a tokenizer tells no offsets, all are called the prompt's."""
    bos = encoder.tokenizer.bos_token_id
    uses: list[Use] = ["prompt"] * len(ids)
    if encoder.template == "chat" and encoder.tokenizer.is_fast:
        text = encoder.render(prompt)
        encoded = encoder.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        spans = _spans(text, prompt)
        whole: list[Use] = [
            "prompt" if any(start < last and end > first for first, last in spans) else "template"
            for start, end in encoded["offset_mapping"]
        ]
        uses = whole[len(whole) - len(ids) :]
    if ids[0] == bos:
        uses[0] = "template"
    return uses


def _spans(text: str, prompt: Prompt) -> list[tuple[int, int]]:
    """Where each message's content stands in the rendered text; templates may strip its blanks."""
    spans: list[tuple[int, int]] = []
    start = 0
    for message in prompt.messages:
        for content in (message["content"], message["content"].strip()):
            at = text.find(content, start)
            if content and at >= 0:
                start = at + len(content)
                spans.append((at, start))
                break
    return spans


def _texts(encoder: Encoder, ids: Sequence[int]) -> list[str]:
    """What each token adds to the text of those before it; one that ends inside a character adds nothing yet."""
    texts: list[str] = []
    said = ""
    for end in range(1, len(ids) + 1):
        now = encoder.tokenizer.decode(list(ids[:end]), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(now, str)
        whole = now.startswith(said) and (not now.endswith("\ufffd") or end == len(ids))
        texts.append(now[len(said) :] if whole else "")
        said = now if whole else said
    return texts
