"""Sequences that need not lie in memory: items made when they are asked for, and items kept on disk. No torch here.

A `Spool` holds its newest items in memory, at most `HELD` bytes of them, and everything before them in a file, from
which each is read by itself when it is asked for. The file has no name from the start, so nothing of it is left however
the process ends.
"""

import hashlib
import os
import pickle
import tempfile
from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Generic, NamedTuple, Self, TypeVar, overload

import numpy as np

from keel.errors import RunError
from keel.types import TokenSequence

HELD = 32 << 20
"""Bytes of a spool that may be in memory; what is smaller has no file."""

BLOCK = 1 << 20
"""Bytes that are copied at a time."""

T = TypeVar("T")


class Codec(NamedTuple, Generic[T]):
    """An item as bytes, and back."""

    pack: Callable[[T], bytes]
    unpack: Callable[[bytes], T]


class _Lazy(Sequence[T]):
    """A sequence of `_count` items, of which `_item` gives the one in a place."""

    _count: int

    @abstractmethod
    def _item(self, place: int) -> T: ...

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        places = range(self._count)[index]  # knows of negative numbers, steps and IndexError
        return self._item(places) if isinstance(places, int) else [self._item(place) for place in places]


class Each(_Lazy[T]):
    """Items that are made when they are asked for, each time anew.

    count: how many there are. make: place -> item.
    """

    def __init__(self, count: int, make: Callable[[int], T]):
        self._count, self._make = count, make

    def _item(self, place: int) -> T:
        return self._make(place)


class Spool(_Lazy[T]):
    """A list that only grows, in memory while it is small and in a file without a name otherwise.

    codec: of its items. folder: where the file would lie; on a real disk, as it may become as large as the data.
    """

    def __init__(self, codec: Codec[T], folder: Path):
        self._file: BinaryIO | None = None
        self.codec, self.folder = codec, folder
        self._count, self._written = 0, 0
        self._ends, self._newest = array("Q", [0]), bytearray()

    def __del__(self) -> None:
        if self._file:
            self._file.close()

    @property
    def on_disk(self) -> bool:
        """Whether some of it is in a file."""
        return self._file is not None

    def append(self, item: T) -> None:
        """Adds an item. Raises RunError where the disk is full."""
        self._newest += self.codec.pack(item)
        self._ends.append(self._written + len(self._newest))
        self._count += 1
        if len(self._newest) > HELD:
            self._spill()

    def extend(self, items: Iterable[T]) -> None:
        """Adds items. Raises RunError where the disk is full."""
        for item in items:
            self.append(item)

    def _spill(self) -> None:
        try:
            # Open as long as the spool lives; without a buffer that would be written again when a full disk is left.
            self._file = self._file or tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115
            left = memoryview(self._newest)
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise RunError(
                f"rows that are too many for memory could not be put on disk: {error.strerror or error}",
                where=str(self.folder),
                remedy="make room there; while the run lasts, several times the unpacked size of the data is needed",
            ) from error
        self._written += len(self._newest)
        self._newest = bytearray()

    def _item(self, place: int) -> T:
        start, end = self._ends[place], self._ends[place + 1]
        if start >= self._written:
            return self.codec.unpack(bytes(self._newest[start - self._written : end - self._written]))
        assert self._file
        raw = os.pread(self._file.fileno(), end - start, start)  # mapped pages would count as the process's memory
        if len(raw) < end - start:
            raise RunError("a file of rows has become shorter while it was read", where=str(self.folder))
        return self.codec.unpack(raw)

    def save(self, file: BinaryIO) -> str:
        """Writes everything: the items, where each ends (uint64), how many there are. Returns the SHA-256 of it."""
        digest = hashlib.sha256()

        def write(raw: bytes | bytearray) -> None:
            digest.update(raw)
            file.write(raw)

        for at in range(0, self._written, BLOCK):
            assert self._file
            write(os.pread(self._file.fileno(), min(BLOCK, self._written - at), at))
        write(self._newest)
        write(self._ends.tobytes())
        write(len(self).to_bytes(8, "little"))
        return digest.hexdigest()

    @classmethod
    def load(cls, codec: Codec[T], path: Path, sha256: str) -> Self:
        """What `save` wrote, read from there item by item. Raises ValueError where its digest is another, OSError."""
        spool = cls(codec, path.parent)
        spool._file = file = path.open("rb")
        digest = hashlib.sha256()
        while block := file.read(BLOCK):
            digest.update(block)
        if digest.hexdigest() != sha256:
            raise ValueError("its digest is another")
        counted_at = file.seek(-8, os.SEEK_END)
        spool._count = int.from_bytes(file.read(8), "little")
        spool._written = counted_at - 8 * (spool._count + 1)
        file.seek(spool._written)
        spool._ends = array("Q")
        spool._ends.fromfile(file, spool._count + 1)
        return spool


def pack_numbers(lists: Sequence[Sequence[int]]) -> bytes:
    """Lists of numbers below 2^31, 4 bytes a number: how many lists, how long each is, then all that is in them."""
    return array("i", [len(lists), *map(len, lists), *chain.from_iterable(lists)]).tobytes()


def unpack_numbers(raw: bytes) -> list[tuple[int, ...]]:
    """The lists of `pack_numbers`."""
    numbers = array("i", raw)
    count, start = numbers[0], 1 + numbers[0]
    lists: list[tuple[int, ...]] = []
    for length in numbers[1 : 1 + count]:
        lists.append(tuple(numbers[start : start + length]))
        start += length
    return lists


def _pack_sequences(sequences: Sequence[TokenSequence]) -> bytes:
    return pack_numbers([part for s in sequences for part in (s.prompt_ids, s.response_ids, s.response_mask or ())])


def _unpack_sequences(raw: bytes) -> list[TokenSequence]:
    parts = unpack_numbers(raw)
    return [
        TokenSequence(prompt_ids, response_ids, tuple(map(bool, mask)) or None)
        for prompt_ids, response_ids, mask in zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    ]


RECORDS: Codec[Any] = Codec(pickle.dumps, pickle.loads)
"""Records as they were read, with columns of any kind. Only for a file without a name: no foreign bytes come here."""

SEQUENCES = Codec(_pack_sequences, _unpack_sequences)
"""Token ids of the sequences that belong to one row."""


def digest_of(*parts: object) -> bytes:
    """16 bytes that are equal for equal texts, numbers and tuples of them, and for no others."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


def numbered(digests: bytes | bytearray) -> tuple[np.ndarray, np.ndarray]:
    """Of digests of 16 bytes in a row: which value each is, values counted in the order in which they first come; and
    where each value comes first."""
    _, first, value = np.unique(np.frombuffer(digests, "u8, u8"), return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return rank[value], first[order]
