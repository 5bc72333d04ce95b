"""Loss on every turn of the assistant: masks worked by hand, gaps for users and tools, drifting templates (case 7)."""

import json
from pathlib import Path

import pytest
import torch

from keel.data.encode import Encoder, pad_sequences
from keel.data.formats import read_demonstrations
from keel.types import Prompt, TokenSequence
from tests.data.test_encode import BOS, BOT, END, EOS, SYSTEM, USER, A, B, C, D, E, letters, words

ENDED = (
    "{{ bos_token }} {% for m in messages %}{% if m.role == 'assistant' %}[bot] {{ m.content }} </s> {% else %}"
    "[{{ 'user' if m.role == 'tool' else m.role }}] {{ m.content }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[bot]{% endif %}"
)
"""Ends each turn of the assistant with the end token; a tool speaks where a user does."""

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DROPS = CHATML.replace(
    "{{ m.content }}", "{{ m.content if loop.last else (m.content.split('</think>') | last).lstrip('\n') }}"
)
"""As templates of reasoning models have it: what was thought before an earlier answer is left out."""


def chat(*contents: str, first: str = "user") -> Prompt:
    """Turns in turn, the user's first; "system:", "tool:" or "assistant:" before a text names another speaker."""
    turns, speaker = [], first
    for content in contents:
        name, found, text = content.partition(":")
        turns.append({"role": name, "content": text} if found else {"role": speaker, "content": content})
        speaker = {"user": "assistant", "assistant": "user", "tool": "assistant"}.get(turns[-1]["role"], speaker)
    return Prompt(tuple(turns))


def tiny(template: str = ENDED, prompt: int = 99, response: int = 9, eos_ids=(EOS,)) -> Encoder:
    return Encoder(words(template=template), "chat", prompt, response, eos_ids)


def whole(sequence: TokenSequence) -> tuple[tuple[int, ...], list[int]]:
    ids, mask, _ = pad_sequences([sequence], 0)
    return tuple(ids[0].tolist()), mask[0].int().tolist()


class TestEveryTurn:
    def test_two_turns_are_one_sequence_with_a_gap_for_the_user(self):
        """<s> [user] a [bot] b </s> [user] c [bot] d </s>: learned are b </s> and d </s>."""
        (one,) = tiny().turns(chat("a", "b", "c"), "d")
        assert whole(one) == (
            (BOS, USER, A, BOT, B, EOS, USER, C, BOT, D, EOS),
            [0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1],
        )
        assert one.prompt_ids == (BOS, USER, A, BOT) and one.response_mask == (True, True, *[False] * 3, True, True)

    def test_the_last_turn_alone_is_the_same_ids_with_another_mask(self):
        made = tiny()
        (every,) = made.turns(chat("a", "b", "c"), "d")
        ids, mask = whole(made.sequence(chat("a", "b", "c"), "d"))
        assert ids == whole(every)[0] and mask == [0] * 9 + [1, 1]

    def test_a_tool_is_a_gap(self):
        """system, user, call, tool, answer: the tool's tokens e e are seen and not learned."""
        (one,) = tiny().turns(chat("system:c", "a", "b", "tool:e e"), "d d")
        assert whole(one) == (
            (BOS, SYSTEM, C, USER, A, BOT, B, EOS, USER, E, E, BOT, D, D, EOS),
            [0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 1],
        )

    def test_observations_and_calls_of_sharegpt(self, tmp_path: Path):
        said = [("human", "a"), ("function_call", "b"), ("observation", "e"), ("gpt", "d")]
        row = {"conversations": [{"from": name, "value": text} for name, text in said]}
        (tmp_path / "a.jsonl").write_text(json.dumps(row))
        (read,) = read_demonstrations(tmp_path / "a.jsonl").records
        assert [m["role"] for m in read.prompt.messages] == ["user", "assistant", "tool"]
        (one,) = tiny().turns(read.prompt, read.response)
        assert whole(one) == (
            (BOS, USER, A, BOT, B, EOS, USER, E, BOT, D, EOS),
            [0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1],
        )

    def test_one_turn_is_the_plain_sequence(self):
        made = tiny()
        assert made.turns(chat("a"), "b c") == [made.sequence(chat("a"), "b c")]

    def test_an_empty_turn_and_a_greeting_carry_no_loss(self):
        (one,) = tiny().turns(chat("assistant:e", "a", "", "c"), "d")
        assert one.response_mask is None and one.response_ids == (D, EOS)

    def test_every_turn_is_what_a_sampler_would_be_asked_there(self):
        """Whatever is joined: the ids before each learned run are the prompt of that turn."""
        made, prompt = tiny(), chat("a b", "c", "d", "e", "tool:a", "b", "c c")
        asked = [made.prompt_ids(Prompt(prompt.messages[:at])) for at in (1, 3, 5)] + [made.prompt_ids(prompt)]
        (one,) = made.turns(prompt, "d")
        ids, mask = whole(one)
        starts = [at for at in range(1, len(ids)) if mask[at] and not mask[at - 1]]
        assert [ids[:start] for start in starts] == asked

    def test_what_is_cut_of_a_response_is_a_gap(self):
        """Of b b b </s> two tokens are learned; the next turn is asked after all of it, as in evaluation."""
        (one,) = tiny(response=2).turns(chat("a", "b b b", "c"), "d")
        assert whole(one) == (
            (BOS, USER, A, BOT, B, B, B, EOS, USER, C, BOT, D, EOS),
            [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1],
        )

    def test_a_prompt_that_was_cut_begins_another_sequence(self):
        first, second = tiny(prompt=6).turns(chat("a", "b", "c c"), "d")
        assert first.prompt_ids == (BOS, USER, A, BOT) and second.prompt_ids == (BOS, EOS, USER, C, C, BOT)

    def test_the_second_of_two_end_tokens_closes_a_turn_too(self):
        """The template writes <end>, the tokenizer's own end token is </s>: each turn is right, in its own sequence."""
        first, second = tiny(ENDED.replace("</s>", "<end>"), eos_ids=(EOS, END)).turns(chat("a", "b", "c"), "d")
        assert first.response_ids == (B, EOS) and second.prompt_ids[4:6] == (B, END)


class TestDrift:
    def test_case_7_a_template_that_drops_reasoning_from_earlier_turns(self):
        made = Encoder(letters(adds_bos=False), "chat", 999, 999, (0,))
        made.tokenizer.chat_template = made.chat_template = DROPS
        told = made.drift()
        assert "trained: " in told and "<think>" in told.partition("in later prompts")[0]
        assert "assistant\\nYes." in told.partition("in later prompts")[2]
        thought = "<think>\nhm\n</think>\n\nyes"
        first, second = made.turns(chat("ask", thought, "again"), "no")
        assert made.decode(first.response_ids) == thought and "hm" not in made.decode(second.prompt_ids)
        assert second.response_mask is None
        (joined,) = made.turns(chat("ask", "yes", "again"), "no")  # without reasoning nothing is dropped
        assert made.decode([t for t, on in zip(joined.response_ids, joined.spoken, strict=True) if on]) == "yesno"

    def test_a_template_that_leaves_turns_as_they_were(self):
        made = Encoder(letters(adds_bos=False), "chat", 999, 999, (0,))
        made.chat_template = CHATML
        assert made.drift() == ""

    def test_keels_own_template_ends_no_turn_with_the_end_token(self):
        made = Encoder(letters(adds_bos=True), "chat", 999, 999, (0,))
        assert "Yes.<|end|>" in made.drift() and "Yes.\\n\\n### User" in made.drift()
        assert len(made.turns(chat("ask", "yes", "again"), "no")) == 2

    def test_a_template_for_one_turn_and_none_at_all(self):
        single = "{% if messages | length > 1 %}{{ raise_exception('one turn') }}{% endif %}{{ messages[0].content }}"
        assert tiny(single).drift() == "" and Encoder(words(), "plain", 9, 9, (EOS,)).drift() == ""


def test_masks_of_a_batch_with_gaps_and_padding_equal_to_the_end_token():
    (gaps,) = tiny().turns(chat("a", "b", "c"), "d")
    ids_BS, mask_BS, lengths_B = pad_sequences([TokenSequence((BOS, A), (B, EOS)), gaps], EOS)
    assert ids_BS[0].tolist() == [BOS, A, B, EOS, *[EOS] * 7]
    assert mask_BS.int().tolist() == [[0, 0, 1, 1, *[0] * 7], [0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1]]
    assert lengths_B.tolist() == [4, 11] and mask_BS.dtype == torch.bool


@pytest.mark.parametrize("family", ["byte_level", "unigram"])
def test_families_of_tokenizers_join_turns_where_the_template_ends_them(family: str):
    from tests.golden.test_encoding import CHATML as MARKED
    from tests.golden.test_encoding import FAMILIES

    made = FAMILIES[family]()
    end = made.tokenizer.convert_ids_to_tokens(made.eos_id)
    made.chat_template = MARKED.replace("<|im_end|>", str(end))
    made.max_prompt_tokens = 999
    (one,) = made.turns(chat("ask me", "yes", "no?"), "no")
    learned = [token for token, on in zip(one.response_ids, one.spoken, strict=True) if on]
    assert learned.count(made.eos_id) == 2 and learned[-1] == made.eos_id
    assert made.decode(learned).replace(" ", "") == "yesno"
