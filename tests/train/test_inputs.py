"""Rows by number: the split of preferences by prompt, against one that holds everything in dictionaries and lists."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.config import Recipe, RewardConfig
from keel.errors import DataError
from keel.train.inputs import chosen, prompts_of, split_prompts
from keel.types import PreferencePair, Prompt


def pair(asked: str, number: int) -> PreferencePair:
    return PreferencePair(
        Prompt(({"role": "user", "content": asked},), source=f"row {number}"), f"good {number}", "bad"
    )


def settings_of(**changed: Any) -> RewardConfig:
    reward = {"data": {"path": ["unused"]}, "batch": 1, **changed}
    recipe = Recipe.model_validate({"name": "x", "model": {"path": "x"}, "reward": reward}).resolved()
    assert recipe.reward
    return recipe.reward


def in_memory(rows: list[PreferencePair], held_out: int, most: int | None, seed: int) -> tuple[list[Any], list[Any]]:
    groups: dict[str, list[PreferencePair]] = {}
    for row in rows:
        groups.setdefault(row.prompt.text, []).append(row)
    order = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, len(rows)]))).permutation(len(groups))
    train: list[Any] = []
    held: list[Any] = []
    for number in order.tolist():
        (held if sum(map(len, held)) < held_out else train).append(list(groups.values())[number])
    return train[:most], held


@given(st.text("abcdefgh", min_size=1, max_size=30), st.integers(1, 12), st.integers(0, 9), st.integers(1, 9))
def test_prompts_are_split_as_by_dictionaries(asked: str, held_out: int, seed: int, most: int):
    """A letter is a prompt, so most come several times."""
    rows = [pair(letter, number) for number, letter in enumerate(asked)]
    for limit in (None, most):
        train, held = in_memory(rows, held_out, limit, seed)
        settings = settings_of(held_out=held_out, max_prompts=limit)
        if not train:
            with pytest.raises(DataError, match="leave 0 prompts"):
                split_prompts(rows, settings, seed, "reward")
            continue
        found, found_held = split_prompts(rows, settings, seed, "reward")
        assert (list(found), list(found_held)) == (train, held)
        assert [rows[row] for row in found.rows] == [row for group in train for row in group]
        assert list(found.sizes) == [len(group) for group in train]
        assert list(found.prompts) == [group[0].prompt for group in train]
        assert [rows[row] for row in found_held.rows] == [row for group in held for row in group]


def test_groups_by_hand():
    """Rows 0, 2 and 4 are of prompt x, 1 and 3 of y, 5 of z; the order of the prompts is drawn: z, x, y."""
    rows = [pair(asked, number) for number, asked in enumerate("xyxyxz")]
    seed = next(s for s in range(99) if in_memory(rows, 1, None, s)[1][0][0].prompt.text == "z")
    train, held = split_prompts(rows, settings_of(held_out=1), seed, "reward")
    assert list(held.rows) == [5] and list(held.sizes) == [1] and held[0] == [rows[5]]
    whole = {"x": [0, 2, 4], "y": [1, 3]}
    first, second = train.prompts[0].text, train.prompts[1].text
    assert {first, second} == {"x", "y"} and list(train.rows) == whole[first] + whole[second]
    assert train[-1] == [rows[row] for row in whole[second]] and len(train) == 2


def test_rows_of_these_numbers():
    rows = [pair("x", number) for number in range(5)]
    some = chosen(rows, [4, 0])
    assert list(some) == [rows[4], rows[0]] and [p.source for p in prompts_of(some)] == ["row 4", "row 0"]
