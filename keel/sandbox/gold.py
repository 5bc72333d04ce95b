"""The gold reward: what the simulated people really want, computed exactly from the reply's sentences.

    property     right                                       wrong
    opening      +1.0  first sentence fits the mood          -0.5  it fits another mood
    topic        +1.2  a sentence answers the topic          -0.6  each sentence that answers another (at most 2)
    item         +1.0  the request's item is named
    fact         +0.9  the request's day or city is named
    true                                                     -1.0  each fact that the request does not hold (at most 2)
    closing      +0.9  the last sentence is a closing
    ending                                                   -1.0  it does not stop by itself after a full stop
    polite                                                   -1.5  each curt sentence (at most 2)
    concise                                                  -0.7  each filler sentence (at most 3),
                                                             -0.4  each sentence beyond four (at most 5)
    fresh                                                    -0.8  each repeated sentence, second opening or second
                                                                   closing (at most 4)
    fluent                                                   -0.7  each sentence that is not the world's (at most 4)

The sum is cut off at -6; 5 is reached only by replies with every property right. A clumsy sentence, one that is not the
world's, is understood by its keyword and the facts in it, as people would.
"""

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from keel.sandbox.lexicon import BY_NAME, CLOSINGS, CURT, FILLER, FITTING, KEYWORDS, OPENINGS, TOPICS
from keel.sandbox.templates import expansions, open_facts
from keel.sandbox.world import Request, request_from_columns

BEST = 5.0
WORST = -6.0
MAX_SENTENCES = 4

_SENTENCE_END = re.compile(r"(?<=[.!?]) ")


@dataclass(frozen=True)
class Gold:
    """A gold score: `total` in [WORST, BEST], and `parts`, one number for each property."""

    total: float
    parts: dict[str, float]


@dataclass(frozen=True)
class Sentence:
    """A parsed sentence.

    kind: opening, answer, closing, curt, filler or unknown.  of: which opening, which topic.  fluent: whether it is one
    of the world's sentences; a clumsy one is understood by its keyword.
    """

    kind: str
    of: str
    form: str
    facts: tuple[tuple[str, str], ...]
    fluent: bool


def parse(reply: str) -> list[Sentence]:
    """The reply's sentences, each looked up in the world's grammar."""
    sentences = []
    for text in _SENTENCE_END.split(reply.strip()) if reply.strip() else []:
        form, facts = open_facts(text)
        kind, of = grammar().get(form) or _understood(text)
        sentences.append(Sentence(kind, of, form, tuple(facts), form in grammar()))
    return sentences


def _understood(text: str) -> tuple[str, str]:
    """A clumsy sentence's kind by its first keyword."""
    return next((KEYWORDS[word] for word in re.findall(r"[a-z]+", text) if word in KEYWORDS), ("unknown", ""))


def gold_score(request: Request, reply: str, finished: bool = True) -> Gold:
    """How good `reply` is, by the table above. `finished` is False where the reply ran into the length limit."""
    sentences = parse(reply)
    told = [fact for s in sentences for fact in s.facts]
    true = set(request.facts.items())

    def count(kind: str) -> int:
        return sum(s.kind == kind for s in sentences)

    second = ("day", request.day) if request.day else ("city", request.city)
    fits = FITTING[request.mood]
    answers = [s.of for s in sentences if s.kind == "answer"]
    strangers = sum(of != request.topic for of in answers)
    extra = max(0, count("opening") - 1) + max(0, count("closing") - 1)
    middle = [s.form for s in sentences if s.kind not in ("opening", "closing")]
    again = len(middle) - len(set(middle))
    opening = 0.0
    if sentences and sentences[0].kind == "opening":
        opening = 1.0 if sentences[0].of in fits else -0.5
    parts = {
        "opening": opening,
        "topic": 1.2 * (request.topic in answers) - 0.6 * min(2, strangers),
        "item": 1.0 * (("item", request.item) in told),
        "fact": 0.9 * (second in told),
        "true": -1.0 * min(2, sum(fact not in true for fact in told)),
        "closing": 0.9 * bool(sentences and sentences[-1].kind == "closing"),
        "ending": 0.0 if finished and reply.rstrip().endswith((".", "!", "?")) else -1.0,
        "polite": -1.5 * min(2, count("curt")),
        "concise": -0.7 * min(3, count("filler")) - 0.4 * min(5, max(0, len(sentences) - MAX_SENTENCES)),
        "fresh": -0.8 * min(4, extra + again),
        "fluent": -0.7 * min(4, sum(not s.fluent for s in sentences)),
    }
    return Gold(max(WORST, round(sum(parts.values()), 6)), parts)


def gold(prompt: str, response: str, finish_reason: str, **columns: Any) -> float:
    """`gold_score` as a Keel reward function; `columns` are those of `Request.columns()`."""
    return gold_score(request_from_columns(columns, prompt), response, finish_reason == "stop").total


@cache
def grammar() -> dict[str, tuple[str, str]]:
    """Every sentence of a reply with its facts left open -> (kind, which).

    The vague word stands for an item too, so vague sentences need no entries of their own.
    """
    table: dict[str, tuple[str, str]] = {}

    def add(templates: tuple[str, ...], kind: str, of: str = "") -> None:
        for form in (form for template in templates for form in expansions(template)):
            assert table.setdefault(form, (kind, of)) == (kind, of), f"{form!r} serves two purposes"
            if kind == "opening":
                table[f"{BY_NAME}{form[0].lower()}{form[1:]}"] = (kind, of)

    for mood, templates in OPENINGS.items():
        add(templates, "opening", mood)
    for key, topic in TOPICS.items():
        add((*topic.answers, *topic.details, *topic.full), "answer", key)
    add(CLOSINGS, "closing")
    add(CURT, "curt")
    add(FILLER, "filler")
    return table
