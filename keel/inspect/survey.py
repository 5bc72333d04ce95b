"""What is in a file, counted in one pass over its rows, which are not kept. No torch here."""

import itertools
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from keel.data import records as kinds
from keel.data.fields import Shape, view_row
from keel.data.files import RowStream
from keel.data.formats import Paths
from keel.data.records import Drop, Kind
from keel.data.rows import Row
from keel.errors import DataError
from keel.types import Demonstration, PreferencePair, Prompt, Thumb

Record = Demonstration | PreferencePair | Thumb | Prompt

KINDS: dict[str, Callable[[], Kind[Any]]] = {
    "demonstrations": kinds.demonstrations,
    "preferences": kinds.preferences,
    "thumbs": kinds.thumbs,
    "prompts": kinds.prompts,
}
"""What a file can be asked to be read as."""

LOOKED_AT = 100
"""Rows among which one must have the fields of some kind."""

TOGETHER = 256
"""Rows that are measured at once."""

PLACES = 3
"""Rows that are named for each thing found."""

FINDINGS = {
    "repeats an earlier row": "the same prompt and reply again; it is trained on as often as it stands there",
    "judged the other way round before": "the same two replies, the other one preferred: one of the two is wrong",
    "prompt stands in the held-out file": "what is measured there was trained on; take these rows out of one of them",
    "response of one {unit}": "a reply this short is often a mistake of the file; look at some of them",
    "chosen is longer than rejected": "far from one half, a reward model may learn length instead of quality",
    "replacement character (U+FFFD)": "text was decoded wrongly before it came here and is lost; write the file anew",
    "mojibake": "UTF-8 was read as Latin-1 or cp1252, such as Ã© for é; write the file anew",
    "control character": "a character that no text needs; it becomes tokens of its own",
    "prompt is cut": "it has more tokens than max_prompt_tokens and loses its beginning",
    "response is cut": "it has more tokens than max_response_tokens and loses its end and the end token",
    "end token inside the response": "what follows it is left out, as a sampler would never come to it",
}
"""What may be found, and what it means. Each is counted over the rows (responses where it names one)."""

CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\x80-\x9f]")
SUSPICIOUS = re.compile("[\u00c2-\u00f4][\u0080-\u00bf\u0152-\u0178\u0192\u02c6\u02dc\u2013-\u203a\u20ac\u2122]{1,3}")
"""A leading byte of UTF-8 and bytes that follow one, as cp1252 or Latin-1 would show them."""


@dataclass
class Found:
    """Something found: how often, among how many, and the first places."""

    count: int = 0
    places: list[str] = field(default_factory=list)

    def add(self, place: str) -> None:
        """One more; an empty place is none."""
        self.count += 1
        if place and len(self.places) < PLACES and place not in self.places:
            self.places.append(place)


Lengths = dict[str, int]
"""Part of a record -> how long it is."""

Measure = Callable[[Sequence[Record], "Survey"], Sequence[Lengths | DataError]]
"""The lengths of each of the records, or the error where one cannot be encoded; may add findings."""


@dataclass
class Survey:
    """What is known of a file.

    kind, also: what its rows are, and what else they could be read as.
    shape, first: the fields that tell it, and the first row that has them (none where the kind was asked for).
    read, kept: rows; the others are in dropped (by reason), or in refused.
    refused: rows at which a run would stop, by reason.
    lengths: part of a row ("prompt", "response", "chosen", "rejected") -> its lengths in `unit`s.
    found: by name, see `FINDINGS`; of: what each is counted among.
    prompts: distinct ones. up: thumbs up.
    records: the first that are kept.
    """

    files: list[str]
    kind: Kind[Any]
    shape: Shape
    first: str
    also: list[str]
    unit: str = "word"
    read: int = 0
    kept: int = 0
    up: int = 0
    dropped: dict[str, Found] = field(default_factory=dict)
    repaired: dict[str, Found] = field(default_factory=dict)
    refused: dict[str, Found] = field(default_factory=dict)
    found: dict[str, Found] = field(default_factory=dict)
    of: Counter[str] = field(default_factory=Counter)
    lengths: dict[str, "array[int]"] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    _prompts: set[int] = field(default_factory=set)
    _rows: set[int] = field(default_factory=set)

    @property
    def prompts(self) -> int:
        """Distinct prompts."""
        return len(self._prompts)

    def find(self, name: str, place: str) -> None:
        """Counts one of `FINDINGS`."""
        self.found.setdefault(name, Found()).add(place)

    def add(self, record: Record, lengths: Lengths, held_out: set[int]) -> None:
        """Counts a record."""
        place = prompt_of(record).source
        for name, length in lengths.items():
            self.lengths.setdefault(name, array("l")).append(length)
            if name != "prompt":
                self.of["response"] += 1
                if length <= (2 if self.unit == "token" else 1):  # tokens are counted with the end token
                    self.find(f"response of one {self.unit}", place)
        self.of["row"] += 1
        self._compare(record, place, held_out)
        texts = [message["content"] for message in prompt_of(record).messages]
        text = "\n".join([*texts, *replies_of(record).values()])
        for name, there in (
            ("replacement character (U+FFFD)", "\ufffd" in text),
            ("mojibake", is_mojibake(text)),
            ("control character", CONTROL.search(text) is not None),
        ):
            if there:
                self.find(name, place)

    def _compare(self, record: Record, place: str, held_out: set[int]) -> None:
        asked = key_of(prompt_of(record))
        self._prompts.add(asked)
        if asked in held_out:
            self.find("prompt stands in the held-out file", place)
        replies = tuple(replies_of(record).values())
        judged = record.desirable if isinstance(record, Thumb) else None
        mine = hash((asked, replies, judged))
        if mine in self._rows:
            self.find("repeats an earlier row", place)
        self._rows.add(mine)
        if isinstance(record, Thumb):
            self.up += record.desirable
        if isinstance(record, PreferencePair):
            if hash((asked, replies[::-1], None)) in self._rows:
                self.find("judged the other way round before", place)
            longer, shorter = self.lengths["chosen"][-1], self.lengths["rejected"][-1]
            self.of["pair of unequal length"] += longer != shorter
            if longer > shorter:
                self.find("chosen is longer than rejected", "")

    def among(self, name: str) -> tuple[int, str]:
        """How many a finding is counted among, and what they are."""
        if name.startswith("chosen"):
            what = "pair of unequal length"
        elif name.startswith(("response", "end token")):
            what = "response"
        else:
            return self.of["row"], "pair" if self.kind.name == "preference pair" else "row"
        return self.of[what], what


def prompt_of(record: Record) -> Prompt:
    """The record's prompt."""
    return record if isinstance(record, Prompt) else record.prompt


def replies_of(record: Record) -> dict[str, str]:
    """The record's replies by what they are called."""
    if isinstance(record, PreferencePair):
        return {"chosen": record.chosen, "rejected": record.rejected}
    return {} if isinstance(record, Prompt) else {"response": record.response}


def key_of(prompt: Prompt) -> int:
    """Equal for prompts of the same turns, but for blanks around them."""
    return hash(tuple((message["role"], message["content"].strip()) for message in prompt.messages))


def is_mojibake(text: str) -> bool:
    """Whether a part of the text is UTF-8 that was read as Latin-1 or cp1252."""
    return any(_restored(match[0]) for match in SUSPICIOUS.finditer(text))


def _restored(piece: str) -> bool:
    raw = b"".join(char.encode("cp1252" if ord(char) > 255 else "latin-1") for char in piece)
    for end in range(2, len(raw) + 1):  # two to four bytes make a character; what follows may be text
        try:
            raw[:end].decode()
            return True
        except UnicodeDecodeError:
            continue
    return False


def words(records: Sequence[Record], survey: Survey) -> list[Lengths]:
    """Lengths in words, parted by blanks."""
    return [
        {"prompt": sum(len(message["content"].split()) for message in prompt_of(record).messages)}
        | {name: len(text.split()) for name, text in replies_of(record).items()}
        for record in records
    ]


def take(
    paths: Paths,
    *,
    kind: str | None = None,
    columns: Mapping[str, str] | None = None,
    held_out: Paths | None = None,
    measure: Measure = words,
    unit: str = "word",
    shown: int = 0,
    progress: Callable[[int], None] = lambda done: None,
) -> Survey:
    """Counts everything in the files.

    Args:
        kind: of `KINDS`; None finds it by the first row that has the fields of one.
        columns: our field name -> the file's column.
        held_out: a second file whose prompts should not be among these.
        measure, unit: what lengths are counted in.
        shown: records to keep.
        progress: told the bytes read so far, now and then.

    Raises:
        DataError: a file cannot be read at all, or no row is of any kind.
    """
    columns = columns or {}
    held = _prompt_keys(held_out) if held_out else set()
    survey, stream, rows = _open(paths, kind, columns)
    survey.unit = unit
    while some := list(itertools.islice(rows, TOGETHER)):
        read = [each for row in some if (each := _records(row, survey, columns))]
        measured = iter(measure([record for _, records, _ in read for record in records], survey))
        for row, records, mended in read:
            lengths = [next(measured) for _ in records]
            if error := next((each for each in lengths if isinstance(each, DataError)), None):
                survey.refused.setdefault(error.what, Found()).add(error.where)
                continue
            for record, each in zip(records, lengths, strict=True):
                assert not isinstance(each, DataError)
                survey.add(record, each, held)
            survey.kept += 1
            survey.records += records[: max(0, shown - len(survey.records))]
            for reason in mended:
                survey.repaired.setdefault(reason, Found()).add(row.source)
        progress(stream.bytes_read)
    return survey


def _records(
    row: Row | DataError, survey: Survey, columns: Mapping[str, str]
) -> tuple[Row, Sequence[Record], set[str]] | None:
    """The row with its records and what was mended to make them; None where it is of no use, which is counted."""
    survey.read += 1
    if isinstance(row, DataError):
        survey.refused.setdefault(row.what, Found()).add(row.where)
        return None
    try:
        return row, *survey.kind.records(row, columns)
    except Drop as reason:
        survey.dropped.setdefault(str(reason), Found()).add(row.source)
    except DataError as error:
        survey.refused.setdefault(error.what, Found()).add(error.where)
    return None


def counts_of(records: Sequence[Record], kind: Kind[Any]) -> dict[str, Any]:
    """What `keel inspect` counts over records that were read already: distinct prompts, lengths in words, findings."""
    survey = Survey([], kind, (), "", [])
    for record in records:  # one by one: they may be on disk
        survey.add(record, words([record], survey)[0], set())
    return {
        "prompts": survey.prompts,
        "lengths": {name: percentiles(values) for name, values in survey.lengths.items()},
        "findings": {
            name: {"count": each.count, "of": survey.among(name)[0], "places": each.places}
            for name, each in survey.found.items()
        },
    }


def _open(
    paths: Paths, name: str | None, columns: Mapping[str, str]
) -> tuple[Survey, RowStream, Iterator[Row | DataError]]:
    stream = RowStream(paths, "prompt")
    rows = iter(stream)
    head = list(itertools.islice(rows, LOOKED_AT))
    good = [row for row in head if isinstance(row, Row)]
    if not good:
        raise next(row for row in head if isinstance(row, DataError))
    fitting = ((row, kinds.kinds_of(row, columns)) for row in good)
    first, fits = next(((row, fits) for row, fits in fitting if fits), (good[0], []))
    if name is None and not fits:
        raise _of_no_kind(first, columns)
    chosen = KINDS[name]() if name else fits[0]
    chosen.check_columns(columns)
    view = view_row(first, columns, chosen.shapes, chosen.name)
    also = [f"{kind.name}s ({kind.stage})" for kind in fits if kind.name != chosen.name]
    return Survey(stream.files, chosen, view.shape, first.source, also), stream, itertools.chain(head, rows)


def _of_no_kind(row: Row, columns: Mapping[str, str]) -> DataError:
    errors: dict[str, DataError] = {}
    for name, kind in KINDS.items():
        try:
            known = {ours: theirs for ours, theirs in columns.items() if ours in kinds.known_fields(kind().shapes)}
            kind().records(row, known)
        except DataError as error:
            errors[name] = error
    found = errors["prompts"].what.partition("found ")[2]
    ways = "".join(f"\n          {name}: {error.remedy.partition('example  ')[2]}" for name, error in errors.items())
    return DataError(
        f"No row is of a kind that Keel reads; the first has {found}",
        where=row.source,
        remedy="Say which column is which, with --columns here and `columns` in a recipe, for example for" + ways,
    )


def _prompt_keys(paths: Paths) -> set[int]:
    survey, _, rows = _open(paths, None, {})
    keys: set[int] = set()
    for row in rows:
        if isinstance(row, DataError):
            raise row
        try:
            keys |= {key_of(prompt_of(record)) for record in survey.kind.records(row, {})[0]}
        except Drop:
            continue
    return keys


def percentiles(lengths: "Sequence[int] | array[int]") -> dict[str, float]:
    """Least, median, 90th and 99th percentile, largest and mean."""
    values = np.asarray(lengths)
    names = {"min": 0, "p50": 50, "p90": 90, "p99": 99, "max": 100}
    cuts = np.percentile(values, list(names.values()), method="inverted_cdf")
    return dict(zip(names, map(int, cuts), strict=True)) | {"mean": round(float(values.mean()), 1)}
