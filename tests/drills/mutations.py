"""Ways in which a file of a run folder is changed by the fuzz drill."""

import hashlib
import json
import os
import pickle
import random
from pathlib import Path
from typing import Any


class Bomb:
    """Makes a file when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch struck-by-a-pickle",)


def mutate(victim: Path, chance: random.Random) -> str:
    """Changes a file in one of many ways and says how."""
    content = bytearray(victim.read_bytes())
    kinds = ["flip", "cut", "empty", "noise", "pickle", "nested", "list", "folder", "link", "pipe", "gone"]
    # Values of another kind in files that are otherwise as a run writes them reach further than noise.
    how = "value" if victim.suffix in (".json", ".jsonl") and chance.random() < 0.5 else chance.choice(kinds)
    victim.unlink()
    if how == "flip" and content:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    new = {
        "flip": bytes(content),
        "cut": bytes(content[: chance.randrange(len(content) + 1)]),
        "empty": b"",
        "noise": chance.randbytes(100),
        "pickle": pickle.dumps(Bomb()),
        "nested": b"[" * 100_000,
        "list": b"[1]\n",
        "value": other_value(bytes(content), victim.suffix == ".jsonl", chance) if how == "value" else b"",
    }
    if how in new:
        victim.write_bytes(new[how])
    elif how == "folder":
        victim.mkdir()
    elif how == "link":
        victim.symlink_to("nowhere")
    elif how == "pipe":
        os.mkfifo(victim)
    return how


def other_value(content: bytes, in_lines: bool, chance: random.Random) -> bytes:
    """JSON with one value, anywhere in it, replaced by one of another kind."""
    lines = content.splitlines() if in_lines else [content]
    if not lines:
        return content
    number = chance.randrange(len(lines))
    places: list[tuple[Any, Any]] = []
    waiting = [tree := json.loads(lines[number])]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict | list):
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            places += [(node, key) for key in keys]
            waiting += [node[key] for key in keys]
    if places:
        node, key = chance.choice(places)
        node[key] = chance.choice([None, True, -1, 0, 10**20, 1e308, "x", "", "../..", [], [1], {}, {"step": "x"}])
    lines[number] = json.dumps(tree).encode()
    return b"\n".join(lines) + b"\n" * in_lines


def reseal(victim: Path) -> None:
    """Makes a checkpoint's manifest fit its changed file, as one who wants to do harm would."""
    manifest = victim.with_name("manifest.json")
    if victim == manifest:
        return
    tree = json.loads(manifest.read_text())
    content = victim.read_bytes()
    tree["files"][victim.name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest.write_text(json.dumps(tree))
