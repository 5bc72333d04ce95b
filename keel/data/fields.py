"""One row under Keel's field names: which shape it has, its texts and messages, and what to say when it has none."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from keel.data.files import Row
from keel.errors import DataError

Shape = tuple[str, ...]
"""The fields that a row must have, by our names, to be read as one kind of record."""

Turn = dict[str, str]
"""One chat message: role and content."""

OPTIONAL = "input"
"""Alpaca's second half of an instruction, used where there is one."""

ROLES = {"human": "user", "gpt": "assistant", **{name: name for name in ("system", "user", "assistant", "tool")}}
"""Names of speakers in files, and ours."""


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
        value = self.fields[name]
        if isinstance(value, str):
            value = {"role": speaker, "content": value}
        return [self._turn(name, message) for message in (value if isinstance(value, list) else [value])]

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
        value = self.fields[name]
        remedy = 'Write a list in every row, as in ["the best", "the second", "the worst"].'
        if not isinstance(value, list):
            raise self.refuse(f"'{name}' holds {kind_of(value)}; expected a list of replies, the best first.", remedy)
        messages = [text if isinstance(text, dict) else {"role": "assistant", "content": text} for text in value]
        turns = [self._turn(name, message) for message in messages]
        strange = [turn["role"] for turn in turns if turn["role"] != "assistant"]
        if strange:
            raise self.refuse(f"'{name}' holds a message of the {strange[0]}; a reply is the assistant's.", remedy)
        return [turn["content"] for turn in turns]


def view_row(row: Row, names: Mapping[str, str], shapes: tuple[Shape, ...], kind: str) -> View:
    """The row under our names, with the first of the shapes that it has.

    Raises:
        DataError: it has none of them, or `names` speaks of a column that it has not.
    """
    known = [*dict.fromkeys(name for shape in shapes for name in shape), OPTIONAL]
    cells = {name: value for name, value in row.cells.items() if value is not None}
    fields = {name: cells[names.get(name, name)] for name in known if names.get(name, name) in cells}
    view = View(row, names, fields)
    absent = [column for column in names.values() if column not in row.cells]
    if absent:
        raise missing_fields(view, shapes, kind, f"There is no column '{absent[0]}', which `columns` names. ")
    for shape in shapes:
        if all(name in fields for name in shape):
            view.shape = shape
            return view
    raise missing_fields(view, shapes, kind)


def missing_fields(view: View, shapes: tuple[Shape, ...], kind: str, what: str = "") -> DataError:
    """The error of a row without the needed fields: found, expected, and the mapping to write for the nearest shape."""
    cells = view.row.cells
    found = ", ".join(f"{name} ({kind_of(value)})" for name, value in cells.items()) or "no field"
    expected = ", or ".join(" + ".join(shape) for shape in shapes)
    nearest = max(shapes, key=lambda shape: sum(name in view.fields for name in shape))
    taken = {view.names.get(name, name) for name in view.fields}
    free = [name for name in cells if name not in taken]
    free.sort(key=lambda name: not isinstance(cells[name], str | list | dict))  # texts before numbers and nulls
    mapping = {name: column for name, column in view.names.items() if column in cells}
    missing = [name for name in nearest if name not in view.fields]
    for name in sorted(missing, key=lambda name: not any(name in column for column in free)):  # sure guesses first
        column = next((column for column in free if name in column), free[0] if free else "YOUR_COLUMN")
        mapping[name] = column
        free = [other for other in free if other != column]
    written = ", ".join(f"{name}: {mapping[name]}" for name in nearest if name in mapping)
    return view.refuse(
        f"{what}A {kind} has {expected}; found {found}.",
        f"Say which column is which, for example  columns: {{{written}}}",
    )


def kind_of(value: Any) -> str:
    """What a JSON value is, in a word."""
    kinds = {str: "text", bool: "true/false", int: "number", float: "number", list: "list", dict: "object"}
    return kinds.get(type(value), "null")
