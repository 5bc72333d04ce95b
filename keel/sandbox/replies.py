"""Replies: the ideal ones, and demonstrations of mixed quality as a busy service desk would leave behind.

A reply is an opening, the answer (one sentence with both facts, or two with one each) and a closing. A demonstration
spoils each property on its own with the probability in `FLAWS`, so about one in thirteen is ideal: to answer ideally
always is some 2.6 nats away from imitating the demonstrations.
"""

import random
from collections.abc import Mapping

from keel.sandbox.lexicon import BY_NAME, CITIES, CLOSINGS, CURT, DAYS, FILLER, FITTING, ITEMS, OPENINGS, TOPICS
from keel.sandbox.templates import VAGUE_ITEM, say
from keel.sandbox.world import Request

FLAWS: dict[str, float] = {
    "no opening": 0.30,
    "opening of another mood": 0.10,
    "no answer": 0.10,
    "answer to another topic": 0.06,
    "item not named": 0.30,
    "fact not named": 0.35,
    "wrong item": 0.01,
    "wrong fact": 0.01,
    "curt sentence": 0.22,
    "filler": 0.28,
    "repetition": 0.08,
    "no closing": 0.33,
    "cut short": 0.03,
}
"""Probability of each flaw in a demonstration. Flaws of one property exclude each other."""

BY_NAME_SHARE = 0.5  # of the openings to a customer whose name is known
ONE_SENTENCE_SHARE = 0.4  # of the answers that name both facts in one sentence


def ideal_reply(request: Request, rng: random.Random) -> str:
    """A reply with every property right; its gold score is the maximum."""
    facts = request.facts
    opening = _opening(rng.choice(FITTING[request.mood]), facts, rng)
    return " ".join([opening, *_answer(request.topic, facts, True, rng), say(rng.choice(CLOSINGS), facts, rng)])


def demonstration(request: Request, rng: random.Random) -> str:
    """A reply in which each flaw of `FLAWS` occurs at its own rate."""
    facts = _told_facts(request, rng)
    opening, body = _spoilt_opening(request, rng), _spoilt_body(request, facts, rng)
    closing = [] if _flawed("no closing", rng) else [say(rng.choice(CLOSINGS), facts, rng)]
    for flaw, sentences in (("curt sentence", CURT), ("filler", FILLER)):
        if _flawed(flaw, rng):
            body.insert(rng.randint(0, len(body)), say(rng.choice(sentences), facts, rng))
    reply = opening + body + closing
    if not reply:
        reply = [say(rng.choice(FILLER), facts, rng)]
    if _flawed("repetition", rng):
        place = rng.randrange(len(reply))
        reply.insert(place, reply[place])
    text = " ".join(reply)
    if _flawed("cut short", rng):
        words = text.split(" ")
        text = " ".join(words[: -rng.randint(1, 3)]) or words[0]
        text = text.rstrip(".,!?")
    return text


def _flawed(flaw: str, rng: random.Random) -> bool:
    return rng.random() < FLAWS[flaw]


def _told_facts(request: Request, rng: random.Random) -> dict[str, str]:
    """The facts as the reply will tell them: now and then one is wrong or the item is left vague."""
    facts = dict(request.facts)
    kind = TOPICS[request.topic].fact
    if _flawed("wrong fact", rng):
        facts[kind] = rng.choice(DAYS if kind == "day" else CITIES)
    if _flawed("wrong item", rng):
        facts["item"] = rng.choice(ITEMS)
    elif _flawed("item not named", rng):
        facts["item"] = VAGUE_ITEM
    return facts


def _opening(kind: str, facts: Mapping[str, str], rng: random.Random) -> str:
    sentence = say(rng.choice(OPENINGS[kind]), facts, rng)
    if "name" in facts and rng.random() < BY_NAME_SHARE:
        return say(BY_NAME, facts, rng) + " " + sentence[0].lower() + sentence[1:]
    return sentence


def _spoilt_opening(request: Request, rng: random.Random) -> list[str]:
    fate, fitting = rng.random(), FITTING[request.mood]
    if fate < FLAWS["no opening"]:
        return []
    if fate < FLAWS["no opening"] + FLAWS["opening of another mood"]:
        fitting = tuple(kind for kind in OPENINGS if kind not in fitting)
    return [_opening(rng.choice(fitting), request.facts, rng)]


def _spoilt_body(request: Request, facts: Mapping[str, str], rng: random.Random) -> list[str]:
    fate, topic = rng.random(), request.topic
    if fate < FLAWS["no answer"]:
        return []
    if fate < FLAWS["no answer"] + FLAWS["answer to another topic"]:
        # A topic with the same kind of second fact, so that the reply is wrong in one way only.
        topic = rng.choice([key for key in TOPICS if TOPICS[key].fact == TOPICS[topic].fact and key != topic])
    return _answer(topic, facts, not _flawed("fact not named", rng), rng)


def _answer(topic: str, facts: Mapping[str, str], complete: bool, rng: random.Random) -> list[str]:
    if complete and rng.random() < ONE_SENTENCE_SHARE:
        return [say(rng.choice(TOPICS[topic].full), facts, rng)]
    answer = [say(rng.choice(TOPICS[topic].answers), facts, rng)]
    return [*answer, say(rng.choice(TOPICS[topic].details), facts, rng)] if complete else answer
