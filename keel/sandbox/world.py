"""Requests: what customers write, drawn from the lexicon, split so that training never sees held-out combinations."""

import hashlib
import random
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from keel.errors import DataError
from keel.sandbox.lexicon import CITIES, DAYS, INTRODUCTIONS, ITEMS, MOODS, NAMES, SIGNATURES, TOPICS, Mood
from keel.sandbox.templates import say

Split = Literal["train", "heldout"]

HELDOUT_SHARE = 0.1
MAX_REQUESTS = 100_000
NAMED_SHARE = 0.6  # of the requests carry the customer's name
MOOD_FIRST_SHARE = 0.3


@dataclass(frozen=True)
class Request:
    """A customer's message and what is true of it.

    topic, mood, item: keys and words of the lexicon.  day, city: the second fact; the one the topic does not use is "".
    name: the customer's first name, "" where the message does not give it.  text: the message.
    """

    topic: str
    mood: Mood
    item: str
    day: str
    city: str
    name: str
    text: str

    @property
    def facts(self) -> dict[str, str]:
        """Kind -> word of every fact that the message gives."""
        kinds = {"item": self.item, "day": self.day, "city": self.city, "name": self.name}
        return {kind: word for kind, word in kinds.items() if word}

    def columns(self) -> dict[str, Any]:
        """All but the text, as the extra columns of a prompt file (plain JSON values)."""
        row = asdict(self)
        del row["text"]
        return row


def request_from_columns(columns: dict[str, Any], text: str = "") -> Request:
    """The request that `columns` describes; columns of other names are left alone.

    Raises:
        DataError: a column is missing or holds a word that the world does not know.
    """
    known = {
        "topic": TOPICS,
        "mood": MOODS,
        "item": ITEMS,
        "day": ("", *DAYS),
        "city": ("", *CITIES),
        "name": ("", *NAMES),
    }
    for key, words in known.items():
        if columns.get(key) not in words:
            raise DataError(
                f"sandbox column {key!r} is {columns.get(key)!r}, which the sandbox world does not know",
                where=f"column {key}",
                remedy="use prompts made by keel.sandbox.requests, with all columns of Request.columns()",
            )
    return Request(**{key: columns[key] for key in known}, text=text)


def split_of(topic: str, item: str, mood: str) -> Split:
    """Which split a combination belongs to, by a hash that no seed or version changes."""
    digest = hashlib.sha256(f"shop|{topic}|{item}|{mood}".encode()).digest()
    return "heldout" if digest[0] < 256 * HELDOUT_SHARE else "train"


def requests(seed: int, count: int, split: Split) -> list[Request]:
    """`count` distinct requests of a split; the same seed gives the same list, a longer list begins with a shorter one.

    Raises:
        DataError: an unknown split, or more requests than the world is made for.
    """
    if split not in get_args(Split):
        raise DataError(f"unknown sandbox split {split!r}", remedy="use 'train' or 'heldout'")
    if not 0 <= count <= MAX_REQUESTS:
        raise DataError(f"{count} sandbox requests asked for", remedy=f"ask for 0 to {MAX_REQUESTS}")
    rng = random.Random(f"requests|{split}|{seed}")
    found: dict[str, Request] = {}
    while len(found) < count:
        topic, item, mood = rng.choice(list(TOPICS)), rng.choice(ITEMS), rng.choice(get_args(Mood))
        if split_of(topic, item, mood) == split:
            request = _write(topic, item, mood, rng)
            found.setdefault(request.text, request)
    return list(found.values())


def _write(topic: str, item: str, mood: Mood, rng: random.Random) -> Request:
    """A message on these three, with a drawn second fact, perhaps a name, and drawn words."""
    by_day = TOPICS[topic].fact == "day"
    day, city = (rng.choice(DAYS), "") if by_day else ("", rng.choice(CITIES))
    name = rng.choice(NAMES) if rng.random() < NAMED_SHARE else ""
    facts = {"item": item, "day": day, "city": city, "name": name}
    sentences = [say(rng.choice(TOPICS[topic].requests), facts, rng), say(rng.choice(MOODS[mood]), facts, rng)]
    if rng.random() < MOOD_FIRST_SHARE:
        sentences.reverse()
    if name and rng.random() < 0.5:
        sentences.insert(0, say(rng.choice(INTRODUCTIONS), facts, rng))
    elif name:
        sentences.append(say(rng.choice(SIGNATURES), facts, rng))
    return Request(topic, mood, item, day, city, name, " ".join(sentences))
