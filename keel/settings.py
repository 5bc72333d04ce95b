"""Trees of settings: checked by their types, changed by flags, refused in one way, and listed for --help.

A flag is the dotted path of a setting: `--ppo.policy.clip 0.1`. Its value stays text until the setting's own type reads
it, so that a flag and the same line of YAML are refused by the same check, in the same words.
"""

import difflib
import re
import shlex
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from keel.errors import ConfigError
from keel.plain_yaml import Document

T = TypeVar("T")
Line = Callable[[Sequence[int | str]], int | None]
"""The line of a path of keys in a file; None where it has none."""

_CUT = "sampling is cut, but the ratio is not: the log-probabilities of training would be of another distribution"
_BENT = "it changes what is sampled but not the log-probabilities, so that the measured KL turns negative"
REFUSED = {
    "top_p": _CUT,
    "top_k": _CUT,
    "min_new_tokens": _BENT,
    "repetition_penalty": _BENT,
    "dropout": "dropout is off in every role, so that the ratio is exactly 1 before the first step",
}
"""Keys that people bring from elsewhere and that Keel does not have, with the reason."""

HIDDEN = "..."
NULL = ("none", "null")
"""How a flag says null."""


@dataclass(frozen=True)
class Flag:
    """A setting on the command line. keys: its path; value: text, or a list or mapping of texts; null as None."""

    keys: tuple[str, ...]
    value: Any

    def __str__(self) -> str:
        value = self.value
        if _secret(self.keys):
            value = HIDDEN
        parts = list(value) if isinstance(value, list) else ["none" if value is None else str(value)]
        return shlex.join([flag_of(self.keys), *map(_without_credentials, parts)])


def _secret(keys: Sequence[str]) -> bool:
    """Whether a setting's name is that of a credential, which people put there by mistake: no message repeats it."""
    return bool(keys) and bool({"token", "password", "secret", "key"} & set(keys[-1].split("_")))


def _without_credentials(text: str) -> str:
    """An address without its user, password and query, in which tokens are sent."""
    return re.sub(r"(://[^?#\s]*)[?#]\S*", rf"\1?{HIDDEN}", re.sub(r"://[^/\s]*@", f"://{HIDDEN}@", text))


def flag_of(keys: Sequence[str]) -> str:
    """The flag of a path of keys: ("ppo", "kl", "horizon") is --ppo.kl.horizon."""
    return "--" + ".".join(keys).replace("_", "-")


def no_line(keys: Sequence[int | str]) -> None:
    """The `Line` of what is in no file."""


def check(kind: type[T], tree: Any, where: str, flags: Sequence[Flag] = (), line: Line = no_line) -> T:
    """A tree of plain values as `kind`, a pydantic model or dataclass. flags: those that it has been changed by.
    line: where its keys stand in the file `where`.

    Raises ConfigError with every fault found, each with its key or its flag.
    """
    try:
        return TypeAdapter(kind).validate_python(tree)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        concerned = [flag for flag in flags if any(_meet(flag, fault["loc"]) for fault in faults)]
        told = [_told(kind, fault, tree, concerned) for fault in faults]
        lines = sorted({found for fault in faults if (found := line(fault["loc"])) is not None})
        place = ":".join(filter(None, (where, ", ".join(map(str, lines)))))
        raise refusal(told, ", with ".join(filter(None, (place, " ".join(map(str, concerned)))))) from None


def change(kind: type[T], tree: Mapping[str, Any], arguments: Sequence[str], where: str) -> T:
    """`check` of the tree after flags have changed it. A section that the tree leaves out cannot be added by a flag."""
    flags = read_flags(kind, tree, arguments, where)
    changed: Any = deepcopy(dict(tree))
    for flag in flags:
        place = changed
        for key in flag.keys[:-1]:
            place = place.setdefault(key, {})
        place[flag.keys[-1]] = flag.value
    return check(kind, changed, where, flags)


def read_flags(kind: type, tree: Mapping[str, Any], arguments: Sequence[str], where: str) -> list[Flag]:
    """The arguments as flags. Raises ConfigError with every one that is no setting or has no value."""
    flags, faults, rest = [], [], list(arguments)
    while rest:
        first = rest.pop(0)
        name, given, value = first.removeprefix("--").partition("=")
        keys = tuple(name.replace("-", "_").split("."))
        taken = [value] if given else []
        while not given and rest and not rest[0].startswith("--"):
            taken.append(rest.pop(0))
        if not first.startswith("--"):
            faults.append((f"{first!r} is no flag", "give settings as --name value"))
            continue
        field, fault = _field(kind, tree, keys, where)
        if field is None or fault:
            assert fault is not None
            faults.append(fault)
            continue
        read = _value(field.annotation, taken)
        if isinstance(read, _NoValue):
            faults.append((f"{flag_of(keys)}: {read.what}", f"give it {_told_shape(field.annotation)}"))
        else:
            flags = [flag for flag in flags if flag.keys != keys] + [Flag(keys, read)]  # of two the last counts
    if faults:
        raise refusal(faults, where)
    return flags


def refusal(faults: Sequence[tuple[str, str]], where: str) -> ConfigError:
    """One error of several faults, (what, remedy) each; what is the same in two is said once."""
    lines = dict.fromkeys(what for what, _ in faults)
    remedies = dict.fromkeys(remedy for _, remedy in faults if remedy)
    return ConfigError("\n".join(lines), where=where, remedy="; ".join(remedies).replace("?; ", "? "))


def help_lines(kind: type, tree: Mapping[str, Any]) -> Iterator[str]:
    """Every setting as a flag, with its values, what it is in the tree, and its meaning."""
    for keys, field, section in _settings(kind, tree):
        shown = _at(tree, keys, field.get_default(call_default_factory=True))
        if section is not None:
            if shown is None:
                yield f"  {flag_of(keys)}...: not there; to have it, write `{keys[-1]}:` into the recipe"
            else:
                yield f"\n{'.'.join(keys)}: {_flat(field.description)}"
            continue
        now = "needed" if field.is_required() and not _holds(tree, keys) else f"now {_plain(shown)}"
        yield f"  {flag_of(keys)} {_shape(field.annotation)}  ({now})"
        yield f"      {_flat(field.description)}"


def _told(kind: type, fault: ErrorDetails, tree: Any, flags: Sequence[Flag]) -> tuple[str, str]:
    """(what, remedy) of one fault that pydantic has found."""
    keys = [str(key) for key in fault["loc"]]
    by_flag = any(list(flag.keys) == keys[: len(flag.keys)] for flag in flags)
    place = flag_of(keys) if by_flag else ".".join(keys)
    at = f"{place}: " if place else ""
    message, given = fault["msg"].removeprefix("Value error, "), HIDDEN if _secret(keys) else fault["input"]
    match fault["type"]:
        case "extra_forbidden":
            return f"{at}there is no such setting", _nearest(kind, tree, keys, by_flag)
        case "missing":
            return f"{at}this setting is needed", f"add {place}"
        case "value_error":
            what, _, remedy = message.rpartition("; ")
            whole = what or remedy
            return f"{at}{whole}", remedy if what else "change one of the settings that it names"
        case "model_type" | "dataclass_type" | "dict_type":
            return f"{at}it is to hold settings, this is {_plain(given)}", f"write what it holds below `{place}:`"
        case "literal_error":
            choices = [str(c) for c in _choices(_annotation(kind, keys))]
            near = difflib.get_close_matches(str(given), choices, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(choices)}"
            return f"{at}{message.replace('Input should', 'it should')}, not {_plain(given)}", remedy
    message = message.partition(", unable")[0].replace("Input should", "it should")
    form = " in that range" if "_than" in fault["type"] else " of that form" * ("pattern" in fault["type"])
    return (
        f"{at}{message}, not {_plain(given)}",
        f"give {_told_shape(_annotation(kind, keys))}{form}",
    )


def _field(
    kind: type, tree: Mapping[str, Any], keys: tuple[str, ...], where: str
) -> tuple[FieldInfo | None, tuple[str, str] | None]:
    """The setting at a path, or why there is none: (what, remedy)."""
    section, place = kind, tree
    for depth, key in enumerate(keys):
        field = _fields(section).get(key)
        if field is None:
            return None, (f"{flag_of(keys)}: there is no such setting", _nearest(kind, tree, keys, flags=True))
        below = _section_of(field.annotation)
        if below is None:
            if keys[depth + 1 :]:
                return None, (
                    f"{flag_of(keys)}: there is no such setting",
                    f"did you mean {flag_of(keys[: depth + 1])}?",
                )
            return field, None
        place, section = place.get(key, {}), below
        if place is None:
            path = ".".join(keys[: depth + 1])
            what = f"{flag_of(keys)}: there is no section {path}, and a flag cannot add one"
            return None, (what, f"add `{path}:` to {where}")
    inside = _listed([path for path, _, _ in _settings(kind, tree) if path[:-1] == keys], kind, flags=True)
    return None, (f"{flag_of(keys)} holds settings and has no value of its own", f"give one of {inside}")


def _nearest(kind: type, tree: Any, keys: Sequence[str], flags: bool) -> str:
    """A remedy for a setting that does not exist: the one that was meant."""
    key = keys[-1]
    if key in REFUSED:
        return f"remove {flag_of(keys) if flags else key}: {REFUSED[key]}"
    paths = [path for path, _, section in _settings(kind, tree) if section is None]
    inside = tuple(keys[:-1])
    here = [path for path, _, _ in _settings(kind, tree) if path[:-1] == inside]
    same = [path for path in paths if path[-1] == key]
    below = [path for path in same if path[: len(inside)] == inside]
    near = difflib.get_close_matches(key, [path[-1] for path in here], n=1, cutoff=0.5)
    found = below or [path for path in here if path[-1] in near] or same
    if not found:
        alike = difflib.get_close_matches(".".join(keys), [".".join(path) for path in paths], n=1, cutoff=0.7)
        found = [path for path in paths if ".".join(path) in alike]
    told = [flag_of(path) if flags else ".".join(path[len(inside) :] if path in here else path) for path in found]
    if told:
        return f"did you mean {' or '.join(told)}?"
    return f"settings there: {_listed(here or paths, kind, flags)}"


def _listed(paths: Sequence[tuple[str, ...]], kind: type, flags: bool) -> str:
    if not flags:
        return ", ".join(path[-1] for path in paths)
    return ", ".join(flag_of(path) + ".*" * (_section_of(_annotation(kind, path)) is not None) for path in paths)


def _settings(kind: type, tree: Any, before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldInfo, Any]]:
    """(path, field, section or None) of every setting and section, without what stands below a section that the tree
    leaves out."""
    for name, field in _fields(kind).items():
        section, keys = _section_of(field.annotation), (*before, name)
        yield keys, field, section
        if section is not None and _at(tree, keys, {}) is not None:
            yield from _settings(section, tree, keys)


def _fields(kind: Any) -> dict[str, FieldInfo]:
    return getattr(kind, "__pydantic_fields__", {})


def _section_of(annotation: Any) -> type | None:
    return next((one for one in (annotation, *get_args(annotation)) if isinstance(one, type) and _fields(one)), None)


def _annotation(kind: type, keys: Sequence[str]) -> Any:
    annotation: Any = kind
    for key in keys:
        field = _fields(_section_of(annotation)).get(key)
        if field is None:  # an item of a list
            return annotation
        annotation = field.annotation
    return annotation


def _meet(flag: Flag, place: Sequence[int | str]) -> bool:
    """Whether a flag is at, below or above the place of a fault."""
    keys = [str(key) for key in place]
    return all(a == b for a, b in zip(flag.keys, keys, strict=False))


def _holds(tree: Any, keys: Sequence[str]) -> bool:
    missing = object()
    return _at(tree, keys, missing) is not missing


def _at(tree: Any, keys: Sequence[str], default: Any) -> Any:
    for key in keys:
        if not isinstance(tree, Mapping) or key not in tree:
            return default
        tree = tree[key]
    return tree


@dataclass(frozen=True)
class _NoValue:
    what: str


def _value(annotation: Any, taken: list[str]) -> Any:
    kinds = _kinds(annotation)
    if taken and taken[0].lower() in NULL and len(taken) == 1 and type(None) in kinds:
        return None
    if list in kinds or tuple in kinds:
        return _yaml(taken[0], list) if len(taken) == 1 and taken[0].startswith("[") else taken
    if dict in kinds:
        if len(taken) == 1:
            return _yaml(taken[0], dict)
        return _NoValue("a key has no value") if len(taken) % 2 else dict(zip(taken[::2], taken[1::2], strict=True))
    if not taken and bool in kinds:
        return "true"
    if len(taken) != 1:
        return _NoValue(f"{' '.join(taken)!r} are {len(taken)} values" if taken else "there is no value")
    return taken[0]


def _yaml(text: str, kind: type) -> Any:
    try:
        value = Document(text).value
    except yaml.YAMLError:
        value = None
    return value if isinstance(value, kind) else _NoValue(f"{text!r} is none")


def _kinds(annotation: Any) -> set[Any]:
    """The plain types that an annotation takes."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return set().union(*(_kinds(one) for one in get_args(annotation)))
    if hasattr(annotation, "__metadata__"):
        return _kinds(get_args(annotation)[0])
    return {origin or annotation}


def _choices(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [choice for one in get_args(annotation) for choice in _choices(one)]


def _shape(annotation: Any) -> str:
    """What stands behind a flag."""
    if choices := _choices(annotation):
        return "|".join(map(str, choices))
    shapes = {bool: "true|false", int: "INTEGER", float: "NUMBER", str: "TEXT"}
    if item := _item(annotation):
        return f"{_shape(item)} ..."
    return next((shape for kind, shape in shapes.items() if kind in _kinds(annotation)), "KEY VALUE ...")


def _item(annotation: Any) -> Any:
    """What a list or tuple holds; None where the annotation is of neither."""
    if get_origin(annotation) in (list, tuple):
        return get_args(annotation)[0]
    if get_origin(annotation) in (Union, types.UnionType):
        return next(filter(None, map(_item, get_args(annotation))), None)
    return None


def _told_shape(annotation: Any) -> str:
    """The same in a sentence."""
    words = {"INTEGER": "an integer", "NUMBER": "a number", "TEXT": "a text", "true|false": "true or false"}
    words |= {
        "TEXT ...": "one or more texts",
        "NUMBER ...": "one or more numbers",
        "INTEGER ...": "one or more integers",
        "KEY VALUE ...": "pairs of key and value",
    }
    shape = _shape(annotation)
    return words.get(shape, f"one of {shape.replace('|', ', ')}")


def _plain(value: Any) -> str:
    if isinstance(value, bool | None):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return " ".join(map(_plain, value)) or "none"
    text = _without_credentials(str(value))
    return text if len(text) < 100 else text[:97] + "..."


def _flat(text: str | None) -> str:
    return " ".join((text or "").split())
