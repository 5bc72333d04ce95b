"""One row under Keel's field names: which shape it has, its texts and messages, and what to say when it has none."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from keel.data.rows import Row
from keel.errors import DataError

Shape = tuple[str, ...]
"""The fields that a row must have, by our names, to be read as one kind of record."""

Turn = dict[str, str]
"""One chat message: role and content."""

OPTIONAL = "input"
"""Alpaca's second half of an instruction, used where there is one."""

ROLES = {
    **{name: name for name in ("system", "user", "assistant", "tool")},
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}
"""Names of speakers in files, and ours."""

LISTS = ("messages", "conversations", "ranking")
"""Fields that hold a list; where a table or a careless writer made a text of it, the text is read as JSON."""

OTHERS_SAY = {
    "prompt": ("query", "question", "instruction", "request", "context", "input"),
    "completion": ("answer", "response", "reply", "output", "target", "summary"),
    "chosen": ("prefer", "winner", "better", "good", "accepted", "positive"),
    "rejected": ("loser", "worse", "bad", "dispreferred", "negative"),
    "label": ("thumb", "tag", "rating", "liked", "feedback"),
    "messages": ("conversation", "dialog", "chat", "turns"),
    "preference": ("winner", "choice", "better", "label"),
}
"""Words in other people's column names that tell which field of ours it is."""

SHOWN = 12
"""Columns that an error lists."""


@dataclass
class View:
    """A row with its columns mapped.

    row: as in the file.
    names: our field name -> the file's column, for those that differ.
    fields: our field name -> value, without nulls.
    shape: the shape that it has.
    repairs: what was mended while converting it.
    """

    row: Row
    names: Mapping[str, str]
    fields: dict[str, Any]
    shape: Shape = ()
    repairs: list[str] = field(default_factory=list)

    def refuse(self, what: str, remedy: str) -> DataError:
        """The error to raise for this row."""
        return DataError(what, where=self.row.source, remedy=remedy)

    def turns(self, name: str, speaker: str) -> list[Turn]:
        """A field as messages; a bare string is one message of `speaker`.

        Raises:
            DataError: it is neither text nor messages.
        """
        value = self._listed(name)
        if isinstance(value, str):
            value = {"role": speaker, "content": value}
        return [self._turn(name, message) for message in (value if isinstance(value, list) else [value])]

    def _listed(self, name: str) -> Any:
        value = self.fields[name]
        if name in LISTS and isinstance(value, str) and value.lstrip().startswith("["):
            try:
                return json.loads(value)
            except (ValueError, RecursionError):
                raise self.refuse(
                    f"'{name}' is text that begins as a list and is no JSON.",
                    'Write it as JSON, with "double" quotation marks, as in [{"role": "user", "content": "Hi"}].',
                ) from None
        return value

    def _turn(self, name: str, message: Any) -> Turn:
        if not isinstance(message, dict):
            raise self.refuse(
                f"'{name}' holds {kind_of(message)}; expected text, or messages of role and content.",
                "Mend the row, or name another column in `columns`.",
            )
        role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
        if not isinstance(role, str) or role not in ROLES or not isinstance(content, str):
            raise self.refuse(
                f"A message of '{name}' has role {role!r} and content of kind {kind_of(content)}.",
                f"A message has a role ({', '.join(ROLES)}) and text as content.",
            )
        return {"role": ROLES[role], "content": self._sound(content)}

    def _sound(self, text: str) -> str:
        try:
            text.encode()
        except UnicodeEncodeError:  # "\ud83d" alone in JSON: half a character, which no tokenizer takes
            self.repairs.append("half a surrogate pair")
            return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return text

    def prompt_turns(self) -> list[Turn]:
        """The first field of the shape as messages, Alpaca's input joined to its instruction after a blank line."""
        name = self.shape[0]
        turns = self.turns(name, "user")
        if name == "instruction" and turns and OPTIONAL in self.fields:
            more = self.reply(OPTIONAL)
            if more.strip():
                turns[-1] = {**turns[-1], "content": f"{turns[-1]['content']}\n\n{more}"}
        return turns

    def reply(self, name: str) -> str:
        """A field that holds one text, or one message of the assistant.

        Raises:
            DataError: it holds anything else.
        """
        turns = self.turns(name, "assistant")
        if [turn["role"] for turn in turns] != ["assistant"]:
            raise self.refuse(
                f"'{name}' holds {len(turns)} messages; expected one, the assistant's.",
                "Put the turns before it into the prompt.",
            )
        return turns[0]["content"]

    def replies(self, name: str) -> list[str]:
        """A field that holds a list of texts, or of messages of the assistant.

        Raises:
            DataError: it holds anything else.
        """
        value = self._listed(name)
        remedy = 'Write a list in every row, as in ["the best", "the second", "the worst"].'
        if not isinstance(value, list):
            raise self.refuse(f"'{name}' holds {kind_of(value)}; expected a list of replies, the best first.", remedy)
        messages = [text if isinstance(text, dict) else {"role": "assistant", "content": text} for text in value]
        turns = [self._turn(name, message) for message in messages]
        strange = [turn["role"] for turn in turns if turn["role"] != "assistant"]
        if strange:
            raise self.refuse(f"'{name}' holds a message of the {strange[0]}; a reply is the assistant's.", remedy)
        return [turn["content"] for turn in turns]


def known_fields(shapes: tuple[Shape, ...]) -> list[str]:
    """Every field name of ours that the shapes speak of."""
    return [*dict.fromkeys(name for shape in shapes for name in shape), OPTIONAL]


def view_row(row: Row, names: Mapping[str, str], shapes: tuple[Shape, ...], kind: str) -> View:
    """The row under our names, with the first of the shapes that it has; none of them where it has none.

    Raises:
        DataError: `names` speaks of a column that it has not.
    """
    cells = {name: value for name, value in row.cells.items() if value is not None}
    fields = {name: cells[names.get(name, name)] for name in known_fields(shapes) if names.get(name, name) in cells}
    view = View(row, names, fields)
    absent = [column for column in names.values() if column not in row.cells]
    if absent:
        what = f"There is no column '{absent[0]}', which `columns` names. "
        raise missing_fields(view, shapes, kind, what=what)
    view.shape = next((shape for shape in shapes if all(name in fields for name in shape)), ())
    return view


def missing_fields(view: View, shapes: tuple[Shape, ...], kind: str, *, what: str = "", hint: str = "") -> DataError:
    """The error of a row without the needed fields: found, expected, and the mapping to write for the nearest shape."""
    cells = view.row.cells
    found = ", ".join(f"{_short(name)} ({kind_of(value)})" for name, value in list(cells.items())[:SHOWN]) or "no field"
    more = f" and {len(cells) - SHOWN} more" if len(cells) > SHOWN else ""
    expected = ", or ".join(" + ".join(shape) for shape in shapes)
    nearest = max(shapes, key=lambda shape: sum(name in view.fields for name in shape))
    missing = [name for name in nearest if name not in view.fields]
    null = [name for name in missing if view.names.get(name, name) in cells]
    if null:
        remedy = f"'{view.names.get(null[0], null[0])}' is null here: give it a value in every row, or take the row out"
    else:
        remedy = f"Say which column is which, for example  columns: {{{_mapping(view, nearest, missing)}}}"
    return view.refuse(f"{what}A {kind} has {expected}; found {found}{more}.{hint}", remedy)


def _mapping(view: View, shape: Shape, missing: list[str]) -> str:
    """What to write as `columns` for a shape, the missing names guessed: surest first, each column once."""
    cells = view.row.cells
    taken = {view.names.get(name, name) for name in view.fields}
    free = [name for name in cells if name not in taken]
    free.sort(key=lambda name: not isinstance(cells[name], str | list | dict))  # texts before numbers and nulls
    mapping = {name: column for name, column in view.names.items() if column in cells}
    for name in sorted(missing, key=lambda name: not any(_means(column, name) for column in free)):
        column = next((column for column in free if _means(column, name)), free[0] if free else "YOUR_COLUMN")
        mapping[name] = column
        free = [other for other in free if other != column]
    return ", ".join(f"{name}: {_quoted(mapping[name])}" for name in shape if name in mapping)


def _means(column: str, name: str) -> bool:
    return any(word in column.lower() for word in (name, *OTHERS_SAY.get(name, ())))


def _short(name: str) -> str:
    return name if len(name) <= 40 else name[:40] + "..."


def _quoted(name: str) -> str:
    """A column's name as it stands in YAML."""
    return name if re.fullmatch(r"[^\W\d]\w*( \w+)*", name) else json.dumps(name, ensure_ascii=False)


def kind_of(value: Any) -> str:
    """What a value is, in a word."""
    kinds = {str: "text", bool: "true/false", int: "number", float: "number", list: "list", dict: "object"}
    return "null" if value is None else kinds.get(type(value), type(value).__name__)
