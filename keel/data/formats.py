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

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypedDict

import numpy as np

from keel.data import records as kinds
from keel.data.files import RowStream
from keel.data.records import Drop, Kind, Record
from keel.data.spool import RECORDS, Each, Spool, digest_of, numbered
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

    records: in the order of the files; on disk where they are many and a folder for them was given.
    counts: what became of the rows.
    sha256: of the files' content, unpacked; for several files of the concatenated digests.
    """

    records: Sequence[Record]
    counts: Counts
    sha256: str


def read_demonstrations(
    path: Paths, columns: Mapping[str, str] | None = None, *, folder: Path | None = None
) -> ReadResult[Demonstration]:
    """Prompts with a reply to imitate; of a conversation the last turn is the reply.

    Args:
        path: one or several files, folders or Hub ids.
        columns: our field name -> the file's column, for files with other names.
        folder: where records that are many lie while they are used, in a file without a name (`Spool`); None: they are
            a list in memory, however many.

    Raises:
        DataError: a file cannot be read, a row has none of the shapes, or no row is usable.
        RunError: the disk of `folder` is full.
    """
    return _read(path, columns, kinds.demonstrations(), folder)


def read_preferences(
    path: Paths, columns: Mapping[str, str] | None = None, *, margin: bool = False, folder: Path | None = None
) -> ReadResult[PreferencePair]:
    """Pairs of replies, the preferred one first; ties, identical pairs and empty replies are dropped and counted.

    Args:
        path, columns, folder: as for `read_demonstrations`.
        margin: every row must have a field `margin` too, a number of at least 0. Without it such a column is one of
            the others.

    Raises:
        DataError, RunError: as for `read_demonstrations`.
    """
    return _read(path, columns, kinds.preferences(margin=margin), folder)


def read_thumbs(
    path: Paths, columns: Mapping[str, str] | None = None, *, folder: Path | None = None
) -> ReadResult[Thumb]:
    """Replies with a thumb up or down; of preference pairs, which the files may hold as well, see `thumbs_of`.

    Args and errors as for `read_demonstrations`.
    """
    read = _read(path, columns, kinds.thumbs(), folder)
    thumbs: list[Thumb] | Spool[Thumb] = Spool(RECORDS, folder) if folder else []
    thumbs.extend(record for record in read.records if isinstance(record, Thumb))
    places = array("q", (at for at, record in enumerate(read.records) if isinstance(record, PreferencePair)))
    pairs: Sequence[Any] = Each(len(places), lambda at: read.records[places[at]])
    thumbs.extend(thumbs_of(pairs))
    return ReadResult(thumbs, read.counts, read.sha256)


def thumbs_of(pairs: Sequence[PreferencePair]) -> Iterator[Thumb]:
    """Each reply of the pairs once: a thumb up where it won more of its pairs than it lost, down where fewer.

    A single pair gives both. Of a ranking that was cut into pairs it is the upper half and the lower half, without the
    one in the middle; a reply that won as often as it lost says nothing.
    """
    replies = bytearray()
    for pair in pairs:
        asked = tuple(message["content"] for message in pair.prompt.messages)
        replies += digest_of(asked, pair.chosen) + digest_of(asked, pair.rejected)
    reply, first = numbered(replies)
    won = np.bincount(reply, np.tile((1, -1), len(pairs)))
    for place, points in zip(first.tolist(), won.tolist(), strict=True):
        if points:
            pair = pairs[place // 2]
            yield Thumb(pair.prompt, pair.rejected if place % 2 else pair.chosen, points > 0)


def read_prompts(
    path: Paths,
    columns: Mapping[str, str] | None = None,
    *,
    first_words: int | None = None,
    folder: Path | None = None,
) -> ReadResult[Prompt]:
    """Prompts, with the row's other columns for reward functions.

    Args:
        path, columns, folder: as for `read_demonstrations`.
        first_words: keep only this many words of each text as the prompt, joined by single spaces; rows with fewer
            words are dropped and counted.

    Raises:
        DataError, RunError: as for `read_demonstrations`, or `first_words` is less than 1.
    """
    return _read(path, columns, kinds.prompts(first_words), folder)


def _read(
    paths: Paths, columns: Mapping[str, str] | None, kind: Kind[Record], folder: Path | None
) -> ReadResult[Record]:
    columns = columns or {}
    kind.check_columns(columns)
    stream = RowStream(paths, kind.text_as)
    records: list[Record] | Spool[Record] = Spool(RECORDS, folder) if folder else []
    dropped, repaired = Counter[str](), Counter[str]()
    read = 0
    for row in stream:
        if isinstance(row, DataError):
            raise row
        read += 1
        try:
            of_row, mended = kind.records(row, columns)
            records.extend(of_row)
            repaired.update(mended)
        except Drop as reason:
            dropped[str(reason)] += 1
    if not records:
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
        remedy = f"Check that this is a file of {kind.name}s; keel inspect shows what it holds."
        raise DataError(f"No row of {read} can be used: {reasons}.", where=", ".join(stream.files), remedy=remedy)
    counts = Counts(read=read, kept=read - dropped.total(), dropped=dict(dropped), repaired=dict(repaired))
    return ReadResult(records, counts, stream.sha256)
