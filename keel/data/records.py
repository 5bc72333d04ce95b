"""From one row to records: the shapes of each kind, and what is made of a row that has one.

A row is kept as it is, repaired and counted, dropped (`Drop`) and counted, or refused (`DataError`) with its place.
"""

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

from keel.data.fields import OPTIONAL, ROLES, Shape, Turn, View, known_fields, missing_fields, view_row
from keel.data.rows import Row
from keel.errors import DataError
from keel.types import Demonstration, PreferencePair, Prompt, Thumb

RANKING = "ranking"
TRANSCRIPTS: Shape = ("chosen", "rejected")
DEMONSTRATION_SHAPES: tuple[Shape, ...] = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("messages",),
    ("conversations",),
    ("instruction", "output"),
)
PREFERENCE_SHAPES: tuple[Shape, ...] = (
    ("prompt", "chosen", "rejected"),
    ("conversations", "chosen", "rejected"),
    TRANSCRIPTS,
    ("instruction", "output_1", "output_2", "preference"),
    ("prompt", RANKING),
)
THUMB_SHAPES: tuple[Shape, ...] = tuple((*shape, "label") for shape in DEMONSTRATION_SHAPES)
PROMPT_SHAPES: tuple[Shape, ...] = (
    ("prompt",),
    ("instruction",),
    ("question",),
    ("messages",),
    ("conversations",),
    TRANSCRIPTS,
)


Record = TypeVar("Record")


class Drop(Exception):
    """The row is well formed but of no use; the message is the reason that is counted."""


@dataclass(frozen=True)
class Kind(Generic[Record]):
    """What the rows of a file can be.

    name: of one record, for people.
    stage: where a recipe names files of it.
    shapes: those that a row can have, the first that fits is taken.
    convert: a row with one of them -> records; raises `Drop`, or `DataError` where a value is wrong.
    text_as: the column that a line of plain text becomes; None where plain text has no meaning.
    """

    name: str
    stage: str
    shapes: tuple[Shape, ...]
    convert: Callable[[View], Sequence[Record]]
    text_as: str | None = None

    def check_columns(self, columns: Mapping[str, str]) -> None:
        """Raises DataError where `columns` (our field name -> the file's column) names a field that is not ours."""
        known = known_fields(self.shapes)
        for name in columns:
            if name not in known:
                raise DataError(
                    f"columns names '{name}', which no {self.name} has.",
                    where=f"columns.{name}",
                    remedy=f"Our names, on the left, are {', '.join(known)}; the file's names stand on the right.",
                )

    def records(self, row: Row, columns: Mapping[str, str]) -> tuple[Sequence[Record], set[str]]:
        """The row's records, and what was mended to make them.

        Raises:
            Drop: the row is of no use. DataError: it has none of the shapes, or a value that is wrong.
        """
        view = view_row(row, columns, self.shapes, self.name)
        if not view.shape:
            raise missing_fields(view, self.shapes, self.name, hint=_other_kinds(row, columns, self.name))
        records = self.convert(view)
        return records, {*row.repairs, *view.repairs}


def demonstrations() -> Kind[Demonstration]:
    """Prompts with a reply to imitate; of a conversation the last turn is the reply."""
    return Kind("demonstration", "sft.data", DEMONSTRATION_SHAPES, _demonstration)


def preferences(*, margin: bool = False) -> Kind[PreferencePair]:
    """Two replies, or a ranking of several. margin: every row must say how much better the preferred one is."""
    shapes = PREFERENCE_SHAPES
    if margin:  # a ranking has none
        shapes = tuple((*shape, "margin") for shape in shapes if RANKING not in shape)
    return Kind("preference pair", "reward.data or preference.data", shapes, _preference)


def thumbs() -> Kind[Thumb | PreferencePair]:
    """Replies with a thumb up or down, or pairs that are yet to be turned into such."""
    return Kind("thumb", "preference.data with loss kto", THUMB_SHAPES + PREFERENCE_SHAPES, _thumb)


def prompts(first_words: int | None = None) -> Kind[Prompt]:
    """Prompts, with the row's other columns; of a conversation and of two transcripts all before the last reply.
    first_words: keep only so many of each text.

    Raises:
        DataError: `first_words` is less than 1.
    """
    if first_words is not None and first_words < 1:
        raise DataError(f"first_words is {first_words}.", remedy="Give 1 or more, or leave it out.")
    return Kind("prompt", "ppo.data", PROMPT_SHAPES, partial(_bare_prompt, first_words=first_words), "prompt")


def kinds_of(row: Row, columns: Mapping[str, str]) -> list[Kind[Any]]:
    """The kinds that a row can be read as, the one that uses most of it first."""
    fits: list[Kind[Any]] = []
    for kind in (preferences(), thumbs(), demonstrations(), prompts()):
        known = known_fields(kind.shapes)
        names = {name: column for name, column in columns.items() if name in known}
        if all(column in row.cells for column in names.values()) and view_row(row, names, kind.shapes, kind.name).shape:
            fits.append(kind)
    return fits


def _other_kinds(row: Row, columns: Mapping[str, str], name: str) -> str:
    others = [kind for kind in kinds_of(row, columns) if kind.name != name]
    return f" As it is, the row is a {others[0].name}, which {others[0].stage} takes." if others else ""


def _bare_prompt(view: View, first_words: int | None) -> list[Prompt]:
    turns = _shared_prompt(view)[0] if view.shape == TRANSCRIPTS else view.prompt_turns()
    if view.shape[0] in ("messages", "conversations") and turns and turns[-1]["role"] == "assistant":
        turns.pop()
    prompt = _prompt(view, turns)
    messages = prompt.messages
    if first_words is not None:
        words = prompt.text.split()
        if len(words) < first_words:
            raise Drop(f"fewer than {first_words} words")
        messages = (*messages[:-1], {**messages[-1], "content": " ".join(words[:first_words])})
    return [replace(prompt, messages=messages)]


def _demonstration(view: View) -> list[Demonstration]:
    label = view.row.cells.get("label")
    if label is False or (isinstance(label, str) and label.strip().lower() == "false"):  # a thumb that points down
        raise Drop("label is false")
    return [_answer(view)]


def _answer(view: View) -> Demonstration:
    if view.shape[0] in ("messages", "conversations"):
        *turns, last = view.turns(view.shape[0], "user") or [{}]
        if last.get("role") != "assistant":
            raise Drop("last turn is not the assistant's")
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
        raise Drop("identical pair")
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
        raise Drop("ranking of fewer than two different replies")
    return pairs


def _preferred(view: View) -> int:
    """1 or 2, whatever the type it was written in."""
    number = _number(view.fields["preference"])
    if number == 0:
        raise Drop("tie")
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
        raise Drop("last turn is not the assistant's")
    shared = chosen[:-1]
    if shared != rejected[:-1]:
        raise Drop("transcripts differ before the last turn")
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
        raise missing_fields(view, PREFERENCE_SHAPES[:1], "preference pair", what=what)
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
        raise Drop("empty prompt")
    if turns[-1]["role"] == "assistant":
        raise Drop("prompt ends with the assistant's turn")
    if not all(text.strip() for text in replies):
        raise Drop("empty response")
    fields = (*view.shape, OPTIONAL) if view.shape[0] == "instruction" else view.shape
    used = {view.names.get(name, name) for name in fields}
    columns = {name: value for name, value in view.row.cells.items() if name not in used}
    return Prompt(tuple(turns), columns, view.row.source, view.row.origin)
