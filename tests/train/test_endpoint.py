"""A server with OpenAI's API, a real one in a thread: its answers, its refusals, and where the key goes."""

import asyncio
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from grpo_lib.common.errors import CourseError
from grpo_lib.evaluation import EvalRun, evaluate
from grpo_lib.problems.types import Problem
from grpo_train.engines import endpoint
from grpo_train.engines.endpoint import Endpoint

PROBLEMS = [Problem(f"p{i}", f"What is {i} plus {i}?", "", str(2 * i), "test") for i in range(6)]
KEY = "sk-very-secret-0123456789"


def right(prompt):
    return f"<reasoning>so it is</reasoning><answer>{2 * int(prompt.split()[2])}</answer>"


class Server(ThreadingHTTPServer):
    """Answers every question correctly, but where `script` has {word of the prompt: [HTTP status or body, …]}."""

    daemon_threads = True
    request_queue_size = 64  # waiting connections

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.seen = {}, []
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_):
        pass  # the client is gone

    def reply(self, prompt):
        for word, replies in self.script.items():
            if word in prompt.split():
                return replies.pop(0) if len(replies) > 1 else replies[0]
        return 200

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][-1]["content"]
        self.server.seen.append((body, self.path, self.headers))
        reply = self.server.reply(prompt)
        status, content = 200, reply
        if reply == 200:
            content = self.completion(right(prompt))
        elif isinstance(reply, int):
            status, content = reply, {"error": {"message": f"says {reply} {KEY}"}}
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", "application/json")
        self.send_header("retry-after-ms", "1")
        self.end_headers()
        self.wfile.write(data)

    @staticmethod
    def completion(text, finish_reason="stop"):
        choice = {"message": {"content": text}, "finish_reason": finish_reason}
        return {"choices": [choice], "usage": {"completion_tokens": 11}}

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with Server() as running:
        yield running


def graded(generate, problems=PROBLEMS, **options):
    return evaluate(generate, problems, progress=False, **options)


def test_chat_sends_messages_and_the_server_applies_its_template(server, tmp_path):
    generate = Endpoint(server.url + "/v1/", "tiny", system="Be brief.", max_tokens=77)
    run = graded(generate, batch_size=5, path=tmp_path / "a.jsonl", model="tiny")
    assert run == EvalRun.load(tmp_path / "a.jsonl")
    assert run.summary()["accuracy"] == 1 and {r["tokens"] for r in run.records} == {11}
    assert [r["prompt"] for r in run.records] == [f"system: Be brief.\n\nuser: {p.question}" for p in PROBLEMS]
    body, path, _ = server.seen[0]
    assert path == "/v1/chat/completions" and [m["role"] for m in body.pop("messages")] == ["system", "user"]
    assert body == {"model": "tiny", "max_tokens": 77, "temperature": 0.0, "top_p": 1.0}


def test_every_sample_has_a_seed_of_its_own(server):
    for _ in range(2):
        graded(Endpoint(server.url, "tiny", temperature=0.7), PROBLEMS[:2], samples=4, batch_size=5)
    seeds = [body["seed"] for body, _, _ in server.seen]
    assert len(set(seeds[:8])) == 8 and sorted(seeds[:8]) == sorted(seeds[8:])
    assert {body["temperature"] for body, _, _ in server.seen} == {0.7}


def test_truncated_and_empty_completions(server):
    null = {"choices": [{"message": {"content": None}, "finish_reason": "stop"}], "usage": None}
    server.script = {"4": [Handler.completion("and so", "length")], "5": [null]}
    run = graded(Endpoint(server.url, "tiny"))
    assert [r["id"] for r in run.records if r["truncated"]] == ["p4"]
    assert (run.records[5]["completion"], run.records[5]["tokens"], run.records[5]["error"]) == ("", None, None)


def test_a_busy_server_is_asked_again(server):
    server.script = {"3": [429, 503, 200]}
    assert graded(Endpoint(server.url, "tiny")).summary()["accuracy"] == 1
    assert len(server.seen) == 8


def test_a_refused_request_counts_as_wrong(server):
    server.script = {"3": [400], "4": [500]}
    run = graded(Endpoint(server.url, "tiny"))
    assert (run.summary()["accuracy"], run.summary()["n"]) == (4 / 6, 6)
    assert [run.records[i]["error"] for i in (3, 4)] == [f"HTTP {code}: says {code} {KEY}" for code in (400, 500)]
    assert sum("What is 3" in json.dumps(body) for body, _, _ in server.seen) == 1


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (401, "OPENAI_API_KEY must have its key"),
        (404, "correct the address, or the model's name tiny"),
        (429, "HTTP 429 .*run the command again"),
        (400, "answers no request .HTTP 400"),
        ({"choices": []}, "does not answer like OpenAI's API"),
        ([1], "does not answer like OpenAI's API"),
    ],
)
def test_a_server_that_cannot_be_used_is_an_error_and_not_a_wrong_answer(server, monkeypatch, tmp_path, reply, message):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    server.reply = lambda prompt: reply
    path = tmp_path / "a.jsonl"
    with pytest.raises(CourseError, match=message) as caught:
        graded(Endpoint(server.url, "tiny"), path=path)
    assert server.url in str(caught.value) and "\n" not in str(caught.value) and KEY not in str(caught.value)
    del server.reply  # somebody repairs it
    assert graded(Endpoint(server.url, "tiny"), path=path).summary()["accuracy"] == 1


def test_a_server_that_fails_in_the_middle_does_not_lose_what_is_finished(server, tmp_path):
    server.script = {"5": [503]}
    with pytest.raises(CourseError, match="HTTP 503"):
        graded(Endpoint(server.url, "tiny"), path=tmp_path / "a.jsonl", batch_size=2)
    server.script, server.seen[:] = {}, []
    run = graded(Endpoint(server.url, "tiny"), path=tmp_path / "a.jsonl", batch_size=2)
    assert run.summary()["accuracy"] == 1 and len(server.seen) == 2


def test_a_fatal_error_does_not_wait_for_other_requests(server, monkeypatch):
    monkeypatch.setattr(endpoint, "CONCURRENCY", 2)
    server.script = {"0": [401]}
    with pytest.raises(CourseError, match="HTTP 401"):
        graded(Endpoint(server.url, "tiny"))
    assert len(server.seen) < 6


def test_no_server_at_all():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening
        with pytest.raises(CourseError, match=r"no server answers at http://127\.0\.0\.1:.*start it"):
            graded(Endpoint(f"http://127.0.0.1:{taken.getsockname()[1]}", "tiny"))


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "ftp://host/v1", "http://", f"http://me:{KEY}@h", "http://h?key=1"]
)
def test_bad_addresses(url):
    with pytest.raises(CourseError, match="must read like http://localhost:8000/v1") as caught:
        Endpoint(url, "tiny")
    assert KEY not in str(caught.value)


def test_the_key_is_sent_and_never_shown(server, monkeypatch, tmp_path):
    monkeypatch.setenv("OPENAI_API_KEY", f" {KEY}\n")
    server.script = {"3": [400]}
    generate = Endpoint(server.url, "tiny")
    graded(generate, path=tmp_path / "a.jsonl")
    assert {headers["Authorization"] for _, _, headers in server.seen} == {f"Bearer {KEY}"}
    text = (tmp_path / "a.jsonl").read_text()
    assert "says 400 ***" in text and KEY not in text + repr(generate)


@pytest.mark.parametrize("host", ["10.0.0.7:8000", "localhost.example.org", "127.0.0.1.example.org"])
def test_the_key_does_not_go_over_http_to_another_machine(monkeypatch, host):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    assert endpoint._key(f"http://{host}") == ""
    assert endpoint._key(f"https://{host}") == endpoint._key("http://localhost:8000") == KEY


def test_in_a_notebook_whose_loop_is_running(server):
    async def cell():
        return graded(Endpoint(server.url, "tiny"))

    assert asyncio.run(cell()).summary()["accuracy"] == 1
