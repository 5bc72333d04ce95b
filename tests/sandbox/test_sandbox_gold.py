"""The gold reward, worked by hand, and what demonstrations and ideal replies score."""

import random
from collections import Counter

import pytest

from keel.sandbox import Request, demonstration, gold, gold_score, ideal_reply, requests
from keel.sandbox.gold import BEST, WORST, grammar, parse
from keel.sandbox.replies import FLAWS

REQUEST = Request(
    topic="late",
    mood="angry",
    item="lamp",
    day="Monday",
    city="",
    name="Anna",
    text="The delivery of my lamp was promised for Monday. I am very angry about this. Regards, Anna.",
)
OPENING = "Dear Anna, we are very sorry that you are angry."
ANSWER = "The delivery of your lamp is on its way."
DETAIL = "The delivery was held up on Monday."
FULL = "The delivery of your lamp was held up on Monday and will reach you tomorrow."
CLOSING = "Have a nice day."


@pytest.mark.parametrize(
    ("reply", "total"),
    [
        (f"{OPENING} {ANSWER} {DETAIL} {CLOSING}", 1.0 + 1.2 + 1.0 + 0.9 + 0.9),
        (f"You have every right to be angry and we apologise. {FULL} {CLOSING}", 5.0),
        (f"{ANSWER} {DETAIL} {CLOSING}", 4.0),  # no opening
        (f"Please do not be worried. {ANSWER} {DETAIL} {CLOSING}", 3.5),  # the worried customer's opening
        (f"{OPENING} The delivery of your item is on its way. {DETAIL} {CLOSING}", 4.0),  # item not named
        (f"{OPENING} {ANSWER} {CLOSING}", 4.1),  # day not named
        (f"{OPENING} The delivery of your sofa is on its way. {DETAIL} {CLOSING}", 3.0),  # another item
        (f"{OPENING} {ANSWER} The delivery was held up on Friday. {CLOSING}", 3.1),  # another day
        (f"Dear Ben, we are very sorry that you are angry. {ANSWER} {DETAIL} {CLOSING}", 4.0),  # another name
        (f"{OPENING} You will get a full refund for the lamp. {CLOSING}", 1.0 - 0.6 + 1.0 + 0.9),  # another topic
        (f"{OPENING} {ANSWER} {DETAIL}", 4.1),  # no closing
        (f"{OPENING} Stop complaining. {ANSWER} {CLOSING}", 1.0 - 1.5 + 1.2 + 1.0 + 0.9),
        (f"{OPENING} {ANSWER} {DETAIL} We sell many nice things. {CLOSING}", 5.0 - 0.7 - 0.4),  # filler, five sentences
        (f"{OPENING} {ANSWER} {ANSWER} {CLOSING}", 4.1 - 0.8),  # repetition
        (f"{OPENING} {ANSWER} {CLOSING} We are always here to help.", 4.1 - 0.8),  # two closings
        (f"{OPENING} {OPENING} {ANSWER} {CLOSING}", 4.1 - 0.8),  # two openings
        (f"{OPENING} {ANSWER} {DETAIL} Lamp Monday lamp Monday. {CLOSING}", 5.0 - 0.7 - 0.4),  # no keyword in it
        ("lamp Monday late sorry", 1.0 + 0.9 - 1.0 - 0.7),  # facts count wherever they stand; no full stop
        ("", -1.0),
    ],
)
def test_gold_worked_by_hand(reply: str, total: float) -> None:
    score = gold_score(REQUEST, reply)
    assert score.total == pytest.approx(total, abs=1e-9)
    assert sum(score.parts.values()) == pytest.approx(total, abs=1e-9)


@pytest.mark.parametrize(
    ("reply", "total"),
    [
        (f"{OPENING} The delivery your lamp on way. {DETAIL} {CLOSING}", 5.0 - 0.7),
        (f"So sorry you is angry. {ANSWER} {DETAIL} {CLOSING}", 5.0 - 0.7),
        (f"So sorry you is worried. {ANSWER} {DETAIL} {CLOSING}", 3.5 - 0.7),  # understood, and unfitting
        (f"{OPENING} {ANSWER} {DETAIL} Refund is come. {CLOSING}", 5.0 - 0.7 - 0.4),  # a keyword is a lower-case word
        (f"{OPENING} {ANSWER} {DETAIL} The refund is come. {CLOSING}", 5.0 - 0.6 - 0.7 - 0.4),
        (f"{OPENING} The delivery your sofa on way. {DETAIL} {CLOSING}", 5.0 - 1.0 - 1.0 - 0.7),
        (f"{OPENING} The delivery refund your lamp. {DETAIL} {CLOSING}", 5.0 - 0.7),  # the first keyword decides
        ("sorry angry. delivery lamp. delivery of Monday. nice day.", 1.0 + 1.2 + 1.0 + 0.9 - 4 * 0.7),
    ],
)
def test_a_clumsy_sentence_is_understood_by_its_keyword(reply: str, total: float) -> None:
    assert gold_score(REQUEST, reply).total == pytest.approx(total, abs=1e-9)


def test_a_reply_that_does_not_stop_by_itself_loses_its_ending() -> None:
    reply = f"{OPENING} {ANSWER} {DETAIL} {CLOSING}"
    assert gold_score(REQUEST, reply, finished=False).total == 4.0
    assert gold(REQUEST.text, reply, "length", **REQUEST.columns()) == 4.0
    assert gold(REQUEST.text, reply, "stop", **REQUEST.columns()) == 5.0
    # Without its full stop the closing is lost too, and is not the world's.
    assert gold_score(REQUEST, reply.rstrip(".")).total == pytest.approx(5.0 - 1.0 - 0.9 - 0.7)


def test_the_score_is_bounded() -> None:
    assert gold_score(REQUEST, "Stop complaining. " * 40).total == WORST
    assert gold_score(REQUEST, f"{CLOSING} " * 40).total >= WORST


def test_parsing_names_each_sentence() -> None:
    reply = f"{OPENING} {ANSWER} Stop complaining. We sell nice things. The refund is come. {CLOSING}"
    assert [(s.kind, s.of, s.fluent) for s in parse(reply)] == [
        ("opening", "apology", True),
        ("answer", "late", True),
        ("curt", "", True),
        ("unknown", "", False),
        ("answer", "refund", False),
        ("closing", "", True),
    ]
    only_openings_are_by_name = parse("Dear Ben, the delivery of your item is on its way.")[0]
    assert (only_openings_are_by_name.kind, only_openings_are_by_name.fluent) == ("answer", False)


def test_every_ideal_reply_is_best_and_short() -> None:
    rng = random.Random(0)
    for request in requests(0, 1500, "train"):
        reply = ideal_reply(request, rng)
        assert gold_score(request, reply).total == BEST, (request, reply)
        assert 3 <= len(parse(reply)) <= 4


def test_ideal_replies_stay_diverse() -> None:
    # Of 8 openings (4, each with or without the name), 10 answers (3 * 3 pairs and 1 in one) and 14 closings.
    rng = random.Random(0)
    replies = Counter(ideal_reply(REQUEST, rng) for _ in range(4000))
    assert 800 < len(replies) <= 8 * 10 * 14
    assert max(replies.values()) < 0.02 * 4000


def test_demonstrations_are_mixed_as_documented() -> None:
    asked, rng = requests(1, 4000, "train"), random.Random(1)
    scores = [gold_score(request, demonstration(request, rng)) for request in asked]
    totals = [score.total for score in scores]
    mean = sum(totals) / len(totals)
    ideal = sum(total == BEST for total in totals) / len(totals)
    assert 0.05 < ideal < 0.10
    assert 2.2 < mean < 2.8 and sum((t - mean) ** 2 for t in totals) / len(totals) > 1.5**2
    wrong = {key: sum(score.parts[key] < 0 for score in scores) / len(scores) for key in scores[0].parts}
    flaws = {"polite": "curt sentence", "opening": "opening of another mood", "topic": "answer to another topic"}
    flaws["ending"] = flaws["fluent"] = "cut short"
    for key, flaw in flaws.items():
        assert wrong[key] == pytest.approx(FLAWS[flaw], abs=4 * (FLAWS[flaw] * (1 - FLAWS[flaw]) / 4000) ** 0.5), key
    assert 0 < wrong["true"] < 0.03 and wrong["concise"] > FLAWS["filler"] and wrong["item"] == wrong["fact"] == 0


def test_the_same_seed_writes_the_same_replies() -> None:
    request = requests(2, 1, "train")[0]
    first = [demonstration(request, random.Random(9)), ideal_reply(request, random.Random(9))]
    assert first == [demonstration(request, random.Random(9)), ideal_reply(request, random.Random(9))]


def test_no_sentence_has_two_purposes() -> None:
    # Building it asserts that no two purposes share a form. Openings count twice, with and without the name;
    # answers: 7 late, 6 broken, 7 refund, 7 size, 8 invoice, 8 hours, 6 stock, 6 parts.
    count = Counter(kind for kind, _ in grammar().values())
    assert count == {"opening": 2 * (4 + 3 + 3 + 4), "answer": 55, "closing": 14, "curt": 6, "filler": 6}
