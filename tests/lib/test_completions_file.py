"""Completions from a file: every row finds its problem, and none is skipped."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_evaluation import quiet, tagged

from grpo_lib.common.errors import CourseError
from grpo_lib.completions_file import saved_completions
from grpo_lib.problems.types import Problem
from grpo_lib.records import Generation

PROBLEMS = [Problem(f"p{i}", f"What is {i} plus {i}?", "", str(2 * i), "test") for i in range(12)]


def right(prompt):
    return tagged(2 * int(prompt.split()[2]))


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


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
    run = quiet(saved_completions(path, PROBLEMS), PROBLEMS, batch_size=5)
    assert run.summary()["accuracy"] == 1
    assert [r["id"] for r in run.records] == [p.id for p in PROBLEMS]


def said(text):
    return {"role": "assistant", "content": text}


def batch_row(problem, *texts):
    choices = [{"index": n, "message": said(text), "finish_reason": "stop"} for n, text in enumerate(texts)]
    body = {"choices": choices, "usage": {"completion_tokens": 7}}
    return {"id": "batch_req_1", "custom_id": problem.id, "error": None, "response": {"status_code": 200, "body": body}}


def lm_eval_row(problem, *texts, kept="strict-match"):
    document = {"question": f"{problem.question} ", "answer": f"#### {problem.answer}"}
    return {"doc_id": 5, "doc": document, "target": "#### 1", "resps": [list(texts)], "filter": kept, "exact_match": 0}


@pytest.mark.parametrize(
    "row",
    [
        lambda p: {"id": p.id, "completion": [said(right(p.question))]},
        lambda p: {"id": p.id, "response": said(right(p.question))},
        lambda p: {"prompt": [{"role": "user", "content": p.question}], "completion": [said(right(p.question))]},
        lambda p: {"messages": [{"role": "user", "content": f"{p.question}\n"}, said(right(p.question))]},
        lambda p: {"id": p.id, "messages": [said([{"type": "text", "text": right(p.question)}])]},
        lambda p: batch_row(p, right(p.question)),
        lambda p: lm_eval_row(p, right(p.question)),
    ],
)
def test_rows_of_other_programs_are_read(tmp_path, row):
    path = write(tmp_path / "c.jsonl", [row(p) for p in PROBLEMS])
    run = quiet(saved_completions(path, PROBLEMS), PROBLEMS)
    assert run.summary()["accuracy"] == 1
    assert not any(record["error"] for record in run.records)


@pytest.mark.parametrize("row", [batch_row, lm_eval_row])
def test_several_choices_or_responses_are_samples(tmp_path, row):
    path = write(tmp_path / "c.jsonl", [row(p, "no", right(p.question)) for p in PROBLEMS])
    saved = saved_completions(path, PROBLEMS)
    assert saved.most == 2
    assert [saved.found["p3", sample].text for sample in (0, 1)] == ["no", right("What is 3 plus 3?")]


def test_lm_evals_other_filters_repeat_its_samples(tmp_path):
    rows = [lm_eval_row(p, right(p.question), kept=kept) for kept in ("strict-match", "flexible") for p in PROBLEMS]
    assert saved_completions(write(tmp_path / "c.jsonl", rows), PROBLEMS).most == 1


def test_a_failed_request_of_a_batch_counts_as_wrong(tmp_path):
    failed = {"custom_id": "p0", "response": None, "error": {"code": "batch_expired", "message": "too late"}}
    rows = [failed, *(batch_row(p, right(p.question)) for p in PROBLEMS[1:])]
    saved = saved_completions(write(tmp_path / "c.jsonl", rows), PROBLEMS)
    assert "request p0" in saved.found["p0", 0].error and "batch_expired" in saved.found["p0", 0].error
    assert saved.found["p1", 0].tokens == 7
    with pytest.raises(CourseError, match=r"none of its 1 rows has a completion \(request p0"):
        saved_completions(write(tmp_path / "c.jsonl", [failed]), PROBLEMS)


def test_a_file_without_a_text_is_refused_and_a_byte_order_mark_is_not(tmp_path):
    path = write(tmp_path / "c.jsonl", [{"id": p.id, "completion": [{"role": "assistant"}]} for p in PROBLEMS])
    with pytest.raises(CourseError, match=r"none of its 12 rows has a completion .*; give JSON lines .*lm-eval"):
        saved_completions(path, PROBLEMS)
    rows = [json.dumps({"id": p.id, "completion": "a"}) for p in PROBLEMS]
    path.write_bytes("\r\n".join([*rows, ""]).encode("utf-8-sig"))
    assert len(saved_completions(path, PROBLEMS).found) == 12


def test_a_rendered_prompt_matches_no_problem_and_is_kept_where_there_is_an_id(tmp_path):
    rows = [{"prompt": f"<user>{p.question}<model>", "completion": tagged(0)} for p in PROBLEMS]
    with pytest.raises(CourseError, match=r"c\.jsonl: none of its 12 rows .*if that is the bare question"):
        saved_completions(write(tmp_path / "c.jsonl", rows), PROBLEMS)
    rows = [row | {"id": p.id} for row, p in zip(rows, PROBLEMS, strict=True)]
    del rows[3]["prompt"], rows[4]
    path = tmp_path / "graded.jsonl"
    run = quiet(saved_completions(write(tmp_path / "c.jsonl", rows), PROBLEMS), PROBLEMS, path=path)
    assert [r["prompt"] for r in run.records[2:6]] == [
        *("<user>What is 2 plus 2?<model>", "What is 3 plus 3?", "What is 4 plus 4?", "<user>What is 5 plus 5?<model>"),
    ]
    assert quiet(saved_completions(tmp_path / "c.jsonl", PROBLEMS), PROBLEMS, path=path) == run


def test_what_is_missing_counts_as_wrong(tmp_path):
    rows = [{"id": p.id, "completion": right(p.question)} for p in PROBLEMS[:6]]
    rows += [{"id": "p6"}, {"id": "p7", "completion": None}, {"id": "stranger", "completion": "x"}]
    run = quiet(saved_completions(write(tmp_path / "c.jsonl", rows), PROBLEMS), PROBLEMS)
    assert (run.summary()["accuracy"], run.summary()["n"]) == (0.5, 12)
    assert [r["id"] for r in run.records if r["error"]] == ["p6", "p7", "p8", "p9", "p10", "p11"]


def test_thoughts_that_a_template_opened_are_said_for_rows_without_its_prompt(tmp_path):
    """A text that was cut off in thoughts, in every form of row, and one that came to the end of its thoughts."""
    cut = f"Perhaps it is 0. {tagged(0)} Or not, because"
    zero = [Problem(f"z{n}", f"What is {n} times 0?", "", "0", "test") for n in range(8)]
    rows = [
        {"id": "z0", "completion": cut},
        {"id": "z1", "prompt": zero[1].question, "completion": cut},  # not as it was sent
        {"messages": [{"role": "user", "content": zero[2].question}, said(cut)]},
        lm_eval_row(zero[3], cut, kept=None),
        batch_row(zero[4], cut),
        {"id": "z5", "prompt": "<user>What is 5 times 0?<assistant>", "completion": cut},  # it shows that it opens none
        {"id": "z6", "completion": f"Perhaps 1.</think>{tagged(0)}"},
        {"id": "z7", "prompt": "What is 7 times 0?<assistant><think>\n", "completion": cut},
    ]
    path = write(tmp_path / "c.jsonl", rows)
    thinking = [False, False, False, False, False, True, True, False]
    for said_so, right_ones in ((False, [True] * 7 + [False]), (True, thinking)):
        output = tmp_path / f"{said_so}.jsonl"
        saved = saved_completions(path, zero, thinking=said_so)
        run = quiet(saved, zero, path=output)
        assert [record["strict"] for record in run.records] == right_ones
        assert quiet(saved, zero, path=output) == run  # a file that is read is graded again
        again = saved_completions(output, zero)
        assert [record["strict"] for record in quiet(again, zero).records] == right_ones


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


@pytest.mark.parametrize(("order", "numbered"), [((0, 1, 2), False), ((2, 0, 1), True)])
def test_samples_are_in_their_order_or_by_number(tmp_path, order, numbered):
    rows = [
        {"id": p.id, "completion": f"{p.id} {s}"} | ({"sample": s} if numbered else {}) for s in order for p in PROBLEMS
    ]
    saved = saved_completions(write(tmp_path / "a.jsonl", rows), PROBLEMS)
    assert saved.most == 3
    assert not saved.greedy
    run = quiet(saved, PROBLEMS, samples=3, batch_size=4)
    assert [r["completion"] for r in run.records] == [f"{r['id']} {r['sample']}" for r in run.records]


def test_rows_of_two_problems_with_one_question_need_an_id(tmp_path):
    twins = [Problem("a", "Why?", "", "1", "test"), Problem("b", "Why?", "", "2", "test")]
    rows = [{"question": "Why?", "completion": tagged(p.answer)} for p in twins]
    with pytest.raises(CourseError, match=r"row 1 .* a or b"):
        saved_completions(write(tmp_path / "c.jsonl", rows), twins)
    path = write(tmp_path / "c.jsonl", [row | {"id": p.id} for row, p in zip(rows, twins, strict=True)])
    assert all(r["strict"] for r in quiet(saved_completions(path, twins), twins).records)


def test_records_of_an_evaluation_are_completions(tmp_path):
    path = tmp_path / "run.jsonl"

    def guess(prompts, *, seed):
        return [tagged((seed + n) % 24) for n in range(len(prompts))]

    run = quiet(
        lambda prompts: [Generation(right(prompt), 7, True) for prompt in prompts],
        PROBLEMS,
        sampled=guess,
        samples=4,
        path=path,
    )
    saved = saved_completions(path, PROBLEMS)
    assert saved.greedy
    assert saved.most == 5
    again = quiet(saved, PROBLEMS, sampled=saved, samples=4, batch_size=5)
    assert again.summary() == run.summary()
    assert [r["completion"] for r in again.records] == [r["completion"] for r in run.records]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (None, "no such file"),
        ([], "none of its 0 rows"),
        ([{"completion": "x"}, {"id": None, "completion": "x"}], "none of its 2 rows"),
        ([{"id": "p0", "question": "Who?", "completion": "x"}], "row 1 .*p0"),
        ([{"id": "p0", "sample": 1}, {"id": "p0", "sample": 1}], "row 2 .*p0"),
        ([{"id": "p0", "sample": 1}, {"id": "p0", "sample": 2}], "sample must run from 0 to 1"),
    ],
)
def test_files_that_are_refused(tmp_path, rows, message):
    path = tmp_path / "c.jsonl"
    if rows is not None:
        write(path, rows)
    with pytest.raises(CourseError, match=rf"c\.jsonl.*{message}"):
        saved_completions(path, PROBLEMS)


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
        assert len(quiet(saved, PROBLEMS[:2], samples=saved.most).records) == 2 * saved.most
