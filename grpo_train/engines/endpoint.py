"""Completions from a server with OpenAI's API (`vllm serve MODEL`), by the openai client, its retries and time-outs.

A request that the server refuses (its prompt is too long) counts as wrong; anything else ends the evaluation.
"""

import asyncio
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from grpo_lib.common.errors import CourseError
from grpo_lib.prompts import messages
from grpo_lib.records import Generation

ABOUT_ONE_REQUEST = (400, 413, 422, 500)  # HTTP statuses that are graded as wrong
CONCURRENCY = 16  # requests under way at once
# The key goes over https or to this machine only.
PRIVATE = r"https://.*|http://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?(/.*)?"


@dataclass(frozen=True)
class Endpoint:
    """A `generate` that asks a server, which applies its chat template; temperature 0 is greedy.

    vLLM applies the sampling defaults of generation_config.json even then: start it with `--generation-config vllm`.
    """

    url: str  # http://host:8000 or http://host:8000/v1
    model: str
    system: str = ""
    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 512

    def __post_init__(self) -> None:
        if not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", self.url):
            raise CourseError("the address of the server must read like http://localhost:8000/v1")

    @property
    def _key(self) -> str:
        """OPENAI_API_KEY, never part of an error or a record."""
        return os.environ.get("OPENAI_API_KEY", "").strip() if re.fullmatch(PRIVATE, self.url) else ""

    def sent(self, prompt: str, task: tuple[str, int]) -> str:
        """The prompt as a record keeps it."""
        return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in messages(prompt, self.system))

    def __call__(self, prompts: list[str], *, seed: int = 0) -> list[Generation]:
        """The n-th request has the seed `seed` + n.  Raises CourseError when the server answers none of them."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            answers = asyncio.run(self._batch(prompts, seed))  # cancels the other requests when one raises
        else:  # a notebook's loop is running in this thread
            with ThreadPoolExecutor(1) as thread:
                answers = thread.submit(asyncio.run, self._batch(prompts, seed)).result()
        if all(answer.error for answer in answers):
            raise CourseError(f"{self.url} answers no request ({answers[0].error}); see the log of the server")
        return answers

    async def _batch(self, prompts: list[str], seed: int) -> list[Generation]:
        import openai

        base = self.url if re.search(r"://[^/]+/.", self.url) else self.url.rstrip("/") + "/v1"
        slots = asyncio.Semaphore(CONCURRENCY)
        async with openai.AsyncOpenAI(base_url=base, api_key=self._key or "none", max_retries=3) as client:
            return await asyncio.gather(*(self._ask(client, slots, p, seed + n) for n, p in enumerate(prompts)))

    async def _ask(self, client: Any, slots: asyncio.Semaphore, prompt: str, seed: int) -> Generation:
        import openai

        prompt = prompt.encode("utf-8", errors="replace").decode()  # lone surrogates cannot be sent
        options = {"max_tokens": self.max_tokens, "top_p": self.top_p, "temperature": self.temperature}
        if self.temperature:
            options["seed"] = seed
        try:
            async with slots:
                conversation = messages(prompt, self.system)
                made = await client.chat.completions.create(messages=conversation, model=self.model, **options)
            choice, tokens = made.choices[0], made.usage.completion_tokens if made.usage else None
            return Generation(choice.message.content or "", tokens, choice.finish_reason == "length")
        except openai.APIStatusError as error:
            said = error.body.get("message") if isinstance(error.body, dict) else None
            reason = " ".join(str(said or error.message).split()).replace(self._key or "\n", "***")[:200]
            if error.status_code in ABOUT_ONE_REQUEST:
                return Generation("", None, False, error=f"HTTP {error.status_code}: {reason}")
            advice = "correct the address, the model's name or OPENAI_API_KEY, or see the log of the server"
            problem = f"refuses with HTTP {error.status_code} ({reason}); {advice}"
        except openai.APIConnectionError:  # also after its time-outs
            problem = "does not answer: no server answers there; start it, or correct the address"
        except (openai.APIError, ValueError, LookupError, TypeError, AttributeError):
            problem = "does not answer like OpenAI's API; correct the address"
        raise CourseError(f"{self.url} {problem}")
