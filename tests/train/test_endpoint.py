"""A server with OpenAI's API, a real one in a thread: its answers, its refusals, and where the key goes."""

import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from grpo_lib.common.errors import CourseError
from grpo_lib.evaluation import evaluate
from grpo_lib.problems.types import Problem
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
        self.script, self.seen, self.slow = {}, [], 0.0
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_):
        pass  # the client is gone

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
        time.sleep(self.server.slow)
        replies = next((self.server.script[word] for word in prompt.split() if word in self.server.script), [200])
        reply = replies.pop(0) if len(replies) > 1 else replies[0]
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
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with Server() as running:
        yield running


def graded(generate, problems=PROBLEMS, **options):
    return evaluate(generate, problems, progress=False, **options)


def test_a_served_model_is_evaluated(server, monkeypatch, tmp_path):
    """A busy server is asked again, a refused request is wrong, a cut completion is marked, the key is hidden."""
    monkeypatch.setenv("OPENAI_API_KEY", f" {KEY}\n")
    server.script = {"1": [429, 200], "3": [400], "4": [Handler.completion("and so", "length")]}
    run = graded(Endpoint(server.url, "tiny", system="Be brief.", max_tokens=77), path=tmp_path / "a.jsonl")
    assert run.summary()["accuracy"] == 4 / 6 and len(server.seen) == 7
    assert "400" in run.records[3]["error"] and KEY not in (tmp_path / "a.jsonl").read_text()
    assert [r["id"] for r in run.records if r["truncated"]] == ["p4"]
    body, path, headers = server.seen[0]
    assert path == "/v1/chat/completions" and [m["role"] for m in body.pop("messages")] == ["system", "user"]
    assert body == {"model": "tiny", "max_tokens": 77, "temperature": 0.0, "top_p": 1.0}
    assert headers["Authorization"] == f"Bearer {KEY}"


def test_every_sample_has_a_seed_of_its_own(server):
    for _ in range(2):
        graded(Endpoint(server.url, "tiny", temperature=0.7), PROBLEMS[:2], samples=4, batch_size=5)
    seeds = [body["seed"] for body, _, _ in server.seen]
    assert len(set(seeds[:8])) == 8 and sorted(seeds[:8]) == sorted(seeds[8:])


@pytest.mark.parametrize("reply", [401, 429, 400, {"choices": []}, [1]])
def test_a_server_that_cannot_be_used_is_an_error_and_not_a_wrong_answer(server, monkeypatch, tmp_path, reply):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    server.script = {"5": [reply]}
    with pytest.raises(CourseError) as caught:
        graded(Endpoint(server.url, "tiny"), PROBLEMS[::-1], path=tmp_path / "a.jsonl", batch_size=1)
    assert server.url in str(caught.value) and "\n" not in str(caught.value) and KEY not in str(caught.value)
    server.script = {}  # somebody repairs it
    assert graded(Endpoint(server.url, "tiny"), path=tmp_path / "b.jsonl").summary()["accuracy"] == 1


def test_no_server_at_all():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(CourseError, match=url):
            graded(Endpoint(url, "tiny"))


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://host/v1", f"http://me:{KEY}@h", "http://h?key=1"])
def test_bad_addresses(url):
    with pytest.raises(CourseError) as caught:
        Endpoint(url, "tiny")
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("host", ["10.0.0.7:8000", "localhost.example.org", "127.0.0.1.example.org"])
def test_the_key_does_not_go_over_http_to_another_machine(monkeypatch, host):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    assert Endpoint(f"http://{host}", "tiny")._key == ""
    assert Endpoint(f"https://{host}", "tiny")._key == Endpoint("http://localhost:8000/v1", "tiny")._key == KEY
