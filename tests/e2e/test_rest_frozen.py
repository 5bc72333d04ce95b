"""Runs whose frozen roles rest: the same results as without, when each role is in memory, going on where one broke."""

import errno
import itertools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from keel.models import resting
from keel.models.separate import SeparateRoles
from keel.train import online
from tests.e2e.command import keel

REST = ("--model.rest_frozen", "true")
MEASURED = ("seconds", "utilisation", "peak_rss", "flops", "profile", "tokens_per_second")


@pytest.fixture
def place(tmp_path, tiny_model, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model, "model")
    asked = [f"Where is lamp {i}?" for i in range(30)]
    Path("rows.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in asked))
    pairs = [{"prompt": text, "chosen": f"On shelf {i}.", "rejected": "Who knows?"} for i, text in enumerate(asked)]
    Path("pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    Path("fn.py").write_text(
        "import os, pathlib, signal\n\n\ndef score(response):\n"
        "    if pathlib.Path('stop').exists():\n"
        "        pathlib.Path('stop').unlink()\n        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return -len(response) / 10\n"
    )
    ppo = {"data": {"path": ["rows.jsonl"]}, "updates": 3, "rollouts": 6, "minibatches": 2, "checkpoint_every": 1}
    ppo |= {"critic": {"warmup_cap": 1}, "policy": {"learning_rate": 1e-3}}
    model = {"path": "model", "backbone": "separate", "max_response_tokens": 6}
    reward = {"data": {"path": ["pairs.jsonl"]}, "batch": 5, "held_out": 4, "normalise_samples": 4}
    write("learned", model=model, reward=reward, ppo=ppo, eval={"prompts": 4, "best_of": 2})
    write("function", model=model, ppo={**ppo, "reward": "fn.py:score"})
    return tmp_path


def write(name: str, **sections: Any) -> None:
    Path(f"{name}.yaml").write_text(yaml.safe_dump({"name": name, **sections}))


def weights(name: str) -> bytes:
    return Path(f"runs/{name}/ppo/model/model.safetensors").read_bytes()


def numbers(name: str) -> Iterator[Any]:
    """All metrics and results of a run that are no measurement of it."""
    for file in sorted(Path(f"runs/{name}").rglob("*.jsonl")):
        for line in file.read_text().splitlines():
            yield {k: v for k, v in json.loads(line).items() if not k.startswith(MEASURED) and k != "waited"}
    for file in sorted(Path(f"runs/{name}").rglob("done.json")):
        result = json.loads(file.read_text())["result"]
        yield {k: v for k, v in result.items() if not k.startswith(MEASURED)}


def test_the_result_is_the_same_and_no_frozen_role_is_in_an_update(place, monkeypatch):
    assert keel("run", "learned.yaml", "--name", "plain") == 0
    seen: list[str] = []
    model, rest, update = SeparateRoles.model, SeparateRoles.rest, online.update

    def shown_model(self, role):
        if role in self.resting:
            seen.append(role)
        return model(self, role)

    monkeypatch.setattr(SeparateRoles, "model", shown_model)
    monkeypatch.setattr(SeparateRoles, "rest", lambda self: (seen.append("rest"), rest(self)))
    monkeypatch.setattr(online, "update", lambda *args: (seen.append("update"), update(*args))[1])
    assert keel("run", "learned.yaml", *REST) == 0
    assert weights("plain") == weights("learned")
    both = [list(numbers(name)) for name in ("plain", "learned")]
    assert both[0] == both[1] and len(both[0]) > 20
    order = [name for name, _ in itertools.groupby(seen)]
    first, last = order.index("update"), len(order) - order[::-1].index("update")
    assert order[first - 4 : last] == ["reward", "rest", "reference", "rest", "update"] * 3
    assert [p.name for p in Path("runs/learned").iterdir()] == [p.name for p in Path("runs/plain").iterdir()]


def test_a_run_goes_on_with_its_frozen_roles_at_rest(place, capsys, monkeypatch):
    """What a run does that was killed for its memory; first there is no room on the disk either."""
    assert keel("run", "function.yaml", "--name", "whole") == 0
    Path("stop").touch()
    assert keel("run", "function.yaml") == 143

    def no_room(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(resting, "_append", no_room)
        assert keel("run", "function.yaml", *REST) == 2
    told = capsys.readouterr().err
    assert "frozen role" in told and "No space left on device" in told and "runs/function" in told
    assert keel("run", "function.yaml", *REST) == 0
    assert "going on from step 1" in capsys.readouterr().out
    assert weights("function") == weights("whole")
