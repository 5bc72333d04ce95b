"""The small template language that every sentence of the sandbox is written in.

`[a|b|c]` is a choice (an option may be empty), `{item}`, `{day}`, `{city}`, `{name}` are facts. `say` turns a template
into a sentence, `expansions` lists all sentences a template can become with its facts left open, and `open_facts` turns
a sentence back into that form. Parsing a sentence is therefore one dictionary look-up: exact, and as wide as the
grammar.
"""

import itertools
import random
import re
from collections.abc import Mapping

from keel.sandbox.lexicon import CITIES, DAYS, ITEMS, NAMES

FACT_WORDS: dict[str, str] = {
    **dict.fromkeys(ITEMS, "item"),
    **dict.fromkeys(DAYS, "day"),
    **dict.fromkeys(CITIES, "city"),
    **dict.fromkeys(NAMES, "name"),
}
"""Each word that is a fact, and which kind of fact. No template uses one of them as a plain word."""

VAGUE_ITEM = "item"
"""What a reply says where it does not name the thing: "your item"."""

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SLOT = re.compile(r"\{(\w+)\}")
_WORD = re.compile(r"[A-Za-z]+")


def say(template: str, facts: Mapping[str, str], rng: random.Random) -> str:
    """One sentence of `template`: choices drawn from `rng`, slots filled from `facts` (KeyError if one is missing)."""
    chosen = _CHOICE.sub(lambda choice: rng.choice(choice.group(1).split("|")), template)
    return _tidy(_SLOT.sub(lambda slot: facts[slot.group(1)], chosen))


def expansions(template: str) -> list[str]:
    """Every sentence of `template`, with its slots still open."""
    parts = _CHOICE.split(template)  # odd places hold the choices
    options = [part.split("|") if place % 2 else [part] for place, part in enumerate(parts)]
    return [_tidy("".join(chosen)) for chosen in itertools.product(*options)]


def open_facts(sentence: str) -> tuple[str, list[tuple[str, str]]]:
    """The sentence with each fact word replaced by its slot, and the (kind, word) pairs in order.

    The vague word for the thing counts as an open `{item}` slot that names nothing.
    """
    found: list[tuple[str, str]] = []

    def slot(match: re.Match[str]) -> str:
        word = match.group()
        if word == VAGUE_ITEM:
            return "{item}"
        kind = FACT_WORDS.get(word)
        if kind is None:
            return word
        found.append((kind, word))
        return "{" + kind + "}"

    return _WORD.sub(slot, sentence), found


def _tidy(text: str) -> str:
    """Single spaces, none before a stop: what an empty choice leaves behind is removed."""
    return re.sub(r" +([.,!?])", r"\1", re.sub(r" +", " ", text)).strip()
