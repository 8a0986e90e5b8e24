"""Completions that are not sampled in this process: a file of them, or a server with the API of OpenAI (vLLM has it).

Both give a `generate` for grpo_lib.evaluation. Nothing is left out: a completion that is missing, or that the server
refuses, comes back as a Generation with an error, and counts as wrong.
"""

from __future__ import annotations

import ipaddress
import os
import queue
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_lib.errors import CourseError
from grpo_lib.files import read_jsonl
from grpo_lib.generation import Generation
from grpo_lib.prompts import messages

if TYPE_CHECKING:
    import httpx

    from grpo_lib.problems.types import Problem

REFUSALS = (400, 413, 422)  # what a server says of one request, such as a prompt that is too long
BUSY = (408, 425, 429)  # what it says when another time would do; 500 and above likewise
LONGEST_WAIT = 60.0  # seconds between two tries of one request
# Fields of a request that arguments of `endpoint` say, or that would make its answer another one than is read here.
TAKEN = ("model", "messages", "prompt", "temperature", "max_tokens", "seed", "n", "stream")


@dataclass(frozen=True)
class SavedCompletions:
    """A `generate` that looks completions up; made by `saved_completions`."""

    path: Path
    found: dict[tuple[str, int], Generation]  # (problem id, sample number)
    most: int  # completions of the problem that has the most
    greedy: bool  # whether the first of several is a greedy one, as in a file of `evaluate(…, sampled=…)`
    prompts: dict[tuple[str, int], str]  # where the file says what the model was sent

    def sent(self, prompt: str, task: tuple[str, int]) -> str:
        return self.prompts.get(task, prompt)

    def __call__(self, prompts: list[str], *, tasks: list[tuple[str, int]]) -> list[Generation]:
        missing = Generation("", None, False, error=f"{self.path.name} holds no completion of this problem and sample")
        return [self.found.get(task, missing) for task in tasks]


def saved_completions(path: str | os.PathLike, problems: Sequence[Problem]) -> SavedCompletions:
    """Completions from a JSON-lines file, for problems that may stand in any order.

    A row holds its text as `completion` or `response`, and belongs to the problem that its `id`, its `question`, or its
    `prompt` (if that is the bare question) names. Several rows of one problem are its samples, in their order or by
    their `sample` number, from 0. If a row has them, its `prompt`, `tokens` (a count), and `truncated` or a
    `finish_reason` of "length" are kept. So files that `evaluate` wrote can be read, too. Rows of other problems are
    passed over.

    Raises:
      CourseError: there is no such file, no row belongs to a problem, a row without an id has the question of two
        problems, a row has the id of one problem and another question, two rows claim to be the same sample, or the
        samples are not counted from 0.
    """
    path = Path(path)
    try:
        rows = read_jsonl(path)
    except FileNotFoundError:
        raise CourseError(f"{path}: no such file of completions") from None
    named: dict[tuple[str, str], list[Problem]] = {}
    for problem in problems:
        for name in (("id", problem.id), ("question", problem.question), ("prompt", problem.question)):
            named.setdefault(name, []).append(problem)

    found: dict[tuple[str, int], Generation] = {}
    prompts: dict[tuple[str, int], str] = {}
    counts: Counter[str] = Counter()
    greedy = set()
    for number, row in enumerate(rows, start=1):
        names = [(name, str(row[name])) for name in ("id", "question", "prompt") if name in row]
        owners = next((named[name] for name in names if name in named), [])
        if len(owners) > 1:
            raise CourseError(
                f"{path}: row {number} may belong to problem {owners[0].id} or {owners[1].id}, which have one "
                "question; give every row its id"
            )
        for problem in owners:
            if names[0] == ("id", problem.id) and row.get("question", problem.question) != problem.question:
                raise CourseError(
                    f"{path}: row {number} has another question for problem {problem.id}: made for other problems"
                )
            sample = row["sample"] if type(row.get("sample")) is int else counts[problem.id]
            if (problem.id, sample) in found:
                raise CourseError(f"{path}: row {number} is sample {sample} of problem {problem.id} again; remove one")
            found[problem.id, sample] = _saved(row, number)
            if isinstance(row.get("prompt"), str):
                prompts[problem.id, sample] = row["prompt"]
            counts[problem.id] += 1
            greedy.add((sample == 0, str(row.get("greedy"))))
    if not found:
        raise CourseError(
            f"{path}: none of its {len(rows)} rows belongs to one of the {len(problems)} problems; "
            "rows are matched by id, or by question or prompt if that is the bare question"
        )
    most = max(counts.values())
    if not all(0 <= sample < most for _, sample in found):
        raise CourseError(f"{path}: no problem has more than {most} rows, so their sample runs from 0 to {most - 1}")
    return SavedCompletions(path, found, most, greedy == {(True, "True"), (False, "False")}, prompts)


def _saved(row: dict[str, Any], number: int) -> Generation:
    text = row.get("completion", row.get("response"))
    if not isinstance(text, str):
        return Generation("", None, False, error=f"row {number} holds no text as completion or response")
    tokens = row.get("tokens")
    truncated = row.get("truncated") is True or row.get("finish_reason") == "length"
    failure = row.get("error") if not text and isinstance(row.get("error"), str) else None
    return Generation(text, tokens if type(tokens) is int else None, truncated, failure)


def endpoint(
    url: str,
    model: str,
    *,
    chat: bool = True,
    system: str = "",
    temperature: float = 0.0,
    max_tokens: int = 512,
    concurrency: int = 16,
    timeout: float = 600.0,
    retries: int = 5,
    pause: float = 1.0,
    api_key_env: str = "OPENAI_API_KEY",
    extra: dict[str, Any] | None = None,
) -> Endpoint:
    """A `generate` that asks a server with the API of OpenAI, such as `vllm serve MODEL`.

    Each prompt is a request of its own; the n-th of a batch is sent seed + n, since a server gives the same
    completion to the same prompt and seed.

    Args:
      url: where the API is, http://host:8000 or http://host:8000/v1.
      model: its name on the server.
      chat: send the prompt as the user's turn to /chat/completions, after `system`, and let the server apply its
        chat template; so evaluate without `render`. Otherwise send it as it is to /completions.
      temperature: 0 is greedy.
      max_tokens: limit of a completion; one that meets it is marked as truncated.
      concurrency: requests under way at once.
      timeout: seconds to wait for one answer.
      retries: further tries of a request that failed (busy, HTTP 5xx, a lost connection, no JSON), after `pause`,
        twice `pause`, … seconds, or what the server asks for, at most LONGEST_WAIT.
      api_key_env: the environment variable that holds the key, if the server wants one. It goes over https, or to
        this machine, and nowhere else (one line on stderr says so), and never stands in an error or a record.
      extra: what this server takes beyond the API, as JSON. vLLM applies the sampling defaults of the model's
        generation_config.json, which may hold a top_k or a repetition penalty, even when greedy: start it with
        `--generation-config vllm`, or send {"top_k": -1, "repetition_penalty": 1.0}. With chat=False send
        {"add_special_tokens": False} if the prompt has its first special token already.

    `generate` raises CourseError when the server is not there, wants another key, does not know the model, or fails
    every request: nothing of that is the model's fault, and the evaluation can go on later. A request that fails
    while the server answers others comes back as a Generation with an error. An interruption (Ctrl-C) waits for no
    request; those under way are left to end by themselves.
    """
    if concurrency < 1 or retries < 0 or max_tokens < 1:
        raise CourseError("endpoint: concurrency and max_tokens must be at least 1, and retries at least 0")
    extra = extra or {}
    if taken := [name for name in TAKEN if name in extra]:
        raise CourseError(f"endpoint: extra must not hold {', '.join(taken)}, which have their own arguments or none")
    base = _base(url)
    return Endpoint(
        base=base, model=model, chat=chat, system=system, concurrency=concurrency, timeout=timeout, retries=retries,
        pause=pause, key_name=api_key_env, key=_key(api_key_env, base),
        options={"max_tokens": max_tokens, "temperature": temperature, "top_p": 1.0} | extra,
    )  # fmt: skip


@dataclass(frozen=True)
class Endpoint:
    """A `generate` that asks a server; made by `endpoint`."""

    base: str
    model: str
    chat: bool
    system: str
    options: dict[str, Any]
    concurrency: int
    timeout: float
    retries: int
    pause: float
    key_name: str
    key: str = field(repr=False)
    reached: threading.Event = field(default_factory=threading.Event, init=False)  # set once it said anything at all
    served: threading.Event = field(default_factory=threading.Event, init=False)  # set once it gave a completion

    def sent(self, prompt: str, task: tuple[str, int]) -> str:
        """What a record says that the model was sent; the server makes its prompt of it."""
        if not self.chat:
            return prompt
        return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in messages(prompt, self.system))

    def __call__(self, prompts: list[str], *, seed: int = 0) -> list[Generation]:
        import httpx

        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        patience = httpx.Timeout(self.timeout, connect=min(self.timeout, 10.0))
        limits = httpx.Limits(max_connections=self.concurrency)
        stop, ready = threading.Event(), queue.SimpleQueue()
        waiting = queue.SimpleQueue()
        for job in enumerate(prompts):
            waiting.put(job)

        def work() -> None:
            while not stop.is_set():
                try:
                    number, prompt = waiting.get_nowait()
                except queue.Empty:
                    return
                try:
                    own = seed + number if self.options["temperature"] else None
                    ready.put((number, self.complete(client, prompt, own, stop)))
                except BaseException as error:
                    ready.put((number, error))
                    return

        answers: dict[int, Generation] = {}
        with httpx.Client(headers=headers, timeout=patience, limits=limits) as client:
            try:
                # Not a ThreadPoolExecutor: Python would wait for its threads, so for their requests, before it ends.
                for _ in range(min(self.concurrency, len(prompts))):
                    threading.Thread(target=work, daemon=True).start()
                while len(answers) < len(prompts):
                    number, answer = ready.get()
                    if isinstance(answer, BaseException):
                        raise answer
                    answers[number] = answer
            finally:
                stop.set()  # those that wait for another try give up
        return [answers[number] for number in range(len(prompts))]

    def complete(self, client: httpx.Client, prompt: str, seed: int | None, stop: threading.Event) -> Generation:
        """The completion of one prompt, after as many tries as it takes."""
        failure, status, asked = "", None, 0.0
        for attempt in range(self.retries + 1):
            if attempt and stop.wait(min(max(self.pause * 2 ** (attempt - 1), asked), LONGEST_WAIT)):
                break
            answer, failure, status, asked = self._try(client, self._body(prompt, seed))
            if answer is not None:
                return answer
            if status in REFUSALS:
                break
        if stop.is_set():
            raise CourseError("stopped")  # nobody reads this: another request ended the batch
        if self._answers_others(client, status):
            return Generation("", None, False, error=failure)
        raise CourseError(f"{self.base} answers no request ({failure}); see what the server says, then run this again")

    def _answers_others(self, client: httpx.Client, status: int | None) -> bool:
        """Is it this request that fails, or the server?  The latter must not be counted as wrong answers."""
        if status in BUSY:
            return False
        if status in REFUSALS and self.served.is_set():
            return True
        # What is refused may be the options, the same in every request; after other failures a sign of life will do.
        options = {} if status in REFUSALS else {"max_tokens": 1}
        return self._try(client, self._body("1 + 1 =", None) | options)[0] is not None

    def _body(self, prompt: str, seed: int | None) -> dict[str, Any]:
        prompt = prompt.encode("utf-8", errors="replace").decode()  # half a surrogate pair cannot be sent
        asked = {"messages": messages(prompt, self.system)} if self.chat else {"prompt": prompt}
        return {"model": self.model, **asked, **self.options} | ({} if seed is None else {"seed": seed})

    def _try(self, client: httpx.Client, body: dict[str, Any]) -> tuple[Generation | None, str, int | None, float]:
        """(completion or None, what went wrong, HTTP status, seconds that the server asks to wait)."""
        import httpx

        path = "/chat/completions" if self.chat else "/completions"
        try:
            response = client.post(self.base + path, json=body)
        except httpx.RequestError as error:
            if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout) and not self.reached.is_set():
                raise CourseError(
                    f"no server answers at {self.base} ({self._hide(error)}); start it, or correct the address"
                ) from None
            return None, f"{type(error).__name__} {self._hide(error)}".strip(), None, 0.0
        self.reached.set()
        status = response.status_code
        if status == 200:
            answer = _answer(response, self.chat)
            if answer:
                self.served.set()
            return answer, "" if answer else "HTTP 200 without a completion", status, 0.0
        said = f"HTTP {status}: {self._hide(_said(response))}".removesuffix(": ")
        if status in (401, 403):
            no_key = "is not set, or may not be sent there over http, and it wants a key"
            remedy = "holds another key than it wants" if self.key else no_key
            raise CourseError(f"{self.base} lets nobody in ({said}); the environment variable {self.key_name} {remedy}")
        if status == 404:
            raise CourseError(f"{self.base} knows no model {self.model} or no {path} ({said}); correct name or address")
        if status not in (*REFUSALS, *BUSY) and status < 500:
            raise CourseError(f"{self.base} does not serve this API ({said}); correct the address")
        return None, said, status, _seconds(response.headers.get("retry-after"))

    def _hide(self, text: object) -> str:
        """One short line without the key, which some servers repeat."""
        line = " ".join(str(text).split())
        return (line.replace(self.key, "***") if self.key else line)[:200]


def _answer(response: httpx.Response, chat: bool) -> Generation | None:
    """The completion in a response, or None if that is not what it holds."""
    try:
        body = response.json()
        choice = body["choices"][0]
        text = choice["message"]["content"] if chat else choice["text"]
        tokens = (body.get("usage") or {}).get("completion_tokens")
        truncated = choice.get("finish_reason") == "length"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    if not isinstance(text, str | None):
        return None
    return Generation(text or "", tokens if type(tokens) is int else None, truncated)  # null: it said nothing


def _said(response: httpx.Response) -> str:
    """The server's own words about an error."""
    try:
        body = response.json()
        return body["error"]["message"] if "error" in body else body["message"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return response.text


def _seconds(header: str | None) -> float:
    try:
        return max(0.0, float(header or 0))
    except ValueError:  # a date; the ordinary pause will do
        return 0.0


def _base(url: str) -> str:
    """The address up to /v1, without a name and password, which would end up in errors and records."""
    import httpx

    try:
        address = httpx.URL(url)
    except httpx.InvalidURL:
        address = httpx.URL("")
    if address.scheme not in ("http", "https") or not address.host or address.query or (address.port or 0) > 65_535:
        raise CourseError("endpoint: the address must read like http://localhost:8000/v1")
    path = address.path.rstrip("/").removesuffix("/completions").removesuffix("/chat")
    return str(address.copy_with(userinfo=b"", path=path or "/v1", fragment=None))


def _key(name: str, base: str) -> str:
    """The key in the environment variable `name`, if it may be sent to `base`."""
    key = os.environ.get(name, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise CourseError(f"the environment variable {name} holds characters that no key has; set it again")
    if key and not _is_private(base):
        print(f"{name} is not sent to {base}: over http anybody on the way could read it; use https", file=sys.stderr)
        return ""
    return key


def _is_private(base: str) -> bool:
    """Whether nobody on the way can read what is sent: over https, or within this machine."""
    import httpx

    address = httpx.URL(base)
    if address.scheme == "https" or address.host == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.host).is_loopback
    except ValueError:  # another name
        return False
