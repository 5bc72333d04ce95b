"""Reading demonstrations, preference pairs, thumbs and prompts, by shape and without flags.

Files: `.jsonl` (one object a line), `.json` (one list of objects), each also as `.gz`; any other suffix is plain text,
one prompt a line. Shapes (the first that a row has all fields of; `columns` maps our names to the file's):

    demonstrations   prompt + completion | prompt + response | messages | instruction (+ input) + output
    preferences      prompt + chosen + rejected | conversations + chosen + rejected (ShareGPT)
                     chosen + rejected (whole transcripts or message lists that share all but the last turn)
                     instruction (+ input) + output_1 + output_2 + preference (1 or 2; 0 is a tie)
                     prompt + ranking (replies, the best first: every two of them are a pair)
    thumbs           those of demonstrations + label (true or false); or those of preferences, both replies judged
    prompts          prompt | instruction (+ input) | question, other columns kept; or lines of text

A text field may hold a string, one message or a list of messages (role/content or from/value). A null is an absent
field. Every row is kept as it is, repaired and counted, dropped and counted, or refused with its place.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypedDict, TypeVar

from keel.data.fields import OPTIONAL, ROLES, Shape, Turn, View, missing_fields, view_row
from keel.data.files import read_files
from keel.errors import DataError
from keel.types import Demonstration, PreferencePair, Prompt, Thumb

Record = TypeVar("Record")
Paths = str | Path | Sequence[str | Path]
"""One file or several."""

RANKING = "ranking"
DEMONSTRATION_SHAPES: tuple[Shape, ...] = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("messages",),
    ("instruction", "output"),
)
PREFERENCE_SHAPES: tuple[Shape, ...] = (
    ("prompt", "chosen", "rejected"),
    ("conversations", "chosen", "rejected"),
    ("chosen", "rejected"),
    ("instruction", "output_1", "output_2", "preference"),
    ("prompt", RANKING),
)
THUMB_SHAPES: tuple[Shape, ...] = tuple((*shape, "label") for shape in DEMONSTRATION_SHAPES)
PROMPT_SHAPES: tuple[Shape, ...] = (("prompt",), ("instruction",), ("question",))


class Counts(TypedDict):
    """Rows of the files: read = kept + all of dropped; repaired counts kept rows, by reason."""

    read: int
    kept: int
    dropped: dict[str, int]
    repaired: dict[str, int]


@dataclass(frozen=True)
class ReadResult(Generic[Record]):
    """What a reader returns.

    records: in the order of the files.
    counts: what became of the rows.
    sha256: of the files' content, unpacked; for several files of the concatenated digests.
    """

    records: list[Record]
    counts: Counts
    sha256: str


def read_demonstrations(path: Paths, columns: Mapping[str, str] | None = None) -> ReadResult[Demonstration]:
    """Prompts with a reply to imitate; of a conversation the last turn is the reply.

    Args:
        path: one file or several.
        columns: our field name -> the file's column, for files with other names.

    Raises:
        DataError: a file cannot be read, a row has none of the shapes, or no row is usable.
    """
    return _read(path, columns, DEMONSTRATION_SHAPES, "demonstration", _demonstration)


def read_preferences(
    path: Paths, columns: Mapping[str, str] | None = None, *, margin: bool = False
) -> ReadResult[PreferencePair]:
    """Pairs of replies, the preferred one first; ties, identical pairs and empty replies are dropped and counted.

    Args:
        path, columns: as for `read_demonstrations`.
        margin: every row must have a field `margin` too, a number of at least 0. Without it such a column is one of
            the others.

    Raises:
        DataError: as for `read_demonstrations`.
    """
    shapes = PREFERENCE_SHAPES
    if margin:  # a ranking has none
        shapes = tuple((*shape, "margin") for shape in shapes if RANKING not in shape)
    return _read(path, columns, shapes, "preference pair", _preference)


def read_thumbs(path: Paths, columns: Mapping[str, str] | None = None) -> ReadResult[Thumb]:
    """Replies with a thumb up or down; of preference pairs, which the files may hold as well, see `thumbs_of`.

    Args and errors as for `read_demonstrations`.
    """
    read = _read(path, columns, THUMB_SHAPES + PREFERENCE_SHAPES, "thumb", _thumb)
    thumbs = [record for record in read.records if isinstance(record, Thumb)]
    pairs = [record for record in read.records if isinstance(record, PreferencePair)]
    return ReadResult(thumbs + thumbs_of(pairs), read.counts, read.sha256)


def thumbs_of(pairs: Sequence[PreferencePair]) -> list[Thumb]:
    """Each reply of the pairs once: a thumb up where it won more of its pairs than it lost, down where fewer.

    A single pair gives both. Of a ranking that was cut into pairs it is the upper half and the lower half, without the
    one in the middle; a reply that won as often as it lost says nothing.
    """
    won: dict[tuple[tuple[str, ...], str], int] = {}
    prompts: dict[tuple[tuple[str, ...], str], Prompt] = {}
    for pair in pairs:
        asked = tuple(message["content"] for message in pair.prompt.messages)
        for reply, point in ((pair.chosen, 1), (pair.rejected, -1)):
            prompts.setdefault((asked, reply), pair.prompt)
            won[asked, reply] = won.get((asked, reply), 0) + point
    return [Thumb(prompts[key], key[1], points > 0) for key, points in won.items() if points]


def read_prompts(
    path: Paths, columns: Mapping[str, str] | None = None, *, first_words: int | None = None
) -> ReadResult[Prompt]:
    """Prompts, with the row's other columns for reward functions.

    Args:
        path: one file or several.
        columns: our field name -> the file's column, for files with other names.
        first_words: keep only this many words of each text as the prompt, joined by single spaces; rows with fewer
            words are dropped and counted.

    Raises:
        DataError: as for `read_demonstrations`, or `first_words` is less than 1.
    """
    if first_words is not None and first_words < 1:
        raise DataError(f"first_words is {first_words}.", remedy="Give 1 or more, or leave it out.")

    def convert(view: View) -> list[Prompt]:
        prompt = _prompt(view, view.prompt_turns())
        messages = prompt.messages
        if first_words is not None:
            words = prompt.text.split()
            if len(words) < first_words:
                raise _Drop(f"fewer than {first_words} words")
            messages = (*messages[:-1], {**messages[-1], "content": " ".join(words[:first_words])})
        return [replace(prompt, messages=messages)]

    return _read(path, columns, PROMPT_SHAPES, "prompt", convert)


class _Drop(Exception):
    """The row is well formed but of no use; the message is the reason that is counted."""


def _demonstration(view: View) -> list[Demonstration]:
    if view.row.cells.get("label") is False:  # a file of thumbs, and this one points down
        raise _Drop("label is false")
    return [_answer(view)]


def _answer(view: View) -> Demonstration:
    if view.shape[0] == "messages":
        *turns, last = view.turns("messages", "user") or [{}]
        if last.get("role") != "assistant":
            raise _Drop("last turn is not the assistant's")
        return Demonstration(_prompt(view, turns, last["content"]), last["content"])
    reply = view.reply(view.shape[1])
    return Demonstration(_prompt(view, view.prompt_turns(), reply), reply)


def _thumb(view: View) -> list[Thumb] | list[PreferencePair]:
    if "label" not in view.shape:
        return _preference(view)
    label, answer = view.fields["label"], _answer(view)
    up = {"true": True, "1": True, "false": False, "0": False}.get(str(label).strip().lower().removesuffix(".0"))
    if up is None:
        raise view.refuse(f"label is {label!r}.", "Write true or false (or 1 or 0).")
    return [Thumb(answer.prompt, answer.response, up)]


def _preference(view: View) -> list[PreferencePair]:
    if RANKING in view.shape:
        return _ranking(view)
    if "preference" in view.shape:
        order = ("output_1", "output_2") if _preferred(view) == 1 else ("output_2", "output_1")
        turns, (chosen, rejected) = view.prompt_turns(), (view.reply(name) for name in order)
    else:
        turns, chosen, rejected = _shared_prompt(view)
    prompt = _prompt(view, turns, chosen, rejected)
    if chosen.strip() == rejected.strip():
        raise _Drop("identical pair")
    return [PreferencePair(prompt, chosen, rejected, _margin(view) if "margin" in view.shape else 0.0)]


def _ranking(view: View) -> list[PreferencePair]:
    """Every two replies of the list, the better one first; two that are alike are no pair."""
    listed = view.replies(RANKING)
    replies = [reply for reply in listed if reply.strip()]
    if len(replies) < len(listed):
        view.repairs.append("empty reply of a ranking left out")
    prompt = _prompt(view, view.prompt_turns(), *replies)
    pairs = [PreferencePair(prompt, a, b) for a, b in itertools.combinations(replies, 2) if a.strip() != b.strip()]
    if not pairs:
        raise _Drop("ranking of fewer than two different replies")
    return pairs


def _preferred(view: View) -> int:
    """1 or 2, whatever the type it was written in."""
    number = _number(view.fields["preference"])
    if number == 0:
        raise _Drop("tie")
    if number not in (1, 2):
        value = view.fields["preference"]
        raise view.refuse(f"preference is {value!r}.", "Write 1 or 2 for the better output, or 0 for a tie.")
    return int(number)


def _margin(view: View) -> float:
    number = _number(view.fields["margin"])
    if not 0 <= number < math.inf:
        raise view.refuse(f"margin is {view.fields['margin']!r}.", "Write a number of at least 0.")
    return number


def _number(value: object) -> float:
    """The value of a number that may have been written as text; NaN for anything else."""
    try:
        return float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        return math.nan


def _shared_prompt(view: View) -> tuple[list[Turn], str, str]:
    """The prompt and the two replies: the prompt is explicit, or all but the last turn of both transcripts, or both."""
    explicit = view.prompt_turns() if view.shape[0] != "chosen" else []
    replies = [view.fields[name] for name in ("chosen", "rejected")]
    if not explicit and all(isinstance(text, str) for text in replies):
        chosen, rejected = (_transcript(view, name) for name in ("chosen", "rejected"))
    else:
        chosen, rejected = (view.turns(name, "assistant") for name in ("chosen", "rejected"))
    if not chosen or not rejected or {chosen[-1]["role"], rejected[-1]["role"]} != {"assistant"}:
        raise _Drop("last turn is not the assistant's")
    shared = chosen[:-1]
    if shared != rejected[:-1]:
        raise _Drop("transcripts differ before the last turn")
    if explicit and explicit[-1] not in shared:  # UltraFeedback repeats the prompt in both transcripts
        shared = explicit + shared
    return shared, chosen[-1]["content"], rejected[-1]["content"]


def _transcript(view: View, name: str) -> list[Turn]:
    """Turns of an Anthropic HH transcript; the blanks around a turn belong to the format.

    Two turns of one speaker before the last one are joined and counted: many chat templates refuse them.
    """
    text = "\n\n" + view.reply(name).lstrip("\n")
    head, *pieces = re.split(r"\n\n(Human|Assistant):", text)
    if head or not pieces:
        what = f"'{name}' is no transcript and there is no prompt. "
        raise missing_fields(view, PREFERENCE_SHAPES[:1], "preference pair", what)
    turns: list[Turn] = []
    for at in range(0, len(pieces), 2):
        turn = {"role": ROLES[pieces[at].lower()], "content": pieces[at + 1].strip()}
        if turns and turns[-1]["role"] == turn["role"] and at + 2 < len(pieces):
            turns[-1]["content"] += "\n\n" + turn["content"]
            view.repairs.append("turns of one speaker joined")
        else:
            turns.append(turn)
    return turns


def _prompt(view: View, turns: list[Turn], *replies: str) -> Prompt:
    """The prompt of a record whose prompt and replies are all worth training on, with the row's other columns."""
    if not turns or not turns[-1]["content"].strip():
        raise _Drop("empty prompt")
    if turns[-1]["role"] == "assistant":
        raise _Drop("prompt ends with the assistant's turn")
    if not all(text.strip() for text in replies):
        raise _Drop("empty response")
    fields = (*view.shape, OPTIONAL) if view.shape[0] == "instruction" else view.shape
    used = {view.names.get(name, name) for name in fields}
    columns = {name: value for name, value in view.row.cells.items() if name not in used}
    return Prompt(tuple(turns), columns, view.row.source)


def _read(
    paths: Paths,
    columns: Mapping[str, str] | None,
    shapes: tuple[Shape, ...],
    kind: str,
    convert: Callable[[View], Sequence[Record]],
) -> ReadResult[Record]:
    known = [*dict.fromkeys(name for shape in shapes for name in shape), OPTIONAL]
    for name in columns or {}:
        if name not in known:
            raise DataError(
                f"columns names '{name}', which no {kind} has.",
                where=f"columns.{name}",
                remedy=f"Our names, on the left, are {', '.join(known)}; the file's names stand on the right.",
            )
    rows, sha256 = read_files(paths, text_as="prompt" if shapes is PROMPT_SHAPES else None)
    records: list[Record] = []
    dropped, repaired = Counter[str](), Counter[str]()
    for row in rows:
        try:
            view = view_row(row, columns or {}, shapes, kind)
            records += convert(view)
            repaired.update(set(row.repairs + view.repairs))
        except _Drop as reason:
            dropped[str(reason)] += 1
    if not records:
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
        where = ", ".join(dict.fromkeys(row.path for row in rows))
        remedy = f"Check that this is a file of {kind}s."
        raise DataError(f"No row of {len(rows)} can be used: {reasons}.", where=where, remedy=remedy)
    counts = Counts(read=len(rows), kept=len(rows) - dropped.total(), dropped=dict(dropped), repaired=dict(repaired))
    return ReadResult(records, counts, sha256)
