"""Every problem counts, the order does not, and the baseline is computed once."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lib import answers, evaluation
from grpo_lib.errors import CourseError
from grpo_lib.evaluation import EvalRun, Generation, evaluate, summarize
from grpo_lib.problems.types import Problem

KEYS = [
    *("id", "sample", "question", "prompt", "completion", "extracted", "gold"),
    *("strict", "lenient", "partial", "format", "truncated", "tokens", "error", "steps"),
]


def problem(i, answer=None):
    question = f"What is {i} plus {i}?" + " Take your time." * (i % 7)
    return Problem(f"p{i}", question, "", str(2 * i) if answer is None else answer, "test", i % 3)


def say(answer, reasoning="so it is"):
    return f"<reasoning>{reasoning}</reasoning><answer>{answer}</answer>"


def double(prompts):
    """A model that is always right."""
    return [Generation(say(2 * int(prompt.split()[2])), 9, False) for prompt in prompts]


def refuse(prompts):
    raise AssertionError("generate was called")


PROBLEMS = [problem(i) for i in range(20)]


def quiet(generate, problems=PROBLEMS, **options):
    return evaluate(generate, problems, progress=False, **options)


# --- records ---


def test_a_record_holds_everything_and_records_stand_in_problem_order():
    run = quiet(double, batch_size=6)
    assert [record["id"] for record in run.records] == [p.id for p in PROBLEMS]
    assert all(list(record) == KEYS for record in run.records)
    record = run.records[9]
    assert record["gold"] == record["extracted"] == "18"
    assert record["strict"] and record["lenient"] and record["partial"] and record["format"]
    assert (record["tokens"], record["truncated"], record["error"], record["steps"]) == (9, False, None, 0)
    json.dumps(run.records)


def test_batches_come_longest_first_and_no_larger_than_asked():
    seen = []

    def generate(prompts):
        seen.append(prompts)
        return double(prompts)

    quiet(generate, batch_size=6)
    assert [len(batch) for batch in seen] == [6, 6, 6, 2]
    lengths = [len(prompt) for batch in seen for prompt in batch]
    assert lengths == sorted(lengths, reverse=True)


def test_render_makes_the_prompt():
    run = quiet(lambda prompts: [prompt.upper() for prompt in prompts], render=lambda q: f"<user>{q}")
    assert run.records[0]["prompt"] == "<user>What is 0 plus 0?"
    assert run.records[0]["completion"] == "<USER>WHAT IS 0 PLUS 0?"
    assert run.records[0]["tokens"] is None  # a plain string says nothing about tokens


def test_verdicts_are_separate():
    completions = {
        "p5": say(10),  # right
        "p6": "it is 12",  # right without the tags
        "p7": say("14.5"),  # within 10 %
        "p8": f" {say(16)}\n",  # right, format off by white space
        "p9": "",
    }
    problems = [problem(i) for i in range(5, 10)]
    run = quiet(lambda prompts: [completions[f"p{prompt.split()[2]}"] for prompt in prompts], problems)
    verdicts = [tuple(record[name] for name in evaluation.VERDICTS) for record in run.records]
    assert verdicts == [
        (True, True, True, True),
        (False, True, False, False),
        (False, False, True, True),
        (True, True, True, False),
        (False, False, False, False),
    ]
    summary = run.summary()
    assert (summary["accuracy"], summary["lenient_accuracy"]) == (0.4, 0.6)
    assert (summary["partial_accuracy"], summary["format_accuracy"], summary["n"]) == (0.6, 0.4, 5)


def test_a_completion_that_breaks_the_grader_counts_as_wrong(monkeypatch):
    strict = answers.is_correct

    def fragile(completion, gold):
        if gold == "6":
            raise RecursionError("too deep")
        return strict(completion, gold)

    monkeypatch.setattr(answers, "is_correct", fragile)
    run = quiet(double)
    assert len(run.records) == 20
    broken = run.records[3]
    assert broken["error"] == "RecursionError: too deep"
    assert not any(broken[name] for name in evaluation.VERDICTS)
    summary = run.summary()
    assert [summary[key] for key in summary if key.endswith("accuracy")] == [0.95] * 4


def test_what_is_no_completion_counts_as_wrong():
    run = quiet(lambda prompts: [None] * len(prompts))
    assert run.summary()["accuracy"] == 0
    assert "NoneType" in run.records[0]["error"]
    assert run.summary()["n"] == 20


def test_samples():
    rng = random.Random(0)

    def generate(prompts):
        return [say(2 * int(prompt.split()[2]) + rng.choice([0, 1])) for prompt in prompts]

    run = quiet(generate, samples=4, batch_size=7)
    assert [(r["id"], r["sample"]) for r in run.records[:5]] == [*[("p0", s) for s in range(4)], ("p1", 0)]
    summary = run.summary()
    assert summary["n"] == 20  # problems, not completions
    assert 0 < summary["accuracy"] < 1
    assert set(run.rates("strict").values()) <= {0, 0.25, 0.5, 0.75, 1}
    assert summarize(run, run)["mcnemar_p"] is None


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(max_size=80), min_size=1, max_size=12), st.integers(1, 5), st.integers(1, 3))
def test_no_completion_is_ever_dropped(texts, batch_size, samples):
    problems = [problem(i) for i in range(len(texts))]

    def generate(prompts):
        return [Generation(texts[int(prompt.split()[2])], 1, True) for prompt in prompts]

    run = quiet(generate, problems, batch_size=batch_size, samples=samples)
    assert [r["completion"] for r in run.records] == [text for text in texts for _ in range(samples)]
    assert run.summary()["n"] == len(texts)
    assert run.summary()["truncated"] == 1


# --- what evaluate refuses ---


@pytest.mark.parametrize("returned", [[], ["a"], ["a"] * 21])
def test_generate_must_answer_every_prompt(returned):
    with pytest.raises(CourseError, match=f"generate returned {len(returned)} completions for 20 prompts"):
        quiet(lambda prompts: returned)


def test_no_problems_and_twin_ids():
    with pytest.raises(CourseError, match="no problems"):
        quiet(double, [])
    with pytest.raises(CourseError, match="same id"):
        quiet(double, [problem(1), problem(1)])
    with pytest.raises(CourseError, match="batch_size"):
        quiet(double, batch_size=0)


# --- files: the baseline once ---


def test_a_finished_file_is_loaded_and_nothing_is_generated(tmp_path):
    path = tmp_path / "evals" / "before.jsonl"
    first = quiet(double, path=path)
    assert len(path.read_text().splitlines()) == 20
    assert quiet(refuse, path=path) == first == EvalRun.load(path)
    # The order of the problems is the caller's, not the file's.
    again = quiet(refuse, PROBLEMS[::-1], path=path)
    assert [record["id"] for record in again.records] == [p.id for p in PROBLEMS[::-1]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"problems": PROBLEMS[:-1]}, "other problems"),
        ({"problems": [*PROBLEMS, problem(20)]}, "other problems"),
        ({"problems": [*PROBLEMS[:-1], problem(19, answer="1")]}, "another gold answer for problem p19"),
        ({"samples": 2}, "number of samples"),
        ({"render": lambda question: f"Now: {question}"}, "another prompt for problem p0"),
    ],
)
def test_a_file_for_other_problems_is_refused(tmp_path, change, message):
    path = tmp_path / "before.jsonl"
    quiet(double, path=path)
    with pytest.raises(CourseError, match=message) as caught:
        quiet(refuse, path=path, **change)
    assert str(path) in str(caught.value) and "remove" in str(caught.value)
    assert len(EvalRun.load(path).records) == 20


def test_a_torn_file_is_not_a_finished_one(tmp_path):
    path = tmp_path / "before.jsonl"
    quiet(double, path=path)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(CourseError, match="19 records, 20 wanted"):
        quiet(refuse, path=path)


def test_an_interruption_leaves_the_finished_records_beside_the_path(tmp_path):
    path = tmp_path / "after.jsonl"
    calls = []

    def generate(prompts):
        calls.append(prompts)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return double(prompts)

    with pytest.raises(RuntimeError, match="out of memory"):
        quiet(generate, path=path, batch_size=6)
    assert not path.exists()
    partial = tmp_path / "after.jsonl.partial"
    assert len(EvalRun.load(partial).records) == 12
    assert len(quiet(double, path=path).records) == 20
    assert not partial.exists()


def test_load_names_the_file_and_what_is_wrong(tmp_path):
    with pytest.raises(CourseError, match="no such file"):
        EvalRun.load(tmp_path / "before.jsonl")
    path = tmp_path / "x.jsonl"
    path.write_text("")
    with pytest.raises(CourseError, match="no records"):
        EvalRun.load(path)
    path.write_text('{"id": "p0", "sample": 0}\n')
    with pytest.raises(CourseError, match=r"x\.jsonl: record 1 lacks question"):
        EvalRun.load(path)


def test_odd_characters_survive_the_file(tmp_path):
    odd = "a\u2028b\x85\r\n</script>é中\x00"
    run = quiet(lambda prompts: [odd] * len(prompts), path=tmp_path / "a.jsonl")
    assert EvalRun.load(tmp_path / "a.jsonl") == run


# --- the summary ---


def test_summarize_has_exactly_the_keys_of_summary_json():
    def worse(prompts):
        return [Generation("no idea", 3, True) if int(p.split()[2]) < 12 else double([p])[0] for p in prompts]

    summary = summarize(quiet(worse), quiet(double), wall_seconds=12.5, train_seconds=10.0, steps=3)
    assert list(summary) == [
        *("before", "after", "difference", "difference_interval", "mcnemar_p"),
        *("wall_seconds", "train_seconds", "steps"),
    ]
    assert list(summary["before"]) == [
        *("accuracy", "n", "interval", "lenient_accuracy", "partial_accuracy", "format_accuracy", "truncated")
    ]
    assert summary["before"]["accuracy"] == 0.4 and summary["after"]["accuracy"] == 1.0
    assert summary["before"]["truncated"] == 0.6
    assert summary["difference"] == pytest.approx(0.6)
    low, high = summary["difference_interval"]
    assert 0.3 < low < 0.6 < high < 0.9
    assert summary["mcnemar_p"] == pytest.approx(2 / 2**12)
    assert (summary["wall_seconds"], summary["train_seconds"], summary["steps"]) == (12.5, 10.0, 3)
    json.dumps(summary, allow_nan=False)


def test_summarize_pairs_by_id_and_not_by_position():
    def some(prompts):
        return [say(0) if int(p.split()[2]) % 3 else double([p])[0] for p in prompts]

    summary = summarize(quiet(some), quiet(some, PROBLEMS[::-1]))
    assert summary["difference_interval"] == [0, 0]
    assert summary["mcnemar_p"] == 1.0


def test_summarize_refuses_other_problems():
    with pytest.raises(CourseError, match="share only 19"):
        summarize(quiet(double), quiet(double, PROBLEMS[:-1]))
    with pytest.raises(CourseError, match="share only 19"):
        summarize(quiet(double), quiet(double, [*PROBLEMS[:-1], problem(19, answer="7")]))


def test_the_bar_shows_the_running_accuracy(capsys):
    evaluate(double, PROBLEMS, label="before", batch_size=5)
    shown = capsys.readouterr().err
    assert "before" in shown and "accuracy=100.0%" in shown and "20/20" in shown
