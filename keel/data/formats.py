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

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypedDict

from keel.data import records as kinds
from keel.data.files import RowStream
from keel.data.records import Drop, Kind, Record
from keel.errors import DataError
from keel.types import Demonstration, PreferencePair, Prompt, Thumb

Paths = str | Path | Sequence[str | Path]
"""One or several files, folders or Hub ids."""


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
        path: one or several files, folders or Hub ids.
        columns: our field name -> the file's column, for files with other names.

    Raises:
        DataError: a file cannot be read, a row has none of the shapes, or no row is usable.
    """
    return _read(path, columns, kinds.demonstrations())


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
    return _read(path, columns, kinds.preferences(margin=margin))


def read_thumbs(path: Paths, columns: Mapping[str, str] | None = None) -> ReadResult[Thumb]:
    """Replies with a thumb up or down; of preference pairs, which the files may hold as well, see `thumbs_of`.

    Args and errors as for `read_demonstrations`.
    """
    read = _read(path, columns, kinds.thumbs())
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
        path: one or several files, folders or Hub ids.
        columns: our field name -> the file's column, for files with other names.
        first_words: keep only this many words of each text as the prompt, joined by single spaces; rows with fewer
            words are dropped and counted.

    Raises:
        DataError: as for `read_demonstrations`, or `first_words` is less than 1.
    """
    return _read(path, columns, kinds.prompts(first_words))


def _read(paths: Paths, columns: Mapping[str, str] | None, kind: Kind[Record]) -> ReadResult[Record]:
    columns = columns or {}
    kind.check_columns(columns)
    stream = RowStream(paths, kind.text_as)
    records: list[Record] = []
    dropped, repaired = Counter[str](), Counter[str]()
    read = 0
    for row in stream:
        if isinstance(row, DataError):
            raise row
        read += 1
        try:
            of_row, mended = kind.records(row, columns)
            records += of_row
            repaired.update(mended)
        except Drop as reason:
            dropped[str(reason)] += 1
    if not records:
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
        remedy = f"Check that this is a file of {kind.name}s; keel inspect shows what it holds."
        raise DataError(f"No row of {read} can be used: {reasons}.", where=", ".join(stream.files), remedy=remedy)
    counts = Counts(read=read, kept=read - dropped.total(), dropped=dict(dropped), repaired=dict(repaired))
    return ReadResult(records, counts, stream.sha256)
