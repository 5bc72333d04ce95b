"""The desk's notes: what they may say, what they always say, and that their order tells nothing."""

import random
from collections import Counter

import pytest

from keel.sandbox import (
    Request,
    demonstration,
    gold_score,
    ideal_reply,
    note_words,
    requests,
    train_tokenizer,
    transcript,
)
from keel.sandbox.lexicon import MOODS, TOPICS
from keel.sandbox.notes import TRAITS, WORDS_PER_NOTE
from keel.sandbox.templates import FACT_WORDS

REQUEST = Request(
    topic="late",
    mood="angry",
    item="lamp",
    day="Monday",
    city="",
    name="Anna",
    text="The delivery of my lamp was promised for Monday. I am very angry about this. Regards, Anna.",
)
FLAWED = (
    "Please do not be worried. Stop complaining. The delivery of your item is on its way. "
    "The delivery was held up on Friday."
)
EVERYTHING_AMISS = (
    "Please do not be worried. Stop complaining. Stop complaining. We sell many nice things. "
    "The refund was approved on Friday. Have nice"
)


def note(text: str) -> list[str]:
    """The words after the reply, in order."""
    return [word.removeprefix(" ") for word in text.split("<eos>")[1:]]


def test_note_words_by_hand() -> None:
    amiss, rest = note_words(REQUEST, FLAWED)
    assert amiss == ["unsuited", "mistaken", "curt"]
    assert rest == ["lamp", "Monday", "Anna", "late", "angry", "answered", "vague", "partial", "open"]


def test_an_ideal_reply_has_nothing_amiss() -> None:
    amiss, rest = note_words(REQUEST, ideal_reply(REQUEST, random.Random(0)))
    assert amiss == []
    assert rest[5:] == ["suited", "answered", "exact", "precise", "closed"]


def test_every_negative_property_is_noted_and_fits_into_one_note() -> None:
    expected = {words[2] for words in TRAITS.values() if words[2]}
    assert set(note_words(REQUEST, EVERYTHING_AMISS)[0]) == expected
    assert set(note(transcript(REQUEST, EVERYTHING_AMISS, random.Random(0)))) == expected
    assert len(expected) == WORDS_PER_NOTE
    assert set(TRAITS) == set(gold_score(REQUEST, FLAWED).parts)


def test_no_word_of_a_note_has_two_meanings() -> None:
    words = [word for of in TRAITS.values() for word in of if word]
    words += [*TOPICS, *MOODS, *FACT_WORDS]
    assert [word for word, times in Counter(words).items() if times > 1] == []


def test_a_note_holds_all_that_is_amiss_and_nothing_outside_the_word_lists() -> None:
    rng = random.Random(1)
    for request in requests(1, 1500, "train"):
        reply = demonstration(request, rng)
        amiss, rest = note_words(request, reply)
        words = note(transcript(request, reply, rng))
        assert set(amiss) <= set(words) <= {*amiss, *rest}, (request, reply)
        assert len(words) == len(set(words)) == min(WORDS_PER_NOTE, len(amiss) + len(rest))
        traits = {word for of in TRAITS.values() for word in of if word}
        assert set(words) <= {*traits, *request.facts.values(), request.topic, request.mood}


def test_the_order_of_a_note_is_the_seeds_and_tells_nothing() -> None:
    assert transcript(REQUEST, FLAWED, random.Random(3)) == transcript(REQUEST, FLAWED, random.Random(3))
    count, rng = 4000, random.Random(0)
    notes = [note(transcript(REQUEST, FLAWED, rng)) for _ in range(count)]
    amiss, rest = note_words(REQUEST, FLAWED)
    for word in amiss:  # always there, at each of the 8 places equally often
        places = Counter(words.index(word) for words in notes)
        assert all(places[place] / count == pytest.approx(1 / 8, abs=0.025) for place in range(8)), word
    for word in rest:  # 5 of 9
        assert sum(word in words for words in notes) / count == pytest.approx(5 / 9, abs=0.035), word


def test_a_transcript_is_the_chat_template_and_a_note() -> None:
    rng = random.Random(0)
    text = transcript(REQUEST, FLAWED, rng)
    texts = [transcript(r, demonstration(r, rng), rng) for r in requests(0, 2500, "train")]
    tokenizer = train_tokenizer(texts, 1200)
    turns = [{"role": "user", "content": REQUEST.text}, {"role": "assistant", "content": FLAWED}]
    talk = tokenizer.apply_chat_template(turns, tokenize=False)
    assert isinstance(talk, str) and text == talk + "<eos>".join(f" {word}" for word in note(text))
    start = tokenizer(talk, add_special_tokens=False).input_ids
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert ids[: len(start)] == start
    # Each word is one token, and each but the first has an EOS before it; the first has the reply's.
    assert len(ids) == len(start) + 2 * WORDS_PER_NOTE - 1
    assert ids[len(start) + 1 :: 2] == [tokenizer.eos_token_id] * (WORDS_PER_NOTE - 1)
