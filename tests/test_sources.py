"""Completions from a file and from a server: real files, a real HTTP server, and none left out."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lib import sources
from grpo_lib.environment import repo_root
from grpo_lib.errors import CourseError
from grpo_lib.evaluation import EvalRun, evaluate
from grpo_lib.generation import Generation
from grpo_lib.problems.types import Problem
from grpo_lib.sources import endpoint, saved_completions

PROBLEMS = [Problem(f"p{i}", f"What is {i} plus {i}?", "", str(2 * i), "test") for i in range(12)]
KEY = "sk-very-secret-0123456789"


def say(answer):
    return f"<reasoning>so it is</reasoning><answer>{answer}</answer>"


def right(prompt):
    return say(2 * int(prompt.split()[2]))


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def graded(generate, problems=PROBLEMS, **options):
    return evaluate(generate, problems, progress=False, **options)


# --- saved completions ---


@pytest.mark.parametrize(
    "row",
    [
        lambda p: {"id": p.id, "completion": right(p.question)},
        lambda p: {"question": p.question, "response": right(p.question)},
        lambda p: {"prompt": p.question, "completion": right(p.question), "something": [1]},
        lambda p: {"id": "another name", "question": p.question, "completion": right(p.question)},
    ],
)
def test_rows_are_matched_by_id_question_or_prompt_in_any_order(tmp_path, row):
    path = write(tmp_path / "c.jsonl", [row(p) for p in reversed(PROBLEMS)])
    run = graded(saved_completions(path, PROBLEMS), batch_size=5)
    assert run.summary()["accuracy"] == 1 and [r["id"] for r in run.records] == [p.id for p in PROBLEMS]


def test_a_rendered_prompt_alone_names_no_problem_and_beside_an_id_it_is_kept(tmp_path):
    rows = [{"prompt": f"<user>{p.question}<model>", "completion": say(0)} for p in PROBLEMS]
    with pytest.raises(CourseError, match=r"c\.jsonl: none of its 12 rows .*if that is the bare question"):
        saved_completions(write(tmp_path / "c.jsonl", rows), PROBLEMS)
    rows = [row | {"id": p.id} for row, p in zip(rows, PROBLEMS, strict=True)]
    del rows[3]["prompt"], rows[4]
    path = tmp_path / "graded.jsonl"
    run = graded(saved_completions(write(tmp_path / "c.jsonl", rows), PROBLEMS), path=path)
    assert [r["prompt"] for r in run.records[2:6]] == [
        *("<user>What is 2 plus 2?<model>", "What is 3 plus 3?", "What is 4 plus 4?", "<user>What is 5 plus 5?<model>"),
    ]
    assert graded(saved_completions(tmp_path / "c.jsonl", PROBLEMS), path=path) == run


def test_what_is_missing_counts_as_wrong(tmp_path):
    rows = [{"id": p.id, "completion": right(p.question)} for p in PROBLEMS[:6]]
    rows += [{"id": "p6"}, {"id": "p7", "completion": None}, {"id": "stranger", "completion": "x"}]
    run = graded(saved_completions(write(tmp_path / "c.jsonl", rows), PROBLEMS))
    assert (run.summary()["accuracy"], run.summary()["n"]) == (0.5, 12)
    errors = {r["id"]: r["error"] for r in run.records if r["error"]}
    assert list(errors) == ["p6", "p7", "p8", "p9", "p10", "p11"]
    assert "row 8 holds no text" in errors["p7"] and "c.jsonl holds no completion" in errors["p8"]


def test_tokens_and_truncation_are_kept(tmp_path):
    rows = [
        {"id": "p0", "completion": "", "tokens": 5, "truncated": True},
        {"id": "p1", "completion": "", "finish_reason": "length"},
        {"id": "p2", "completion": "", "tokens": "many", "truncated": "yes", "error": "HTTP 400"},
    ]
    generate = saved_completions(write(tmp_path / "c.jsonl", rows), PROBLEMS[:3])
    assert generate(["", "", ""], tasks=[("p0", 0), ("p1", 0), ("p2", 0)]) == [
        Generation("", 5, True),
        Generation("", None, True),
        Generation("", None, False, "HTTP 400"),
    ]


def test_samples_stand_in_their_order_or_by_number(tmp_path):
    rows = [{"id": p.id, "completion": f"{p.id} {s}"} for s in range(3) for p in PROBLEMS]
    plain = saved_completions(write(tmp_path / "a.jsonl", rows), PROBLEMS)
    numbered = [{"id": p.id, "completion": f"{p.id} {s}", "sample": s} for s in (2, 0, 1) for p in PROBLEMS]
    by_number = saved_completions(write(tmp_path / "b.jsonl", numbered), PROBLEMS)
    assert plain.most == by_number.most == 3 and not plain.greedy
    for saved in (plain, by_number):
        run = graded(saved, samples=3, batch_size=4)
        assert [r["completion"] for r in run.records] == [f"{r['id']} {r['sample']}" for r in run.records]


def test_rows_of_two_problems_with_one_question_need_an_id(tmp_path):
    twins = [Problem("a", "Why?", "", "1", "test"), Problem("b", "Why?", "", "2", "test")]
    rows = [{"question": "Why?", "completion": say(1)}, {"question": "Why?", "completion": say(2)}]
    with pytest.raises(CourseError, match=r"row 1 may belong to problem a or b, .*give every row its id"):
        saved_completions(write(tmp_path / "c.jsonl", rows), twins)
    path = write(tmp_path / "c.jsonl", [row | {"id": p.id} for row, p in zip(rows, twins, strict=True)])
    saved = saved_completions(path, twins)
    assert saved.most == 1 and all(r["strict"] for r in graded(saved, twins).records)


def test_records_of_an_evaluation_are_completions(tmp_path):
    path = tmp_path / "run.jsonl"

    def guess(prompts, *, seed):
        return [say((seed + n) % 24) for n in range(len(prompts))]

    def greedy(prompts):
        return [Generation(right(p), 7, True) for p in prompts]

    run = graded(greedy, sampled=guess, samples=4, path=path)
    saved = saved_completions(path, PROBLEMS)
    assert saved.greedy and saved.most == 5
    again = graded(saved, sampled=saved, samples=4, batch_size=5)
    assert again.summary() == run.summary()
    assert [r["completion"] for r in again.records] == [r["completion"] for r in run.records]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "none of its 0 rows"),
        ([{"completion": "x"}, {"id": None, "completion": "x"}], "none of its 2 rows"),
        ([{"id": "p0", "question": "Who?", "completion": "x"}], "row 1 has another question for problem p0"),
        ([{"id": "p0", "sample": 1}, {"id": "p0", "sample": 1}], "row 2 is sample 1 of problem p0 again"),
        ([{"id": "p0", "sample": 1}, {"id": "p0", "sample": 2}], "their sample runs from 0 to 1"),
    ],
)
def test_files_that_are_refused(tmp_path, rows, message):
    with pytest.raises(CourseError, match=message) as caught:
        saved_completions(write(tmp_path / "c.jsonl", rows), PROBLEMS)
    assert "c.jsonl" in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CourseError, match=r"none\.jsonl: no such file"):
        saved_completions(tmp_path / "none.jsonl", PROBLEMS)


values = st.none() | st.booleans() | st.integers() | st.text(max_size=9) | st.lists(st.integers(), max_size=2)
fields = st.sampled_from(
    ["id", "question", "prompt", "completion", "response", "sample", "tokens", "truncated", "error", "greedy"]
)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.dictionaries(fields, values | st.sampled_from(["p0", "p1"]), max_size=6), max_size=6))
def test_no_row_breaks_anything(rows, tmp_path_factory):
    path = write(tmp_path_factory.mktemp("wild") / "c.jsonl", rows)
    try:
        saved = saved_completions(path, PROBLEMS[:2])
    except CourseError as error:
        assert "\n" not in str(error)
    else:
        assert len(graded(saved, PROBLEMS[:2], samples=saved.most).records) == 2 * saved.most


# --- a server ---


class Server(ThreadingHTTPServer):
    """Answers every question rightly, unless `script` says otherwise: {word in the prompt: [reply, reply, …]}.

    A reply is a status, or (status, body, headers); the last one of a list is repeated.
    """

    daemon_threads = True
    request_queue_size = 64  # connections that wait to be accepted; those beyond try again after a second

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.seen, self.lock, self.slow = {}, [], threading.Lock(), 0.0
        self.most, self.now = 0, 0
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_):
        pass  # a client has gone: that is what some tests are about

    def reply(self, prompt):
        for word, replies in self.script.items():
            if word in prompt.split():
                return replies.pop(0) if len(replies) > 1 else replies[0]
        return 200

    def bodies(self, word=""):
        return [body for body, _, _ in self.seen if word in json.dumps(body)]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        chat = self.path.endswith("/chat/completions")
        prompt = body["messages"][-1]["content"] if chat else body["prompt"]
        with self.server.lock:
            self.server.seen.append((body, self.path, dict(self.headers)))
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
            reply = self.server.reply(prompt)
        time.sleep(self.server.slow)
        with self.server.lock:
            self.server.now -= 1
        status, content, headers = reply if isinstance(reply, tuple) else (reply, None, {})
        if status == "hang up":
            self.close_connection = True
            return
        if status == "sleep":
            time.sleep(content)
            status, content = 200, None
        if content is None:
            content = self.completion(prompt, chat) if status == 200 else {"error": {"message": f"says {status} {KEY}"}}
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        try:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            pass  # the client has gone

    def completion(self, prompt, chat):
        text = right(prompt) if prompt.startswith("What is") else "2"
        choice = {"message": {"content": text}} if chat else {"text": text}
        return {"choices": [choice | {"finish_reason": "stop"}], "usage": {"completion_tokens": 11}}

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with Server() as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield running
        running.shutdown()


def ask(server, **options):
    return endpoint(server.url, "tiny", **{"pause": 0.01, "timeout": 5} | options)


def test_chat_sends_messages_and_the_server_renders(server):
    run = graded(ask(server, system="Be brief.", max_tokens=77), batch_size=5)
    assert run.summary()["accuracy"] == 1
    assert {r["tokens"] for r in run.records} == {11}
    assert [r["prompt"] for r in run.records] == [f"system: Be brief.\n\nuser: {p.question}" for p in PROBLEMS]
    body, path, headers = server.seen[0]
    assert path == "/v1/chat/completions" and "Authorization" not in headers
    assert [m["role"] for m in body["messages"]] == ["system", "user"]
    assert body | {"messages": 0} == {
        "model": "tiny",
        "messages": 0,
        "max_tokens": 77,
        "temperature": 0.0,
        "top_p": 1.0,
    }


def test_without_chat_the_prompt_is_sent_as_it_is(server):
    run = graded(ask(server, chat=False, extra={"top_k": -1}), render=lambda question: f"What is {question[8:]}")
    assert run.summary()["accuracy"] == 1
    body, path, _ = server.seen[0]
    assert path == "/v1/completions" and body["prompt"].startswith("What is") and body["top_k"] == -1
    assert body["prompt"] in {r["prompt"] for r in run.records}
    with pytest.raises(CourseError, match="extra must not hold temperature, n, "):
        ask(server, extra={"n": 2, "temperature": 1})


def test_every_request_of_a_batch_has_a_seed_of_its_own(server):
    graded(ask(server, temperature=0.7), PROBLEMS[:2], samples=8, batch_size=5)
    seeds = [body["seed"] for body in server.bodies()]
    assert len(set(seeds)) == 16 and {body["temperature"] for body in server.bodies()} == {0.7}
    server.seen.clear()
    graded(ask(server, temperature=0.7), PROBLEMS[:2], samples=8, batch_size=5)
    assert sorted(body["seed"] for body in server.bodies()) == sorted(seeds)


def test_requests_run_side_by_side_and_answers_stay_in_order(server):
    server.slow = 0.05
    server.script = {"3": [("sleep", 0.2, {})]}
    run = graded(ask(server, concurrency=4))
    assert run.summary()["accuracy"] == 1
    assert server.most == 4


def test_length_marks_a_truncated_completion_and_null_is_empty(server):
    cut = {
        "choices": [{"message": {"content": "and so"}, "finish_reason": "length"}],
        "usage": {"completion_tokens": 512},
    }
    null = {"choices": [{"message": {"content": None}, "finish_reason": "stop"}], "usage": None}
    server.script = {"4": [(200, cut, {})], "5": [(200, null, {})]}
    run = graded(ask(server))
    assert [(r["id"], r["tokens"]) for r in run.records if r["truncated"]] == [("p4", 512)]
    assert (run.records[5]["completion"], run.records[5]["tokens"], run.records[5]["error"]) == ("", None, None)


@pytest.mark.parametrize(
    "bad",
    [
        429,
        500,
        503,
        ("hang up", None, {}),
        (200, b"<html>gateway</html>", {}),
        (200, b"[" * 100_000, {}),
        (200, {"choices": []}, {}),
        (200, [1], {}),
        (200, {"choices": [{"message": {"content": [1]}}]}, {}),
    ],
)
def test_what_may_pass_is_tried_again(server, bad):
    server.script = {"3": [bad, bad, 200]}
    run = graded(ask(server))
    assert run.summary()["accuracy"] == 1 and not any(r["error"] for r in run.records)
    assert len(server.bodies("What is 3 plus")) == 3 and len(server.seen) == 14


def test_the_server_says_how_long_to_wait(server):
    server.script = {"3": [(429, {}, {"Retry-After": "0.3"}), 200], "4": [(503, {}, {"Retry-After": "Wed, soon"}), 200]}
    started = time.monotonic()
    assert graded(ask(server)).summary()["accuracy"] == 1
    assert 0.3 <= time.monotonic() - started < 3


def test_a_slow_answer_is_given_up_and_asked_for_again(server):
    server.script = {"3": [("sleep", 1.0, {}), 200]}
    assert graded(ask(server, timeout=0.25)).summary()["accuracy"] == 1


def test_a_request_that_is_refused_counts_as_wrong_and_is_not_repeated(server):
    long = (400, {"object": "error", "message": f"the prompt is\ntoo long {KEY}"}, {})
    server.script = {"3": [long], "5": [(413, b"", {})]}
    run = graded(ask(server))
    assert (run.summary()["accuracy"], run.summary()["n"]) == (10 / 12, 12)
    assert run.records[3]["error"] == f"HTTP 400: the prompt is too long {KEY}"  # no key is set, so it is no secret
    assert run.records[5]["error"] == "HTTP 413"
    assert len(server.bodies("What is 3 plus")) == 1


def test_a_request_that_always_fails_counts_as_wrong_while_others_are_answered(server):
    server.script = {"3": [500], "4": [("hang up", None, {})], "5": [(200, b"{", {})]}
    run = graded(ask(server, retries=2))
    assert [r["id"] for r in run.records if not r["strict"]] == ["p3", "p4", "p5"]
    assert [r["error"].split()[0] for r in run.records[3:6]] == ["HTTP", "RemoteProtocolError", "HTTP"]
    assert len(server.bodies("What is 3 plus")) == 3


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (401, "OPENAI_API_KEY holds another key"),
        (403, "OPENAI_API_KEY holds another key"),
        (404, "knows no model tiny"),
        (301, "does not serve this API"),
        (500, "answers no request .HTTP 500"),
        (429, "answers no request .HTTP 429"),
        (400, "answers no request .HTTP 400"),
    ],
)
def test_a_server_that_answers_nobody_is_an_error_and_not_a_wrong_answer(
    server, monkeypatch, tmp_path, status, message
):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    server.reply = lambda prompt: status
    path = tmp_path / "a.jsonl"
    with pytest.raises(CourseError, match=message) as caught:
        graded(ask(server, retries=1), path=path)
    assert server.url in str(caught.value) and "\n" not in str(caught.value)
    assert KEY not in str(caught.value) and KEY not in repr(caught.value.__cause__)
    assert not path.exists()
    del server.reply  # somebody repairs it
    assert graded(ask(server), path=path).summary()["accuracy"] == 1


def test_a_server_that_stops_in_the_middle_leaves_the_journal(server, tmp_path):
    path, count, reply = tmp_path / "a.jsonl", iter(range(7)), server.reply
    server.reply = lambda prompt: reply(prompt) if next(count, None) is not None else 503
    with pytest.raises(CourseError, match="HTTP 503"):
        graded(ask(server, retries=1, concurrency=1), path=path, batch_size=3)
    server.reply, before = reply, len(server.seen)
    assert graded(ask(server), path=path, batch_size=3).summary()["accuracy"] == 1
    assert len(server.seen) - before == 6


def test_options_that_the_server_refuses_are_an_error(server):
    """A limit beyond the model's context is refused for each prompt, and a trivial request with it, too."""
    server.reply = lambda prompt: 400 if server.seen[-1][0]["max_tokens"] > 100 else 200
    with pytest.raises(CourseError, match=r"answers no request \(HTTP 400: says 400"):
        graded(ask(server, max_tokens=101))
    assert graded(ask(server, max_tokens=100)).summary()["accuracy"] == 1


def test_one_request_too_many_is_never_the_models_fault(server):
    server.script = {"3": [429]}
    with pytest.raises(CourseError, match="HTTP 429"):
        graded(ask(server, retries=1))


def test_no_server_at_all_is_said_at_once(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nobody else can take the port, and nobody answers
        url = f"http://user:{KEY}@127.0.0.1:{taken.getsockname()[1]}"
        started = time.monotonic()
        with pytest.raises(CourseError, match=r"no server answers at http://127\.0\.0\.1:") as caught:
            graded(endpoint(url, "tiny"))
        assert time.monotonic() - started < 5
    assert KEY not in str(caught.value) and "start it" in str(caught.value)


def test_the_key_is_sent_and_stands_nowhere(server, monkeypatch, tmp_path):
    monkeypatch.setenv("MY_KEY", f" {KEY}\n")
    server.script = {"3": [400], "4": [500]}
    generate = ask(server, api_key_env="MY_KEY", retries=1)
    graded(generate, path=tmp_path / "a.jsonl")
    assert {headers["Authorization"] for _, _, headers in server.seen} == {f"Bearer {KEY}"}
    text = (tmp_path / "a.jsonl").read_text()
    assert "says 400 ***" in text and "says 500 ***" in text and KEY not in text
    server.reply = lambda prompt: 401
    with pytest.raises(CourseError, match=r"says 401 \*\*\*.*MY_KEY holds another key") as caught:
        graded(generate)
    assert KEY not in str(caught.value)
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(CourseError, match=r"MY_KEY is not set, .* and it wants a key"):
        graded(ask(server, api_key_env="MY_KEY"))
    monkeypatch.setenv("MY_KEY", "two\nlines")
    with pytest.raises(CourseError, match="MY_KEY holds characters") as caught:
        ask(server, api_key_env="MY_KEY")
    assert "two" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "sent"),
    [
        ("https://api.example.org/v1", True),
        ("http://localhost:8000", True),
        ("http://127.0.0.2:8000", True),
        ("http://[::1]:8000", True),
        ("http://10.0.0.7:8000", False),
        ("http://localhost.example.org", False),
        ("http://127.0.0.1.example.org", False),
    ],
)
def test_the_key_goes_over_https_or_to_this_machine(monkeypatch, capsys, url, sent):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    generate = endpoint(url, "tiny")
    said = capsys.readouterr().err
    assert generate.key == (KEY if sent else "") and KEY not in repr(generate) + said
    assert (said == "") if sent else (said.count("\n") == 1 and "OPENAI_API_KEY is not sent to http://" in said)
    monkeypatch.delenv("OPENAI_API_KEY")
    endpoint(url, "tiny")
    assert capsys.readouterr().err == ""


def test_odd_text_goes_there_and_comes_back(server):
    odd = 'a\u2028"\x00</script>\ud83d 中'
    server.script = {"odd": [(200, {"choices": [{"message": {"content": odd}}]}, {})]}
    run = graded(ask(server), [Problem("x", f"odd {odd}", "", "1", "test")])
    assert run.records[0]["completion"] == odd.replace("\ud83d", "?")


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/", "/v1/chat/completions", "/v1/completions"])
def test_addresses(server, path):
    generate = endpoint(server.url + path, "tiny")
    assert generate(["What is 4 plus 4?"]) == [Generation(say(8), 11, False)]
    assert server.seen[0][1] == "/v1/chat/completions"


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://host/v1", "http://", "http://h:99999", "http://h?key=1"])
def test_what_is_no_address(url):
    with pytest.raises(CourseError, match="the address must read like http://localhost:8000/v1"):
        endpoint(url, "tiny")


def test_an_interruption_does_not_wait_for_all_requests(server):
    server.script = {"3": [401]}
    server.slow = 0.02
    with pytest.raises(CourseError, match="lets nobody in"):
        ask(server, concurrency=1)([p.question for p in PROBLEMS])
    assert len(server.seen) < 8  # the rest was never sent


def test_a_fatal_error_does_not_wait_for_requests_under_way(server):
    server.script = {"3": [401], "4": [("sleep", 5.0, {})], "5": [("sleep", 5.0, {})]}
    started = time.monotonic()
    with pytest.raises(CourseError, match="lets nobody in"):
        graded(ask(server, timeout=20))
    assert time.monotonic() - started < 2


ASK = """
import sys
from grpo_lib.evaluation import evaluate
from grpo_lib.problems.types import Problem
from grpo_lib.sources import endpoint

problems = [Problem(f"p{i}", f"What is {i} plus {i}?", "", str(2 * i), "test") for i in range(12)]
evaluate(endpoint(sys.argv[1], "tiny"), problems, progress=False)
"""


# What a shell runs in the background ignores SIGINT, and so would its children: a Python child listens again.
HEAR_CTRL_C = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"


def interrupted(program: str, arguments: list[str], server, requests: int) -> tuple[str, int, float]:
    """Run a program until the server has seen so many requests, press Ctrl-C: (stderr, exit code, seconds to end)."""
    command = [sys.executable, "-c", HEAR_CTRL_C + program, *arguments]
    child = subprocess.Popen(command, cwd=repo_root(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while len(server.seen) < requests and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    started = time.monotonic()
    child.send_signal(signal.SIGINT)
    try:
        said = child.communicate(timeout=10)[1]
    finally:
        child.kill()
    return said, child.returncode, time.monotonic() - started


def test_ctrl_c_ends_the_process_while_the_server_thinks(server):
    server.slow = 25.0
    said, _, seconds = interrupted(ASK, [server.url], server, requests=12)
    assert seconds < 3 and "KeyboardInterrupt" in said and len(server.seen) == 12


def test_importing_sources_is_light():
    code = "import sys, grpo_lib.sources; print(*sorted(sys.modules.keys() & {'httpx', 'numpy', 'jax'}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.strip() == ""


def test_saved_completions_and_servers_give_records_that_load(server, tmp_path):
    graded(ask(server), path=tmp_path / "a.jsonl", model="tiny")
    assert {r["model"] for r in EvalRun.load(tmp_path / "a.jsonl").records} == {"tiny"}
    assert sources.saved_completions(tmp_path / "a.jsonl", PROBLEMS).most == 1
