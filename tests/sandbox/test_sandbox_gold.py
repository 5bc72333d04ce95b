"""The gold reward, worked by hand, and what demonstrations and ideal replies score."""

import random

import pytest

from keel.sandbox import Request, demonstration, gold, gold_score, ideal_reply, requests
from keel.sandbox.gold import BEST, WORST, grammar, parse

REQUEST = Request(
    topic="late",
    mood="angry",
    item="lamp",
    day="Monday",
    city="",
    name="Anna",
    text="My lamp should have arrived on Monday, but it did not. I am very angry. Regards, Anna.",
)
OPENING = "Dear Anna, we are very sorry about this."
ANSWER = "Your lamp is on its way."
DETAIL = "It was held up on Monday."
CLOSING = "Have a nice day."


@pytest.mark.parametrize(
    ("reply", "total"),
    [
        (f"{OPENING} {ANSWER} {DETAIL} {CLOSING}", 5.0),
        (f"We apologise for this. Your lamp was held up on Monday and is on its way. {CLOSING}", 5.0),
        (f"{ANSWER} {DETAIL} {CLOSING}", 3.9),  # no opening
        (f"Please do not worry. {ANSWER} {DETAIL} {CLOSING}", 3.1),  # the worried customer's opening
        (f"{OPENING} Your item is on its way. {DETAIL} {CLOSING}", 4.0),  # item not named
        (f"{OPENING} {ANSWER} {CLOSING}", 4.2),  # day not named
        (f"{OPENING} Your sofa is on its way. {DETAIL} {CLOSING}", 3.0),  # another item
        (f"{OPENING} {ANSWER} It was held up on Friday. {CLOSING}", 3.2),  # another day
        (f"Dear Ben, we are very sorry about this. {ANSWER} {DETAIL} {CLOSING}", 4.0),  # another name
        (f"{OPENING} You will get your money back for the lamp. {CLOSING}", 1.1 + 1.0 - 1.0 + 0.7),  # another topic
        (f"{OPENING} {ANSWER} {DETAIL}", 4.3),  # no closing
        (f"{OPENING} Stop complaining. {ANSWER} {CLOSING}", 1.1 - 1.5 + 1.4 + 1.0 + 0.7),
        (f"{OPENING} {ANSWER} {DETAIL} We sell many nice things. {CLOSING}", 5.0 - 0.7 - 0.4),  # filler, five sentences
        (f"{OPENING} {ANSWER} {ANSWER} {CLOSING}", 4.2 - 0.8),  # repetition
        (f"{OPENING} {ANSWER} {CLOSING} We wish you a good day.", 4.2 - 0.8),  # two closings
        (f"{OPENING} {ANSWER} {DETAIL} Lamp Monday lamp Monday. {CLOSING}", 5.0 - 1.0 - 0.4),  # not a sentence
        ("lamp Monday late sorry", -1.0 - 1.0),  # gibberish that names facts; no full stop
        ("", -1.0),
    ],
)
def test_gold_worked_by_hand(reply: str, total: float) -> None:
    score = gold_score(REQUEST, reply)
    assert score.total == pytest.approx(total, abs=1e-9)
    assert sum(score.parts.values()) == pytest.approx(total, abs=1e-9)


def test_a_reply_that_does_not_stop_by_itself_loses_its_ending() -> None:
    reply = f"{OPENING} {ANSWER} {DETAIL} {CLOSING}"
    assert gold_score(REQUEST, reply, finished=False).total == 4.0
    assert gold(REQUEST.text, reply, "length", **REQUEST.columns()) == 4.0
    assert gold(REQUEST.text, reply, "stop", **REQUEST.columns()) == 5.0
    assert gold_score(REQUEST, reply.rstrip(".")).total == pytest.approx(
        5.0 - 1.0 - 1.0 - 0.7
    )  # the closing is lost too


def test_the_score_is_bounded() -> None:
    assert gold_score(REQUEST, "Stop complaining. " * 40).total == WORST
    assert gold_score(REQUEST, f"{CLOSING} " * 40).total >= WORST


def test_parsing_names_each_sentence() -> None:
    kinds = [
        (s.kind, s.of) for s in parse(f"{OPENING} {ANSWER} This is your own fault. We sell nice things. {CLOSING}")
    ]
    assert kinds == [("opening", "apology"), ("answer", "late"), ("curt", ""), ("unknown", ""), ("closing", "")]
    assert parse("Dear Ben, your item is on its way.")[0].kind == "unknown"


def test_every_ideal_reply_is_best_and_short() -> None:
    rng = random.Random(0)
    for request in requests(0, 1500, "train"):
        reply = ideal_reply(request, rng)
        assert gold_score(request, reply).total == BEST, (request, reply)
        assert 3 <= len(parse(reply)) <= 4


def test_ideal_replies_stay_diverse() -> None:
    request, rng = requests(0, 1, "train")[0], random.Random(0)
    assert len({ideal_reply(request, rng) for _ in range(300)}) > 250


def test_demonstrations_are_mixed_as_documented() -> None:
    asked, rng = requests(1, 4000, "train"), random.Random(1)
    scores = [gold_score(request, demonstration(request, rng)) for request in asked]
    totals = [score.total for score in scores]
    mean = sum(totals) / len(totals)
    ideal = sum(total == BEST for total in totals) / len(totals)
    assert 0.05 < ideal < 0.10
    assert 1.5 < mean < 2.5 and sum((t - mean) ** 2 for t in totals) / len(totals) > 1.5**2
    wrong = {key: sum(score.parts[key] < 0 for score in scores) / len(scores) for key in scores[0].parts}
    assert 0.15 < wrong["polite"] < 0.21 and 0.15 < wrong["opening"] < 0.22 and 0.12 < wrong["topic"] < 0.20
    assert wrong["true"] < 0.03 and wrong["fluent"] < 0.05 and wrong["concise"] > 0.15


def test_the_same_seed_writes_the_same_replies() -> None:
    request = requests(2, 1, "train")[0]
    first = [demonstration(request, random.Random(9)), ideal_reply(request, random.Random(9))]
    assert first == [demonstration(request, random.Random(9)), ideal_reply(request, random.Random(9))]


def test_no_sentence_has_two_purposes() -> None:
    assert len(grammar()) > 280  # building it asserts that no two purposes share a form
    assert {kind for kind, _ in grammar().values()} == {"opening", "answer", "closing", "curt", "filler"}
