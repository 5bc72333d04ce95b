"""The import arrows: a part of keel imports only from parts above its own in ORDER, wherever the import stands."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

KEEL = Path(__file__).parents[2] / "keel"
ORDER = (
    "errors",
    "config",
    "plain_yaml",
    "settings",
    "recipe",
    "metrics",
    "types",
    "algo",
    "data",
    "sandbox",
    "models",
    "rollout",
    "rewards",
    "parallel",
    "runs",
    "inspect",
    "diagnose",
    "evaluate",
    "train",
    "classic",
    "web",
    "usage",
    "cli",
    "__main__",
)
ALONE = {"algo", "types", "config", "errors", "metrics", "__init__"}
"""Parts that import nothing else of keel."""
NO_TORCH = {"config", "errors", "metrics", "diagnose", "web", "__init__"}
"""Parts that never import torch, not even within a function."""
TORCH_BRINGERS = {"torch", "transformers", "peft", "datasets", "safetensors", "accelerate"}
LOADS_NO_TORCH = (
    "errors",
    "config",
    "settings",
    "recipe",
    "metrics",
    "classic.config",
    "data.formats",
    "inspect.command",
    "cli",
)
"""Modules whose import loads no torch, so that help and refusals answer at once."""


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import in a file; a relative import keeps its dots, `from a import b` gives a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{base.rstrip('.') or base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant):
                    yield node.lineno, str(argument.value)


def violations(package: Path) -> list[str]:
    """One line for each import in `package` (laid out as keel/) that the arrows do not allow."""
    found = []
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package)
        part = relative.parts[0].removesuffix(".py")
        if part not in (*ORDER, "__init__"):
            found.append(f"{relative}: {part} has no place in ORDER")
            continue
        for line, name in imported(ast.parse(path.read_text(encoding="utf-8"))):
            reason = refusal(part, name)
            if reason:
                found.append(f"{relative}:{line}: {name}: {reason}")
    return found


def refusal(part: str, name: str) -> str:
    """Why `part` may not import `name`; empty where it may."""
    top, *rest = name.split(".")
    if not top:
        return "a relative import"
    if top != "keel":
        return f"{part} imports no torch" if part in NO_TORCH and top in TORCH_BRINGERS else ""
    target = rest[0] if rest else ""
    if target not in ORDER:
        return "name the part of keel that is imported"
    if target == part:
        return ""
    if part in ALONE:
        return f"{part} imports nothing else of keel"
    return "" if ORDER.index(target) < ORDER.index(part) else f"{target} does not stand above {part}"


def test_arrows():
    assert list(KEEL.rglob("*.py")), f"nothing to check in {KEEL}"
    assert violations(KEEL) == []


@pytest.mark.parametrize("module", LOADS_NO_TORCH)
def test_loads_no_torch(module: str):
    code = f"import sys, keel.{module}; print([m for m in ('torch', 'transformers', 'peft') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=KEEL.parent, check=False)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


ALLOWED = {
    "errors.py": "import dataclasses",
    "algo/kl.py": "import torch\nfrom keel.algo.masking import masked_mean",
    "train/online.py": "from keel import types\nfrom keel.algo import kl\nimport keel.rollout.local",
    "cli.py": "def main():\n    from keel.train.online import run",
}
REFUSED = {
    "upwards": ("rollout/local.py", "from keel.train.online import run", "train does not stand above rollout"),
    "upwards by name": ("data/encode.py", "from keel import models", "models does not stand above data"),
    "upwards, plain import": (
        "data/encode.py",
        "import keel.models.heads as heads",
        "models does not stand above data",
    ),
    "upwards, lazily": (
        "models/shared.py",
        "def load():\n    if True:\n        from keel.cli import main",
        "cli does not stand above models",
    ),
    "upwards, by string": (
        "models/shared.py",
        "import importlib\nimportlib.import_module('keel.cli')",
        "cli does not stand above models",
    ),
    "only for types": (
        "types.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from keel.errors import KeelError",
        "types imports nothing else of keel",
    ),
    "pure": ("algo/kl.py", "from keel.types import Experience", "algo imports nothing else of keel"),
    "config alone": ("config.py", "from keel.errors import ConfigError", "config imports nothing else of keel"),
    "package alone": ("__init__.py", "from keel.errors import KeelError", "__init__ imports nothing else of keel"),
    "torch": ("metrics.py", "def mean():\n    from torch import Tensor", "metrics imports no torch"),
    "brings torch": ("diagnose/rule.py", "import transformers.utils", "diagnose imports no torch"),
    "relative": ("train/sft.py", "from .optim import step", "a relative import"),
    "relative, bare": ("train/sft.py", "from . import optim", "a relative import"),
    "everything": ("train/sft.py", "import keel", "name the part of keel that is imported"),
    "unknown part": ("helpers/text.py", "import re", "helpers has no place in ORDER"),
}


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_allowed_imports_pass(tmp_path: Path):
    assert violations(write(tmp_path, ALLOWED)) == []


@pytest.mark.parametrize("name", REFUSED)
def test_refused_imports_are_found(tmp_path: Path, name: str):
    path, text, reason = REFUSED[name]
    found = violations(write(tmp_path, {**ALLOWED, path: text}))
    assert len(found) == 1, found
    assert found[0].startswith(path), found
    assert reason in found[0]
