"""Reward functions and remote scorers that fail: what is told, what one failing row costs, and how it ends."""

import functools
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch

from keel.config import PpoConfig
from keel.errors import ConfigError, RewardError
from keel.recipe import parse
from keel.rewards.functions import FunctionReward
from keel.rewards.limits import TookTooLong, time_limit
from keel.rewards.named import reward_named
from keel.rewards.remote import RemoteReward, Requests
from keel.types import Prompt, Rollouts


def rollouts(count: int) -> Rollouts:
    """Rows whose response is their number."""
    prompts = [
        Prompt(({"role": "user", "content": f"p{b}"},), {"answer": b}, f"rows.jsonl:{b + 1}") for b in range(count)
    ]
    ids_BT = torch.ones(count, 1, dtype=torch.long)
    mask_BT = ids_BT.bool()
    texts = [str(b) for b in range(count)]
    return Rollouts(prompts, [(1,)] * count, ids_BT, mask_BT, torch.zeros(count, 1), ["stop"] * count, texts, 0)


def hangs() -> float:
    while True:
        time.sleep(60)


def swallows() -> float:
    while True:
        try:
            time.sleep(60)
        except Exception:
            continue


def raises() -> float:
    raise ValueError("boom")


FAILURES: dict[str, tuple[Callable[[], Any], str]] = {
    "raises": (raises, "raised ValueError: boom"),
    "hangs": (hangs, "took longer than 0.05 seconds"),
    "hangs in a loop that swallows exceptions": (swallows, "took longer than 0.05 seconds"),
    "none": (lambda: None, "is NoneType, not a number"),
    "nan": (lambda: float("nan"), "is nan, which is not a finite number"),
    "beyond float32": (lambda: 1e39, "is 1e+39, which is not a finite number"),
    "too many": (lambda: [1.0, 2.0], "is list, not a number"),
    "a tensor of two": (lambda: torch.ones(2), "is Tensor, not a number"),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_one_failing_row_ends_the_batch_or_costs_only_itself(kind):
    function, told = FAILURES[kind]

    def score(response: str) -> Any:
        return function() if response == "2" else float(response)

    with pytest.raises(RewardError) as caught:
        FunctionReward(score, "mine", 0.05).score(rollouts(4))
    assert told in caught.value.what and "rows.jsonl:3" in caught.value.where
    assert caught.value.rows == [2] and not caught.value.final and "max_failed" in caught.value.remedy
    tolerant = FunctionReward(score, "mine", 0.05, max_failed=0.25)
    scores = tolerant.score(rollouts(4)).tolist()
    assert scores[:2] == [0.0, 1.0] and scores[2] != scores[2] and scores[3] == 3.0
    assert list(tolerant.failed) == [2] and told in tolerant.failed[2].what
    assert tolerant.score(rollouts(2)).tolist() == [0.0, 1.0] and not tolerant.failed


def test_the_bound_is_a_share_of_the_batch_and_all_failing_is_the_end():
    def score(response: str) -> float:
        return raises() if int(response) % 2 else 0.0

    assert FunctionReward(score, "mine", None, 0.5).score(rollouts(8)).isnan().sum() == 4
    with pytest.raises(RewardError, match="3 of the 6 responses tried so far") as caught:
        FunctionReward(score, "mine", None, 0.3).score(rollouts(8))
    assert caught.value.rows == [1, 3, 5] and not caught.value.final
    with pytest.raises(RewardError) as caught:
        FunctionReward(lambda response: raises(), "mine", None, 0.9).score(rollouts(3))
    assert caught.value.final


def test_a_function_that_swallows_every_interruption_ends_the_process():
    """A retry loop with a bare except: no exception of ours ever leaves it, if none comes while one is handled."""
    code = """
from keel.rewards import limits
limits.AGAIN_SECONDS = 0.3
def stubborn():
    while True:
        try:
            while True:
                try:
                    while True: sum(range(9))
                except BaseException:
                    pass  # on a busy machine the next one may fall here
        except BaseException:
            pass
with limits.time_limit(0.3):
    stubborn()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "5 interruptions at its limit of 0.3 seconds" in ended.stderr and "stubborn" in ended.stderr


def test_a_time_limit_is_put_back_and_holds_in_the_main_thread_only():
    before = signal.getsignal(signal.SIGALRM)
    with time_limit(0.05):
        pass
    time.sleep(0.1)  # nothing strikes any more
    with pytest.raises(TookTooLong), time_limit(0.02):
        time.sleep(30)
    assert signal.getsignal(signal.SIGALRM) is before
    seen: list[str] = []

    def elsewhere() -> None:
        with time_limit(0.01):
            time.sleep(0.03)
        seen.append("done")

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == ["done"]


class Scorer(BaseHTTPRequestHandler):
    """Answers with the server's `answer(body)`: (status, bytes)."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server: Any = self.server
        server.seen.append((self.path, dict(self.headers), body))
        status, content = server.answer(body, len(server.seen))
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "http://127.0.0.1:1/elsewhere")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@pytest.fixture
def server(monkeypatch) -> Iterator[Any]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    running: Any = ThreadingHTTPServer(("127.0.0.1", 0), Scorer)
    running.seen, running.answer = [], lambda body, call: (200, scores(body))
    threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    running.url = f"http://127.0.0.1:{running.server_port}/score"
    yield running
    running.shutdown()
    running.server_close()


def scores(body: dict[str, Any]) -> bytes:
    return json.dumps({"scores": [row["answer"] + 0.5 for row in body["rows"]]}).encode()


def asking(server: Any, pauses: list[float] | None = None, max_failed: float = 0.0, **changed: Any) -> RemoteReward:
    settings: dict[str, Any] = {"timeout": 5.0, "retries": 2, "rows": 3, **changed}
    sleep = (pauses if pauses is not None else []).append
    return RemoteReward(server.url, Requests(**settings), max_failed, sleep)


def test_a_remote_scorer_is_told_what_a_function_is_told(server):
    assert asking(server).score(rollouts(5)).tolist() == [0.5, 1.5, 2.5, 3.5, 4.5]
    assert [len(body["rows"]) for _, _, body in server.seen] == [3, 2]
    row = {"answer": 0, "prompt": "p0", "response": "0", "finish_reason": "stop"}
    assert server.seen[0][2]["rows"][0] == {**row, "messages": [{"role": "user", "content": "p0"}]}
    assert not any("Authorization" in headers for _, headers, _ in server.seen)


@pytest.mark.parametrize("status", [429, 503])
def test_what_may_pass_is_asked_again_after_growing_pauses(server, status):
    server.answer = lambda body, call: (status, b"") if call <= 2 else (200, scores(body))
    pauses: list[float] = []
    assert asking(server, pauses).score(rollouts(2)).tolist() == [0.5, 1.5]
    assert pauses == [1.0, 2.0]
    server.answer, pauses = lambda body, call: (status, b""), []
    with pytest.raises(RewardError, match=f"no answer in 4 tries; the last: HTTP {status}") as caught:
        asking(server, pauses, retries=3, max_failed=0.9).score(rollouts(2))
    assert pauses == [1.0, 2.0, 4.0] and caught.value.final and caught.value.where == server.url
    assert "goes on from the last checkpoint" in caught.value.remedy


def test_a_server_that_hangs_or_is_not_there_comes_to_an_end(server):
    done = threading.Event()
    server.answer = lambda body, call: (200 if done.wait(20) else 500, b"{}")
    with pytest.raises(RewardError, match=r"no answer in 2 tries; the last: nothing within 0\.2 seconds"):
        asking(server, retries=1, timeout=0.2).score(rollouts(1))
    done.set()
    nobody = RemoteReward("http://127.0.0.1:1/", Requests(1.0, 1, 4), 0.0, lambda seconds: None)
    with pytest.raises(RewardError, match="no answer in 2 tries; the last: ConnectionRefusedError"):
        nobody.score(rollouts(1))


@pytest.mark.parametrize(
    ("status", "content", "told"),
    [
        (404, b"", "refuses with HTTP 404"),
        (302, b"", "refuses with HTTP 302"),
        (200, b"<html>", "cannot be used"),
        (200, b"[1, 2]", 'a list "scores" was expected'),
        (200, b'{"scores": 1}', 'a list "scores" was expected'),
        (200, b'{"scores": [1]}', "1 scores for 2 rows"),
        (200, b"[" * 100_000, "cannot be used"),
        (200, b'{"scores": [' + b" " * (1 << 20) + b"1, 2]}", "more than 1048576 bytes"),
    ],
)
def test_an_answer_that_is_none_is_not_asked_for_again(server, status, content, told):
    server.answer = lambda body, call: (status, content)
    with pytest.raises(RewardError) as caught:
        asking(server).score(rollouts(2))
    assert told in caught.value.what and caught.value.final and len(server.seen) == 1


def test_a_row_without_a_number_costs_only_itself(server):
    server.answer = lambda body, call: (200, b'{"scores": [1, null, NaN, 1e999, "5", 2]}')
    remote = asking(server, max_failed=0.7, rows=6)
    found = remote.score(rollouts(6))
    assert found.isfinite().tolist() == [True, False, False, False, False, True] and list(remote.failed) == [1, 2, 3, 4]
    with pytest.raises(RewardError, match="is NoneType, not a number"):
        asking(server, rows=6).score(rollouts(6))


def test_the_token_is_sent_and_nowhere_else(server, monkeypatch):
    monkeypatch.setenv("SCORER_TOKEN", " s3cret-value\n")
    server.answer = lambda body, call: (403, b"s3cret-value is wrong")
    with pytest.raises(RewardError) as caught:
        asking(server, token_env="SCORER_TOKEN").score(rollouts(1))
    assert server.seen[0][1]["Authorization"] == "Bearer s3cret-value" and "s3cret" not in str(caught.value)
    for value in ("", "line\nbreak", "ü"):
        monkeypatch.setenv("SCORER_TOKEN", value)
        with pytest.raises(RewardError, match="SCORER_TOKEN holds no token") as caught:
            asking(server, token_env="SCORER_TOKEN")
        assert not value or value not in str(caught.value)


def ppo_of(**settings: Any) -> PpoConfig:
    tree = {"name": "t", "model": {"path": "x"}, "ppo": {"data": {"path": ["x"]}, **settings}}
    ppo = parse(tree).ppo
    assert ppo
    return ppo


def test_a_recipe_names_its_scorer():
    remote = reward_named(ppo_of(reward="https://host/score", scoring={"retries": 1, "timeout": 2, "max_failed": 0.1}))
    assert isinstance(remote, RemoteReward) and remote.requests == Requests(2.0, 1, 16) and remote.max_failed == 0.1
    function = reward_named(ppo_of(reward="keel.sandbox.gold:gold", scoring={"max_failed": 0.2}))
    assert isinstance(function, FunctionReward) and (function.timeout, function.max_failed) == (60.0, 0.2)


MODULES = {
    "broken.py": "x = 1\ndef f(response:\n    return 1.0\n",
    "raising.py": "import json\njson.loads('{')\n",
    "leaving.py": "raise SystemExit(3)\n",
    "needing.py": "import no_such_library\n",
    "beside.py": "import good\n",
    "good.py": "LIMIT = 3\ndef score(response): return 1.0\nasync def later(response): return 1.0\n",
}


@pytest.mark.parametrize(
    ("name", "what", "where", "remedy"),
    [
        ("broken.py:f", "is no Python: '(' was never closed", "broken.py:2, for broken.py:f", "mend that line"),
        ("raising.py:f", "raised JSONDecodeError: Expecting property name", "raising.py:f", "mend it"),
        ("raising.py:f", "raising.py:2)", "", "python raising.py"),
        ("leaving.py:f", "/leaving.py:1)", "leaving.py:f", "mend it"),
        ("needing.py:f", "imports no_such_library, which is not there (/", "needing.py:f", "install it"),
        ("beside.py:f", "imports good, which is not there (/", "beside.py:f", "PYTHONPATH=."),
        ("no_such_library:f", "there is no module no_such_library", "no_such_library:f", "install it"),
        ("keel.nowhere:f", "there is no module keel.nowhere", "keel.nowhere:f", "install it"),
        ("no_such_library.deep:f", "there is no module no_such_library", "", "install it"),
        ("good:score", "there is no module good", "good:score", "did you mean good.py:score?"),
        ("good.py:scor", "there is no function 'scor' in good.py", "good.py:scor", "did you mean good.py:score?"),
        (
            "good.py:reward",
            "there is no function 'reward' in good.py",
            "good.py:reward",
            "functions there: later, score",
        ),
        ("good.py:LIMIT", "LIMIT in good.py is no function: 3", "good.py:LIMIT", "functions there: later, score"),
        ("good.py:later", "the reward function is async", "good.py:later", "write it with def"),
    ],
)
def test_a_function_that_cannot_be_had_is_told_by_its_own_reason(tmp_path, monkeypatch, name, what, where, remedy):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    for file, text in MODULES.items():
        (tmp_path / file).write_text(text)
    with pytest.raises(RewardError) as caught:
        FunctionReward.named(name)
    error = caught.value
    assert what in error.what and where in error.where and remedy in error.remedy, error
    assert "importlib" not in error.what


async def later(response: str) -> float:
    return 1.0


class Later:
    async def __call__(self, response: str) -> float:
        return 1.0


def test_an_async_function_is_refused_and_one_that_returns_its_coroutine_too():
    for function in (later, Later(), functools.partial(later)):
        with pytest.raises(RewardError, match="async, and nothing awaits") as caught:
            FunctionReward(function, "mine")
        assert "asyncio.run" in caught.value.remedy
    with pytest.raises(RewardError, match="a coroutine was returned: nothing awaits") as caught:
        FunctionReward(lambda response: (later(response),)[0], "mine").score(rollouts(2))
    assert "asyncio.run" in caught.value.remedy and caught.value.rows == [0]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"reward": "https://me:s3cret@host/x"}, "without user, password or query"),
        ({"reward": "https://host/x?key=s3cret"}, "without user, password or query"),
        ({"reward": "https://:99999999/"}, "https://host/path"),
        *(
            ({"reward": name}, "remedy: give 'file.py:function', 'package.module:function', 'https://host/path' or")
            for name in (
                ".:f",
                "..rewards:f",
                ":f",
                "fn.py:",
                "fn.py",
                "f",
                "a..b:f",
                "dir/fn:f",
                "ftp://me:s3cret@h/x",
            )
        ),
        ({"reward": "https://h/x", "scoring": {"token_env": "s3cret-token"}}, "token_env"),
        ({"reward": "fn.py:f", "scoring": {"retries": 9}}, "a function is called, not asked over HTTP"),
        ({"reward": "https://h/x", "scoring": {"max_failed": 1.0}}, "max_failed"),
    ],
)
def test_what_would_leak_or_do_nothing_is_refused(settings, told):
    with pytest.raises(ConfigError) as caught:
        ppo_of(**settings)
    assert told in str(caught.value) and "s3cret" not in str(caught.value)
