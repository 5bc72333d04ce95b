"""A byte-level BPE tokenizer trained on the sandbox's own text, and the text that a base model reads."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from keel.errors import ConfigError
from keel.sandbox.world import Request

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<user>", "<assistant>")
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '<assistant>' + message['content'] + eos_token }}"
    "{% else %}{{ '<user>' + message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
"""One BOS, `<user>` before a turn of the customer, `<assistant>` before a reply and EOS after it."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of at most `vocab_size` tokens, learnt from `texts`; the same texts give the same bytes.

    Every byte has a token, so any text can be encoded and decoded without loss. Padding is a token of its own.

    Raises:
        ConfigError: `vocab_size` leaves no room for one merge beyond the special tokens and the 256 bytes.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    smallest = len(SPECIAL_TOKENS) + len(alphabet) + 1
    if vocab_size < smallest:
        raise ConfigError(
            f"a vocabulary of {vocab_size} is too small", where="vocab_size", remedy=f"use {smallest} or more"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        extra_special_tokens=["<user>", "<assistant>"],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def transcript(request: Request, reply: str) -> str:
    """What the base model is pretrained on, with loss on every token: request, reply, EOS, the desk's note, EOS.

    The note lists what the message is about: " lamp Monday Anna late angry". Nothing is ever sampled after the first
    EOS, so notes never appear in replies; but they ask for every fact in every row, and a model that reads them learns
    to copy facts much sooner. Encode with `add_special_tokens=False`; the marks are in the text.
    """
    words = (*request.facts.values(), request.topic, request.mood)
    note = "".join(f" {word}" for word in words)
    return f"<bos><user>{request.text}<assistant>{reply}<eos>{note}<eos>"
