"""What the sandbox's base model reads before any fine-tuning: transcripts with the desk's notes on them.

People who judge replies knew long before what a curt or an evasive reply is. The notes give the base model that: they
name what a message is about and what its reply does, never how much anyone likes it. What each trait is worth is in
no note; the reward model has to learn that from preferences.
"""

import random

from keel.sandbox.gold import gold_score
from keel.sandbox.world import Request

TRAITS: dict[str, tuple[str, str, str]] = {
    "opening": ("suited", "abrupt", "unsuited"),
    "topic": ("answered", "evasive", "strayed"),
    "item": ("exact", "vague", ""),
    "fact": ("precise", "partial", ""),
    "true": ("", "", "mistaken"),
    "closing": ("closed", "open", ""),
    "ending": ("", "", "unfinished"),
    "polite": ("", "", "curt"),
    "concise": ("", "", "wordy"),
    "fresh": ("", "", "repeated"),
    "fluent": ("", "", "garbled"),
}
"""Words for a property that is positive, zero and negative; "" where nobody would note it."""

WORDS_PER_NOTE = 8


def note_words(request: Request, reply: str) -> tuple[list[str], list[str]]:
    """Everything that a note could say: what is amiss in the reply, and the rest: the request's facts, topic and mood
    and the reply's other traits."""
    parts = gold_score(request, reply).parts
    amiss = [words[2] for name, words in TRAITS.items() if parts[name] < 0]
    traits = [words[0 if parts[name] > 0 else 1] for name, words in TRAITS.items() if parts[name] >= 0]
    return amiss, [*request.facts.values(), request.topic, request.mood, *filter(None, traits)]


def transcript(request: Request, reply: str, rng: random.Random) -> str:
    """Request, reply, and a note in random order, each word after an EOS: all that is amiss, and some of the rest.

    A model that reads these learns to hold every word ready at EOS, which is where a reward model looks, and learns to
    copy facts some three times sooner. Nothing is ever sampled after the first EOS, so notes never appear in replies.
    Encode with `add_special_tokens=False`; the marks are in the text.
    """
    amiss, rest = note_words(request, reply)
    words = amiss + rng.sample(rest, min(max(0, WORDS_PER_NOTE - len(amiss)), len(rest)))
    rng.shuffle(words)
    note = "".join(f"<eos> {word}" for word in words)
    return f"<bos><user>{request.text}<assistant>{reply}{note}"
