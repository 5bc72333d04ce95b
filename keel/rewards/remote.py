"""A scorer on another machine, asked over HTTP.

A request is a POST of {"rows": [...]}, each row an object with what a reward function is told: prompt, response,
finish_reason, messages, and the row's other columns. The answer is {"scores": [...]}, one number a row, null for one
that could not be scored.
"""

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from torch import Tensor

from keel.errors import RewardError
from keel.rewards.base import score_rows
from keel.rewards.functions import as_score, row_view
from keel.rewards.limits import TookTooLong, time_limit
from keel.types import Rollouts

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds before the first repetition, doubled for each one after it up to the longest."""
PASSING = (408, 425, 429, 500, 502, 503, 504)
"""Answers after which the same request may do better."""
ANSWER_BYTES = 1 << 20
"""Longest answer that is read, per request."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Another host would be told the token."""

    def redirect_request(self, *_: Any) -> None:
        """Follows none."""


@dataclass(frozen=True)
class Requests:
    """How a scorer is asked.

    timeout: of a request, seconds. retries: repetitions of a request that failed in passing. rows: responses a
    request. token_env: environment variable with the token that is sent as `Authorization: Bearer`; None: none is.
    """

    timeout: float
    retries: int
    rows: int
    token_env: str | None = None


class RemoteReward:
    """Asks a server for scores. See `base.Reward`."""

    def __init__(self, url: str, requests: Requests, max_failed: float, sleep: Callable[[float], None] = time.sleep):
        """Raises RewardError where the variable of the token is not set, or holds what can be none."""
        self.url, self.requests, self.max_failed, self._sleep = url, requests, max_failed, sleep
        self.failed: dict[int, RewardError] = {}
        self._headers = {"Content-Type": "application/json", "User-Agent": "keel"}
        if requests.token_env:
            token = os.environ.get(requests.token_env, "").strip()
            if not token or not token.isascii() or not token.isprintable():
                raise RewardError(
                    f"the environment variable {requests.token_env} holds no token",
                    where="ppo.scoring.token_env",
                    remedy=f"export {requests.token_env}=...; it is sent to {urlsplit(url).netloc} and written nowhere",
                )
            self._headers["Authorization"] = f"Bearer {token}"
        self._opener = urllib.request.build_opener(_NoRedirect)

    def score(self, rollouts: Rollouts) -> Tensor:
        """See `base.Reward`. A row fails where its score is null or no finite number; a server that does not answer, or
        not as it should, ends the run."""
        found: list[Any] = []
        for start in range(0, len(rollouts), self.requests.rows):
            some = range(start, min(start + self.requests.rows, len(rollouts)))
            found += self._ask([row_view(rollouts, b) for b in some])
        return score_rows(
            rollouts,
            lambda b: as_score(found[b], f"{self.url}, prompt {rollouts.prompts[b].source or b}", b),
            self.max_failed,
            self.failed,
        )

    def _ask(self, rows: Sequence[dict[str, Any]]) -> list[Any]:
        body = json.dumps({"rows": rows}, default=str).encode()
        pause = FIRST_PAUSE
        for left in range(self.requests.retries, -1, -1):
            try:
                return self._scores(self._post(body), len(rows))
            except _Passing as error:
                if not left:
                    tried = self.requests.retries + 1
                    raise self._failed(f"the scorer gave no answer in {tried} tries; the last: {error}") from None
            self._sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        raise AssertionError("the last try returns or raises")

    def _post(self, body: bytes) -> bytes:
        seconds = self.requests.timeout
        request = urllib.request.Request(self.url, body, self._headers)
        try:
            with time_limit(seconds), self._opener.open(request, timeout=seconds) as answer:
                return answer.read(ANSWER_BYTES + 1)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in PASSING:
                raise _Passing(f"HTTP {error.code}") from None
            raise self._failed(f"the scorer refuses with HTTP {error.code}") from None
        except (TookTooLong, TimeoutError):
            raise _Passing(f"nothing within {seconds:g} seconds") from None
        except (OSError, HTTPException) as error:  # URLError is an OSError
            reason = getattr(error, "reason", error)
            raise _Passing(f"{type(reason).__name__}: {reason}") from None

    def _scores(self, answer: bytes, count: int) -> list[Any]:
        try:
            if len(answer) > ANSWER_BYTES:
                raise ValueError(f"it has more than {ANSWER_BYTES} bytes")
            value = json.loads(answer)
            scores = value.get("scores") if isinstance(value, dict) else None
            if not isinstance(scores, list):
                raise ValueError('an object with a list "scores" was expected')
            if len(scores) != count:
                raise ValueError(f"it has {len(scores)} scores for {count} rows")
        except (ValueError, RecursionError) as error:
            raise self._failed(f"the scorer's answer cannot be used: {error}") from None
        return scores

    def _failed(self, what: str) -> RewardError:
        return RewardError(
            what,
            where=self.url,
            remedy="mend the server; the same command goes on from the last checkpoint",
            final=True,
        )


class _Passing(Exception):
    """A request that failed in a way that may pass."""
