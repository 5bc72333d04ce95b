"""Every public symbol in keel/ has a docstring; nothing in keel/ prints, hides an error or leaves work for later."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

KEEL = Path(__file__).parents[2] / "keel"
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def public(node: Documented, name: str) -> Iterator[tuple[str, Documented]]:
    """(name, node) of a module or class and of all that is public directly in it; not what is inside functions."""
    yield name, node
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not child.name.startswith("_"):
            # A setter belongs to its property, an overload to the function after it.
            if {ast.unparse(d).split(".")[-1] for d in child.decorator_list} & {"setter", "overload"}:
                continue
            yield from public(child, f"{name}.{child.name}")


def faults(text: str, name: str) -> list[str]:
    """One line for each thing in a file's text that is not allowed in keel/."""
    tree = ast.parse(text)
    found = [f"{n}: no docstring" for n, node in public(tree, name) if not (ast.get_docstring(node) or "").strip()]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            found.append(f"{name}:{node.lineno}: print")
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            found.append(f"{name}:{node.lineno}: bare except")
    for number, line in enumerate(text.splitlines(), 1):
        if re.search(r"\b(TODO|FIXME|XXX)\b", line):
            found.append(f"{name}:{number}: work left for later")
    return found


def test_keel():
    paths = sorted(KEEL.rglob("*.py"))
    assert paths, f"nothing to check in {KEEL}"
    found = [line for p in paths for line in faults(p.read_text(encoding="utf-8"), str(p.relative_to(KEEL.parent)))]
    assert found == []


def test_every_folder_is_a_package():
    assert [p for p in {path.parent for path in KEEL.rglob("*.py")} if not (p / "__init__.py").exists()] == []


GOOD = '''"""A module."""
from typing import overload

class Thing:
    """A thing."""

    def __init__(self):
        self._size = 0

    @property
    def size(self) -> int:
        """Its size."""
        return self._size

    @size.setter
    def size(self, value: int):
        self._size = value

    def _hidden(self):
        def inner(): ...

class _Hidden:
    def method(self): ...

@overload
def twice(x: int) -> int: ...
def twice(x):
    """Two times x; blueprint(x) is no print."""
    return 2 * x
'''
BAD = {
    "module": ("import os\n", "m: no docstring"),
    "class": ('"""M."""\nclass A: ...\n', "m.A: no docstring"),
    "method": ('"""M."""\nclass A:\n    """A."""\n    def run(self): ...\n', "m.A.run: no docstring"),
    "nested class": ('"""M."""\nclass A:\n    """A."""\n    class B: ...\n', "m.A.B: no docstring"),
    "function": ('"""M."""\ndef run(): ...\n', "m.run: no docstring"),
    "async": ('"""M."""\nasync def run(): ...\n', "m.run: no docstring"),
    "blank": ('"""M."""\ndef run():\n    """ """\n', "m.run: no docstring"),
    "print": ('"""M."""\nprint("x")\n', "m:2: print"),
    "except": ('"""M."""\ntry:\n    x = 1\nexcept:\n    x = 2\n', "m:4: bare except"),
    "later": ('"""M."""\nx = 1  # TO' + "DO: more\n", "m:2: work left for later"),
}


def test_good_text_passes():
    assert faults(GOOD, "m") == []


@pytest.mark.parametrize("name", BAD)
def test_bad_text_is_found(name: str):
    text, fault = BAD[name]
    assert faults(text, "m") == [fault]
