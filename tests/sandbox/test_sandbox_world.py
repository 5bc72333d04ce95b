"""Requests, the template language and the split."""

import random
import re

import pytest

from keel.errors import DataError
from keel.sandbox import lexicon, request_from_columns, requests
from keel.sandbox.lexicon import CITIES, DAYS, FITTING, ITEMS, KEYWORDS, MOODS, NAMES, OPENINGS, TOPICS
from keel.sandbox.templates import FACT_WORDS, VAGUE_ITEM, expansions, open_facts, say
from keel.sandbox.world import split_of


def test_a_template_becomes_each_of_its_sentences() -> None:
    assert expansions("We [will|can] help [you|] in {city}.") == [
        "We will help you in {city}.",
        "We will help in {city}.",
        "We can help you in {city}.",
        "We can help in {city}.",
    ]


def test_saying_and_opening_a_sentence_are_inverse() -> None:
    facts = {"item": "lamp", "day": "Monday", "city": "Leeds", "name": "Anna"}
    for topic in TOPICS.values():
        for template in (*topic.requests, *topic.answers, *topic.details, *topic.full):
            sentence = say(template, facts, random.Random(1))
            form, found = open_facts(sentence)
            assert form in expansions(template)
            assert all(facts[kind] == word for kind, word in found)


def test_no_fact_word_is_a_plain_word_of_a_sentence() -> None:
    templates = [t for topic in TOPICS.values() for t in (*topic.requests, *topic.answers, *topic.details, *topic.full)]
    templates += [t for group in (*MOODS.values(), *lexicon.OPENINGS.values()) for t in group]
    templates += [*lexicon.CLOSINGS, *lexicon.CURT, *lexicon.FILLER, *lexicon.INTRODUCTIONS, *lexicon.SIGNATURES]
    for template in templates:
        for form in expansions(template):
            assert not open_facts(form.replace("{item}", "slot"))[1], template
            assert f" {VAGUE_ITEM} " not in f" {form} ".replace("{item}", "slot").replace(".", " ")


def test_keywords_are_in_every_sentence_of_their_purpose_and_in_no_other() -> None:
    sentences: dict[tuple[str, str], list[str]] = {
        ("answer", key): [*topic.requests, *topic.answers, *topic.details, *topic.full] for key, topic in TOPICS.items()
    }
    for mood, fitting in FITTING.items():
        for opening in fitting:
            sentences["opening", opening] = [*MOODS[mood], *OPENINGS[opening]]
    others = (lexicon.CLOSINGS, lexicon.CURT, lexicon.FILLER, lexicon.INTRODUCTIONS, lexicon.SIGNATURES)
    sentences["other", ""] = [template for group in others for template in group]
    assert sorted(KEYWORDS.values()) == sorted(set(sentences) - {("other", "")}), "one keyword for each purpose"
    for word, purpose in KEYWORDS.items():
        for other, templates in sentences.items():
            for form in (form for template in templates for form in expansions(template)):
                found = word in re.findall(r"[A-Za-z]+", form.replace("{", "").replace("}", ""))
                assert found == (other == purpose), (word, form)


def test_every_fact_word_is_of_one_kind() -> None:
    assert len(FACT_WORDS) == len(ITEMS) + len(DAYS) + len(CITIES) + len(NAMES)
    assert not any(item[0] in "aeiou" for item in ITEMS), "templates say 'a {item}'"


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_requests_are_distinct_true_and_of_their_split(split) -> None:
    found = requests(3, 2000, split)
    assert len({request.text for request in found}) == 2000
    for request in found:
        assert split_of(request.topic, request.item, request.mood) == split
        assert bool(request.day) == (TOPICS[request.topic].fact == "day") != bool(request.city)
        for kind, word in request.facts.items():
            assert word in request.text.replace(".", " ").replace("?", " ").replace(",", " ").split(), (kind, request)
        mentioned = set(request.text.rstrip(".").replace(".", " ").replace(",", " ").replace("?", " ").split())
        assert {w for w in mentioned if w in FACT_WORDS} == set(request.facts.values())


def test_splits_share_no_text_and_no_combination() -> None:
    train, heldout = requests(0, 8000, "train"), requests(0, 1500, "heldout")
    assert not {r.text for r in train} & {r.text for r in heldout}
    assert not {(r.topic, r.item, r.mood) for r in train} & {(r.topic, r.item, r.mood) for r in heldout}
    held = {(r.topic, r.item, r.mood) for r in heldout}
    assert 0.07 < len(held) / (len(TOPICS) * len(ITEMS) * len(MOODS)) < 0.13
    assert {r.topic for r in heldout} == set(TOPICS) and {r.item for r in heldout} == set(ITEMS)


def test_the_same_seed_gives_the_same_requests_and_a_longer_list_begins_with_the_shorter() -> None:
    assert requests(5, 50, "train") == requests(5, 80, "train")[:50]
    assert requests(5, 50, "train") != requests(6, 50, "train")
    first = requests(0, 1, "train")[0]
    assert first.text == FIRST_TEXT


FIRST_TEXT = "I am very worried. I need a larger size of the kettle from your shop in London. Regards, Vera."


def test_columns_hold_everything_but_the_text() -> None:
    for request in requests(1, 20, "heldout"):
        columns = request.columns()
        assert "text" not in columns and all(isinstance(value, str) for value in columns.values())
        assert request_from_columns({**columns, "another": 1}, request.text) == request


def test_a_missing_or_unknown_column_is_a_user_error() -> None:
    columns = requests(1, 1, "train")[0].columns()
    with pytest.raises(DataError, match="'mood' is None"):
        request_from_columns({key: value for key, value in columns.items() if key != "mood"})
    with pytest.raises(DataError, match="'item' is 'spaceship'"):
        request_from_columns({**columns, "item": "spaceship"})


def test_impossible_counts_and_splits_are_user_errors() -> None:
    with pytest.raises(DataError, match="-1"):
        requests(0, -1, "train")
    with pytest.raises(DataError, match="10000000"):
        requests(0, 10_000_000, "train")
    with pytest.raises(DataError, match="validation"):
        requests(0, 1, "validation")  # type: ignore[arg-type]
