"""Ids worked by hand on a tiny vocabulary, then what must hold for any text: prefix, one BOS, one EOS, padding."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from keel.data.encode import DEFAULT_CHAT_TEMPLATE, Encoder, eos_ids_of, micro_batches, pad_sequences, padding_share
from keel.errors import ConfigError, DataError, ModelError
from keel.types import Prompt, TokenSequence

VOCABULARY = ["<unk>", "<s>", "</s>", "<pad>", "<end>", "[user]", "[system]", "[bot]", "a", "b", "c", "d", "e", "."]
UNK, BOS, EOS, PAD, END, USER, SYSTEM, BOT, A, B, C, D, E, DOT = range(14)
TEMPLATE = (
    "{{ bos_token }} {% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }} {% endfor %}{% if add_generation_prompt %}[bot]{% endif %}"
)


def words(*, adds_bos: bool = True, pad: str | None = "<pad>", template: Any = TEMPLATE, eos: str | None = "</s>"):
    """One id a word, in the order of VOCABULARY."""
    raw = Tokenizer(models.WordLevel({word: number for number, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_bos:
        raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": eos, "pad_token": pad}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, **{name: token for name, token in names.items() if token})
    tokenizer.chat_template = template
    return tokenizer


def letters(*, adds_bos: bool) -> PreTrainedTokenizerFast:
    """Byte-level BPE whose end, begin and padding token are one and the same, as in GPT-2."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(["the reply to the request: the reply is here , and there ."] * 5, trainer)
    if adds_bos:
        raw.post_processor = processors.TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<|end|>", eos_token="<|end|>", pad_token="<|end|>", unk_token="<|end|>"
    )


def encoder(tokenizer, template: Any = "plain", prompt: int = 8, response: int = 4, eos_ids=(EOS,)) -> Encoder:
    return Encoder(tokenizer, template, prompt, response, eos_ids)


def says(*contents: str, system: str | None = None) -> Prompt:
    turns = [{"role": "system", "content": system}] if system else []
    return Prompt((*turns, *({"role": "user", "content": content} for content in contents)), source="file:7")


class TestPrompt:
    def test_plain_has_the_bos_that_the_tokenizer_adds(self):
        assert encoder(words()).prompt_ids(says("a b")) == (BOS, A, B)
        assert encoder(words(adds_bos=False)).prompt_ids(says("a b")) == (A, B)

    @pytest.mark.parametrize("adds_bos", [True, False])
    def test_chat_has_the_one_bos_of_its_template(self, adds_bos: bool):
        ids = encoder(words(adds_bos=adds_bos), "chat").prompt_ids(says("a b", system="c"))
        assert ids == (BOS, SYSTEM, C, USER, A, B, BOT)

    def test_a_template_without_bos_is_taken_at_its_word(self):
        template = TEMPLATE.replace("{{ bos_token }} ", "")
        assert encoder(words(template=template), "chat").prompt_ids(says("a")) == (USER, A, BOT)

    def test_without_a_template_the_default_one_with_the_tokenizers_own_bos(self):
        for adds_bos in (True, False):
            made = encoder(letters(adds_bos=adds_bos), "chat", prompt=99, eos_ids=(0,))
            ids = made.prompt_ids(says("the request", system="reply"))
            assert made.decode(ids) == "### System:\nreply\n\n### User:\nthe request\n\n### Assistant:\n"
            assert ids.count(0) == int(adds_bos) == int(ids[0] == 0)
            assert made.template_name == "keel-default"
            assert made.chat_template == ("{{ bos_token }}" if adds_bos else "") + DEFAULT_CHAT_TEMPLATE

    def test_the_template_saved_with_the_tokenizer_gives_the_same_ids(self):
        tokenizer = letters(adds_bos=True)
        made = encoder(tokenizer, "chat", prompt=99, eos_ids=(0,))
        ids = made.prompt_ids(says("the request"))
        tokenizer.chat_template = made.chat_template
        messages = list(says("the request").messages)
        theirs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert theirs == list(ids)

    def test_names_of_templates(self):
        assert encoder(words()).template_name == "plain" and encoder(words()).chat_template is None
        assert (
            encoder(words(), "chat").template_name == "tokenizer" and encoder(words(), "chat").chat_template == TEMPLATE
        )

    def test_cut_from_the_left_keeps_bos_and_the_end(self):
        plain, chat = encoder(words(), prompt=4), encoder(words(), "chat", prompt=4)
        assert plain.prompt_ids(says("a b c")) == (BOS, A, B, C) and not plain.counts
        assert plain.prompt_ids(says("a b c d")) == (BOS, B, C, D)
        assert chat.prompt_ids(says("a b c")) == (BOS, B, C, BOT)
        assert plain.counts == chat.counts == {"prompts cut": 1}

    def test_cut_without_bos(self):
        assert encoder(words(adds_bos=False), prompt=2).prompt_ids(says("a b c")) == (B, C)
        assert encoder(words(), prompt=1).prompt_ids(says("a b c")) == (C,)

    def test_plain_refuses_several_messages(self):
        with pytest.raises(DataError, match="one message; this prompt has 2") as caught:
            encoder(words()).prompt_ids(says("a", "b"))
        assert caught.value.where == "file:7" and "chat template" in caught.value.remedy

    def test_a_template_that_refuses(self):
        with pytest.raises(DataError, match="no tools") as caught:
            encoder(words(), "chat").prompt_ids(Prompt(({"role": "tool", "content": "a"},), source="file:9"))
        assert caught.value.where == "file:9"

    def test_no_token(self):
        with pytest.raises(DataError, match="no token"):
            encoder(words(adds_bos=False)).prompt_ids(says(" "))

    def test_several_templates_without_a_default(self):
        with pytest.raises(ModelError, match="none is its default"):
            encoder(words(template={"one": "x", "two": "y"}), "chat")

    @pytest.mark.parametrize("limits", [{"prompt": 0}, {"response": 0}])
    def test_limits(self, limits):
        with pytest.raises(ConfigError, match="is 0"):
            encoder(words(), **limits)


class TestSequence:
    @pytest.mark.parametrize(
        ("response", "ids", "counts"),
        [
            ("a b", (A, B, EOS), {}),
            ("a b </s>", (A, B, EOS), {}),
            ("a b </s> </s>", (A, B, EOS), {}),
            ("a <end>", (A, END), {}),  # the second end token is one as well
            ("a </s> b", (A, EOS), {"responses with an end token inside": 1}),
            ("", (EOS,), {}),
            ("a b c", (A, B, C, EOS), {}),
            ("a b c d", (A, B, C, D), {"responses cut": 1}),
            ("a b c d </s>", (A, B, C, D), {"responses cut": 1}),
            ("a b c d e", (A, B, C, D), {"responses cut": 1}),
        ],
    )
    @pytest.mark.parametrize("template", ["plain", "chat"])
    def test_one_end_token(self, template, response, ids, counts):
        made = encoder(words(), template, eos_ids=(EOS, END))
        sequence = made.sequence(says("a b"), response)
        assert sequence.response_ids == ids
        assert sequence.prompt_ids == made.prompt_ids(says("a b"))
        assert made.counts == counts

    @pytest.mark.parametrize("adds_bos", [True, False])
    @pytest.mark.parametrize("template", ["plain", "chat"])
    @given(prompt=st.text(min_size=1), response=st.text())
    def test_any_text(self, adds_bos, template, prompt, response):
        """The prompt's ids are a prefix; the response's text returns whole; one end token, at the end."""
        made = encoder(LETTERS[adds_bos], template, prompt=10**6, response=10**6, eos_ids=(0,))
        sequence = made.sequence(says(prompt), response)
        assert sequence.prompt_ids == made.prompt_ids(says(prompt))
        assert made.decode(sequence.response_ids) == response
        assert sequence.response_ids[-1] == 0 and sequence.response_ids.count(0) == 1
        assert sequence.prompt_ids.count(0) == int(adds_bos)

    def test_decode_leaves_blanks_before_signs_alone(self):
        tokenizer = words()
        tokenizer.clean_up_tokenization_spaces = True  # as in tokenizers of the BERT family
        assert encoder(tokenizer).decode([A, DOT, EOS]) == "a ."


LETTERS = {adds_bos: letters(adds_bos=adds_bos) for adds_bos in (True, False)}


class TestEndTokens:
    @pytest.mark.parametrize(
        ("config", "ids"), [(None, (EOS,)), (END, (EOS, END)), ([END, EOS], (EOS, END)), ([EOS], (EOS,))]
    )
    def test_union(self, config, ids):
        assert eos_ids_of(words(), GenerationConfig(eos_token_id=config)) == ids
        assert eos_ids_of(words()) == (EOS,)

    def test_a_tokenizer_without_one(self):
        with pytest.raises(ModelError, match="no end token") as caught:
            eos_ids_of(words(eos=None), GenerationConfig(eos_token_id=END))
        assert "eos_token" in caught.value.remedy

    def test_padding_id(self):
        assert encoder(words()).pad_id == PAD
        assert encoder(words(pad="</s>")).pad_id == EOS
        assert encoder(words(pad=None), eos_ids=(END, EOS)).pad_id == END
        assert encoder(words(), eos_ids=(END, EOS)).eos_id == END


class TestFingerprint:
    def test_the_same_things_give_the_same_one(self):
        used = encoder(words())
        used.tokenizer(["a b", "a"], padding=True)  # leaves its padding behind in the tokenizer
        assert used.fingerprint() == encoder(words()).fingerprint()
        assert len(used.fingerprint()) == 64

    def test_whatever_changes_ids_changes_it(self):
        one_more = words()
        one_more.add_tokens(["f"])
        made = [
            encoder(words()),
            encoder(words(), "chat"),
            encoder(words(template=None), "chat"),
            encoder(words(template=TEMPLATE + " "), "chat"),
            encoder(words(), prompt=9),
            encoder(words(), response=5),
            encoder(words(), eos_ids=(EOS, END)),
            encoder(words(adds_bos=False)),
            encoder(words(pad="</s>")),
            encoder(one_more),
            encoder(LETTERS[True]),
        ]
        assert len({each.fingerprint() for each in made}) == len(made)


class TestBatches:
    def test_padding_equal_to_the_end_token_is_told_apart_by_position(self):
        ids_BS, response_mask_BS, lengths_B = pad_sequences(
            [TokenSequence((BOS, A), (B, EOS)), TokenSequence((C,), (EOS,)), TokenSequence((A, B, C), (D, E))], EOS
        )
        assert ids_BS.tolist() == [[BOS, A, B, EOS, EOS], [C, EOS, EOS, EOS, EOS], [A, B, C, D, E]]
        assert response_mask_BS.int().tolist() == [[0, 0, 1, 1, 0], [0, 1, 0, 0, 0], [0, 0, 0, 1, 1]]
        assert lengths_B.tolist() == [4, 2, 5]
        assert (ids_BS.dtype, response_mask_BS.dtype, lengths_B.dtype) == (torch.int64, torch.bool, torch.int64)

    def test_micro_batches_by_hand(self):
        assert micro_batches([3, 9, 2, 3, 5], tokens=8) == [[1], [4], [0, 3], [2]]
        assert micro_batches([3, 9, 2, 3, 5], tokens=10) == [[1], [4, 0], [3, 2]]
        assert micro_batches([], tokens=8) == []

    def test_padding_by_hand(self):
        # Two rows of 5 and 3 in ten places, one of 2 in two: 10 of 12 are tokens.
        assert padding_share([3, 5, 2], [[1, 0], [2]]) == pytest.approx(1 / 6)
        assert padding_share([4, 4], [[0, 1]]) == 0 and padding_share([], []) == 0

    @given(st.lists(st.integers(1, 90), max_size=60), st.sampled_from([10, 300, 2000, 8192]), st.integers(1, 4))
    def test_micro_batches_hold_every_row_once_within_the_budget(self, lengths: list[int], tokens: int, workers: int):
        groups = micro_batches(lengths, tokens, workers)
        assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
        for group in groups:
            longest = max(lengths[row] for row in group)
            assert len(group) == 1 or len(group) * longest <= tokens
        for group, after in pairwise(groups):
            assert min(lengths[row] for row in group) >= max(lengths[row] for row in after)

    def test_large_groups_hold_little_padding(self):
        lengths = [40 + row % 70 for row in range(256)]
        groups = micro_batches(lengths, 8192)
        padded = sum(len(group) * lengths[group[0]] for group in groups)
        assert padded < 1.1 * sum(lengths) and max(map(len, groups)) * 110 < 8192
        assert micro_batches([100] * 64, 8192) == [list(range(64))]  # where all are alike, the budget alone decides

    def test_workers_get_even_parts(self):
        lengths = [60 + row % 31 for row in range(16)]
        first, second = micro_batches(lengths, 8192, 2)
        assert abs(sum(lengths[i] for i in first) - sum(lengths[i] for i in second)) <= 90
        assert micro_batches([10] * 20, 8192, 2) == [list(range(20))]  # too little to share
