"""A torch optimizer as named tensors and plain JSON, and back without a bit of difference."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from keel.errors import RunError


def flatten_optimizer(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimizer's state as tensors named "<parameter index>.<key>" and the rest as JSON.

    The tensors are the optimizer's own: save them before the next step. The JSON has the optimizer's class, its
    parameter groups (learning rates included), the values that are no tensors, and the names of the tensors.
    """
    raw = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for index, entries in raw["state"].items():
        for key, value in entries.items():
            (tensors if isinstance(value, Tensor) else values)[f"{index}.{key}"] = value
    state = {
        "class": type(optimizer).__name__,
        "groups": raw["param_groups"],
        "values": values,
        "tensors": sorted(tensors),
    }
    return tensors, state


def restore_optimizer(optimizer: Optimizer, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Puts back what `flatten_optimizer` gave; `tensors` are copied.

    Raises:
        RunError: another optimizer, other parameter groups, a tensor that is missing, unexpected or of another shape.
            The optimizer is as it was.
    """
    _require_same("optimizer", type(optimizer).__name__, state.get("class"))
    _require_same("tensors", sorted(state.get("tensors", [])), sorted(tensors))
    groups = _groups(optimizer.state_dict()["param_groups"], state.get("groups", []))
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    entries: dict[int, dict[str, Any]] = {}
    for name, value in {**tensors, **state.get("values", {})}.items():
        index, _, key = name.partition(".")
        if not index.isdecimal() or int(index) >= len(parameters):
            raise _mismatch(f"{name} belongs to no parameter: there are {len(parameters)}")
        if isinstance(value, Tensor):
            # Moments have their parameter's shape; counters are single numbers.
            if value.dim() and value.shape != parameters[int(index)].shape:
                shape = tuple(parameters[int(index)].shape)
                raise _mismatch(f"{name} has the shape {tuple(value.shape)}, its parameter {shape}")
            value = value.clone()
        entries.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": entries, "param_groups": groups})
    for name, value in flatten_optimizer(optimizer)[0].items():
        assert value.dtype == tensors[name].dtype, f"torch cast {name} from {tensors[name].dtype} to {value.dtype}"


def _groups(own: list[dict[str, Any]], saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The saved groups with tuples where the optimizer has tuples (JSON has none)."""
    _require_same("number of parameter groups", len(own), len(saved))
    restored = []
    for number, (mine, other) in enumerate(zip(own, saved, strict=True)):
        _require_same(f"keys of parameter group {number}", sorted(mine), sorted(other))
        for key in ("params", "param_names"):
            _require_same(f"{key} of parameter group {number}", mine.get(key), other.get(key))
        restored.append({key: tuple(v) if isinstance(mine[key], tuple) else v for key, v in other.items()})
    return restored


def _require_same(what: str, mine: Any, saved: Any) -> None:
    if mine == saved:
        return
    if isinstance(mine, list) and isinstance(saved, list):
        missing, extra = [x for x in mine if x not in saved], [x for x in saved if x not in mine]
        raise _mismatch(f"{what}: missing {missing[:5]}, unexpected {extra[:5]} ({len(mine)} against {len(saved)})")
    raise _mismatch(f"{what}: {saved} in the checkpoint, {mine} now")


def _mismatch(reason: str) -> RunError:
    return RunError(
        f"the optimizer's state does not fit: {reason}",
        remedy="resume with the model and optimizer settings that the run was started with",
    )
