"""Weights of a frozen model that need no memory while the model is not used: they lie in a file, mapped.

The file has no name from the start: nobody can change or shorten it under the run, and nothing of it is left however
the process ends. It is not the model's own file, which another run may write again, may have another dtype, and places
its tensors where it likes: here each begins as torch's own memory does, so that products give the same bytes.
"""

import mmap
import os
import tempfile
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor, nn

from keel.errors import RunError
from keel.models.weights import bytes_of

ALIGNED = 64
"""Bytes; where torch's own allocator lets a tensor begin."""


class Resting:
    """A frozen model's weights in a file without a name in `folder`, at rest from the start.

    On the CPU a pass reads them in place, page by page, as it comes to them: such a model is never asleep, and `rest`
    gives the pages back. On another device `wake` copies them there and `rest` drops the copies. Buffers (a few
    numbers) stay where they are. Raises RunError where the folder cannot hold the file.
    """

    def __init__(self, model: nn.Module, folder: Path):
        self.parameters = list(model.parameters())  # tied ones once
        self.device = self.parameters[0].device
        self.map, places = _written(self.parameters, folder)
        self.hosts = [
            torch.frombuffer(self.map, dtype=p.dtype, count=p.numel(), offset=place).view(p.shape)
            for p, place in zip(self.parameters, places, strict=True)
        ]
        self.rest()

    def wake(self) -> None:
        """Has the weights on the model's device."""
        if self.device.type == "cpu":
            return
        with torch.inference_mode(False):  # what is made there could not be part of a pass with gradients
            for parameter, host in zip(self.parameters, self.hosts, strict=True):
                if parameter.data_ptr() == host.data_ptr():
                    parameter.data = self._moved(host)

    def rest(self) -> None:
        """Gives the memory back; not while a pass is under way."""
        for parameter, host in zip(self.parameters, self.hosts, strict=True):
            parameter.data = host
        # Of a shared mapping of a file nothing is lost: the pages are in the system's cache, or on the disk.
        self.map.madvise(mmap.MADV_DONTNEED)

    def _moved(self, host: Tensor) -> Tensor:
        return host.to(self.device)


def _written(tensors: list[nn.Parameter], folder: Path) -> tuple[mmap.mmap, list[int]]:
    """The mapped file, and where in it each tensor begins."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            places = [_append(file, tensor) for tensor in tensors]
            os.fsync(file.fileno())  # some disks are full only then; and only written pages may leave the cache
            return mmap.mmap(file.fileno(), 0), places
    except OSError as error:
        needed = sum(t.numel() * t.element_size() for t in tensors) / 2**20
        raise RunError(
            f"the weights of a frozen role ({needed:.0f} MiB) could not be put on disk: {error.strerror or error}",
            where=str(folder),
            remedy="make room there for each frozen role, or set model.rest_frozen to false",
        ) from error


def _append(file: BinaryIO, tensor: nn.Parameter) -> int:
    place = -(-file.tell() // ALIGNED) * ALIGNED
    file.seek(place)
    left = memoryview(bytes_of(tensor.detach().cpu().contiguous()))
    while left:
        left = left[file.write(left) :]
    return place
