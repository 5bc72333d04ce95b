"""Turns, prompts and readers that several tests of data share."""

from collections.abc import Callable
from typing import Any

from keel.data.formats import read_demonstrations, read_preferences, read_prompts, read_thumbs
from keel.types import Prompt

Write = Callable[..., str]
READERS = [read_demonstrations, read_preferences, read_prompts, read_thumbs]


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


U, R = turn("user", "ask"), turn("assistant", "reply")
EARLIER = [turn("system", "be kind"), turn("user", "hi"), turn("assistant", "hello"), U]


def prompt(*turns: dict[str, str], source: str, **columns: Any) -> Prompt:
    return Prompt(turns, columns, source)
