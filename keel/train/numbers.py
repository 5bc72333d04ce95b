"""Numbers that are not finite: found before an optimizer steps, with the rows and the part that they came from."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn

from keel.errors import NumberError
from keel.models.roles import Role, Roles
from keel.types import Prompt, Rollouts


def check_rows(parts: Mapping[str, Tensor], mask_BT: Tensor, where: str) -> None:
    """Raises NumberError with the first part that is not finite, and its rows. Each is [B], or [B, T] of which only
    the mask's tokens count."""
    for part, x in parts.items():
        bad_B = ~torch.isfinite(x) if x.dim() == 1 else (~torch.isfinite(x) & mask_BT).any(1)
        if bad_B.any():
            rows = bad_B.nonzero().flatten().tolist()
            raise NumberError(f"{part}: not finite in {len(rows)} of {len(x)} rows", where=where, rows=rows)


def rows_at_fault(
    rows: Sequence[int], attempt: Callable[[list[int]], Mapping[str, float]], parameters: Iterable[nn.Parameter]
) -> list[int]:
    """Those rows that alone give a metric or a gradient that is not finite; all of them where none does.

    attempt: adds the gradient of the rows it is given and returns metrics. Gradients are cleared at the end.
    """
    parameters, found = list(parameters), []
    for row in rows:
        _clear(parameters)
        try:
            numbers = attempt([row])
        except NumberError:
            found.append(row)
            continue
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not all(map(math.isfinite, numbers.values())) or not all(bool(g.isfinite().all()) for g in gradients):
            found.append(row)
    _clear(parameters)
    return found or list(rows)


def _clear(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def damaged_weights(roles: Roles) -> list[str]:
    """Names of the weights that are not finite, of all roles, as role/name."""
    found: list[str] = []
    for role in (r for r in get_args(Role) if roles.has(r)):
        own = [*roles.model(role).named_parameters(), *roles.parameters(role).items()]
        found += [f"{role}/{name}" for name, weight in dict(own).items() if not bool(weight.detach().isfinite().all())]
    roles.rest()
    return found


def told_rollouts(rollouts: Rollouts, rows: Sequence[int], scores_B: Tensor | None = None) -> list[dict[str, Any]]:
    """Rows of a batch as they are written for whoever looks into it."""
    sequences = rollouts.sequences()
    return [
        {
            **told_prompt(row, rollouts.prompts[row]),
            "response": rollouts.texts[row],
            "finish": rollouts.finish[row],
            "prompt_ids": sequences[row].prompt_ids,
            "response_ids": sequences[row].response_ids,
            **({} if scores_B is None else {"score": as_written(scores_B[row].item())}),
        }
        for row in rows
    ]


def told_prompt(row: int, prompt: Prompt) -> dict[str, Any]:
    """A row's number, place and prompt."""
    return {"row": row, "source": prompt.source, "prompt": prompt.text}


def as_written(number: float) -> float | str:
    """The number, or its name where it is not finite: JSON has none for it."""
    return number if math.isfinite(number) else str(number)
