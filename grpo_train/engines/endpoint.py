"""Completions from a server with OpenAI's API, such as `vllm serve MODEL`: a `generate` for grpo_lib.evaluation.

A request that the server refuses (a prompt that is too long) is a completion with an error, and counts as wrong.
Everything else (no server, a wrong key, a busy server) is not the model's fault: it ends the evaluation, which can be
continued later.  Retries, timeouts and connections are those of the `openai` package.
"""

from __future__ import annotations

import asyncio
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from grpo_lib.common.errors import CourseError
from grpo_lib.prompts import messages
from grpo_lib.records import Generation

if TYPE_CHECKING:
    import openai

KEY = "OPENAI_API_KEY"
ABOUT_ONE_REQUEST = (400, 413, 422, 500)  # HTTP statuses that are graded as wrong
RETRIES = 3
CONCURRENCY = 16  # requests under way at once
TIMEOUT = 600  # seconds to wait for one answer


@dataclass(frozen=True)
class Endpoint:
    """A `generate` that asks a server; one request per prompt.

    Args:
      url: http://host:8000 or http://host:8000/v1.
      model: its name on the server.
      system: sent before the prompt, which is the user's turn; the server applies its chat template (evaluate without
        `render`).
      temperature: 0 is greedy. vLLM applies the sampling defaults of the model's generation_config.json (a top_k, a
        repetition penalty) even then: start it with `--generation-config vllm`.
      max_tokens: limit of a completion; one that reaches it is marked as truncated.

    The key, if the server wants one, is read from OPENAI_API_KEY. It is sent over https or to this machine only, and
    is never part of an error or a record.
    """

    url: str
    model: str
    system: str = ""
    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 512

    def __post_init__(self) -> None:
        if not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", self.url):
            raise CourseError("the address of the server must read like http://localhost:8000/v1")

    def sent(self, prompt: str, task: tuple[str, int]) -> str:
        """The prompt as a record keeps it; the server applies its chat template to it."""
        return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in messages(prompt, self.system))

    def __call__(self, prompts: list[str], *, seed: int = 0) -> list[Generation]:
        """Completions of `prompts`; the n-th request has the seed `seed` + n, since a server repeats itself otherwise.

        Raises:
          CourseError: the server cannot be used, or answers none of these requests.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            answers = asyncio.run(self._batch(prompts, seed))
        else:  # a notebook's loop is running in this thread
            with ThreadPoolExecutor(1) as thread:
                answers = thread.submit(asyncio.run, self._batch(prompts, seed)).result()
        if all(answer.error for answer in answers):
            raise CourseError(f"{self.url} answers no request ({answers[0].error}); see the log of the server")
        return answers

    async def _batch(self, prompts: list[str], seed: int) -> list[Generation]:
        import openai

        base = self.url.rstrip("/") + ("" if urlsplit(self.url).path.strip("/") else "/v1")
        limits, slots = openai.Timeout(TIMEOUT, connect=10.0), asyncio.Semaphore(CONCURRENCY)
        key = _key(self.url) or "none"
        async with openai.AsyncOpenAI(base_url=base, api_key=key, max_retries=RETRIES, timeout=limits) as client:
            # When one raises, asyncio.run cancels the others, as it does after Ctrl-C.
            return await asyncio.gather(*(self._ask(client, slots, p, seed + n) for n, p in enumerate(prompts)))

    async def _ask(self, client: openai.AsyncOpenAI, slots: asyncio.Semaphore, prompt: str, seed: int) -> Generation:
        import openai

        prompt = prompt.encode("utf-8", errors="replace").decode()  # lone surrogates cannot be sent
        conversation: Any = messages(prompt, self.system)
        options: dict[str, Any] = {"seed": seed} if self.temperature else {}
        try:
            async with slots:
                made = await client.chat.completions.create(
                    messages=conversation, model=self.model, max_tokens=self.max_tokens, top_p=self.top_p,
                    temperature=self.temperature, **options,
                )  # fmt: skip
            choice, tokens = made.choices[0], made.usage.completion_tokens if made.usage else None
            return Generation(choice.message.content or "", tokens, choice.finish_reason == "length")
        except openai.APIStatusError as error:
            said = error.body.get("message") if isinstance(error.body, dict) else None
            return self._refused(error.status_code, self._hide(said or error.message))
        except openai.APITimeoutError:
            raise CourseError(f"{self.url} did not answer within {TIMEOUT} s, {RETRIES + 1} times") from None
        except openai.APIConnectionError:
            raise CourseError(f"no server answers at {self.url}; start it, or correct the address") from None
        except (openai.APIError, ValueError, LookupError, TypeError, AttributeError):
            raise CourseError(f"{self.url} does not answer like OpenAI's API; correct the address") from None

    def _refused(self, status: int, reason: str) -> Generation:
        """The record's error if the request is to blame; raises CourseError if the server or the command is."""
        if status in ABOUT_ONE_REQUEST:
            return Generation("", None, False, error=f"HTTP {status}: {reason}")
        wrong_key = f"{KEY} must have its key, and is sent over https or to this machine only"
        advice = {401: wrong_key, 403: wrong_key, 404: f"correct the address, or the model's name {self.model}"}.get(
            status, "see the log of the server, then run the command again"
        )
        raise CourseError(f"{self.url} refuses with HTTP {status} ({reason}); {advice}") from None

    def _hide(self, text: object) -> str:
        """One short line without the key, which some servers repeat."""
        line = " ".join(str(text).split())
        return (line.replace(key, "***") if (key := _key(self.url)) else line)[:200]


def _key(url: str) -> str:
    """The key, if it cannot be read on the way to the server, else nothing."""
    private = urlsplit(url).scheme == "https" or urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")
    return os.environ.get(KEY, "").strip() if private else ""
