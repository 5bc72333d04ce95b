"""Several parts of a batch at once, on one core each, where that is faster than one part on all cores.

A small model's operations are too short for several cores: most of the time would go into waiting for each other. Its
parts of a batch are independent, so each core takes one (docs/decisions.md). A large model keeps all cores busy with
one part, and two parts would need its weights from memory twice.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

import torch
from torch import Tensor, nn

SMALL_PARAMETERS = 16_000_000
"""Up to here a model fits the processor's caches."""

T = TypeVar("T")
R = TypeVar("R")


def workers_for(model: nn.Module, device: torch.device) -> int:
    """How many parts of a batch to work on at once: torch's threads for a small model on the CPU, else 1."""
    small = device.type == "cpu" and sum(p.numel() for p in model.parameters()) <= SMALL_PARAMETERS
    return torch.get_num_threads() if small else 1


@functools.cache
def _pool(workers: int) -> ThreadPoolExecutor:
    # Kept: a new thread would begin with cold caches and a heap of its own at every step.
    return ThreadPoolExecutor(workers, "keel-part", initializer=torch.set_num_threads, initargs=(1,))


def side_by_side(work: Callable[[T], R], parts: Sequence[T], workers: int) -> Iterator[R]:
    """The results of `work`, in the order of the parts. Several workers are threads of one core each; torch releases
    the interpreter inside its operations. Where the caller stops early or a part fails, parts that have not begun never
    do, and those that have are waited for."""
    if workers == 1 or len(parts) == 1:  # one that is alone has all cores
        yield from map(work, parts)
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a worker's own setting does not reach the math library, whose count is one for all
    futures: list[Future[R]] = []
    try:
        futures = [_pool(workers).submit(work, part) for part in parts]
        for future in futures:
            yield future.result()
    finally:
        for future in futures:
            future.cancel()
        wait(futures)
        torch.set_num_threads(threads)


def add_gradients(
    loss_of: Callable[[T], tuple[Tensor, R]], parts: Sequence[T], parameters: Sequence[nn.Parameter], workers: int
) -> list[R]:
    """Adds the gradient of each part's loss to the parameters, in the order of the parts however many run at once.

    loss_of: gives the loss and whatever else is wanted of it, which is returned. Raises what it raises.
    """

    def work(part: T) -> tuple[tuple[Tensor | None, ...], R]:
        loss, wanted = loss_of(part)
        if workers == 1:
            loss.backward()
            return (), wanted
        return torch.autograd.grad(loss, parameters, allow_unused=True), wanted

    out: list[R] = []
    for gradients, wanted in side_by_side(work, parts, workers):
        for parameter, gradient in zip(parameters if gradients else (), gradients, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        out.append(wanted)
    return out
