"""Every problem counts, the order does not, the baseline is computed once, and nothing is asked for twice."""

import functools
import json
import random
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lib import answers, evaluation
from grpo_lib.errors import CourseError
from grpo_lib.evaluation import EvalRun, Generation, evaluate, summarize
from grpo_lib.files import read_jsonl
from grpo_lib.problems.types import Problem

KEYS = [
    *("id", "sample", "greedy", "model", "question", "solution", "prompt", "completion", "extracted", "gold"),
    *("strict", "lenient", "partial", "format", "truncated", "tokens", "error", "steps"),
]


def problem(i, answer=None):
    question = f"What is {i} plus {i}?" + " Take your time." * (i % 7)
    return Problem(f"p{i}", question, f"{i}+{i}={2 * i}", str(2 * i) if answer is None else answer, "test", i % 3)


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
    assert (record["solution"], record["greedy"], record["model"]) == ("9+9=18", True, None)
    assert quiet(double, model="step 7").records[9] == record | {"model": "step 7"}
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


def test_the_record_keeps_what_was_sent(tmp_path):
    class Chat:
        def __call__(self, prompts):
            return double(prompts)

        def sent(self, prompt, task):
            return f"{task} {prompt}\ud83d"

    run = quiet(Chat(), path=tmp_path / "a.jsonl")
    assert run.records[1]["prompt"] == "('p1', 0) What is 1 plus 1? Take your time.?"
    assert quiet(Chat(), path=tmp_path / "a.jsonl") == run
    with pytest.raises(CourseError, match="another prompt"):
        quiet(refuse, path=tmp_path / "a.jsonl")


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
    strict = answers.same_value

    def fragile(answer, gold):
        if gold == "6":
            raise RecursionError("too deep")
        return strict(answer, gold)

    monkeypatch.setattr(answers, "same_value", fragile)
    run = quiet(double)
    assert len(run.records) == 20
    broken = run.records[3]
    assert broken["error"] == "the grader raised RecursionError: too deep"
    assert not any(broken[name] for name in evaluation.VERDICTS)
    summary = run.summary()
    assert [summary[key] for key in summary if key.endswith("accuracy")] == [0.95] * 4


def test_what_is_no_completion_counts_as_wrong():
    run = quiet(lambda prompts: [None] * len(prompts))
    assert run.summary()["accuracy"] == 0
    assert "NoneType" in run.records[0]["error"]
    assert run.summary()["n"] == 20


def test_a_failure_counts_as_wrong_whatever_its_text():
    """A server may fail after half of a right answer."""
    run = quiet(lambda prompts: [Generation(double([p])[0].text, None, True, error="HTTP 400") for p in prompts])
    assert run.summary() | {"interval": None} == {
        **{"accuracy": 0, "n": 20, "interval": None, "lenient_accuracy": 0, "partial_accuracy": 0},
        **{"format_accuracy": 0, "truncated": 1},
    }
    record = run.records[9]
    assert (record["error"], record["extracted"], record["tokens"]) == ("HTTP 400", None, None)
    assert record["completion"] == say(18)


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


def mixed(prompts, *, seed):
    """Right, wrong, or nothing: as the seed and the place in the batch have it."""
    rng = random.Random(seed)
    return [rng.choice([say(2 * int(prompt.split()[2])), say(1_000_000), "I do not know"]) for prompt in prompts]


def test_greedy_and_sampled_in_one_pass(tmp_path):
    path, asked = tmp_path / "both.jsonl", []

    def greedy(prompts):
        asked.append("greedy")
        return double(prompts)

    def sampled(prompts, *, seed):
        asked.append("sampled")
        return mixed(prompts, seed=seed)

    run = quiet(greedy, sampled=sampled, samples=6, path=path, batch_size=15)
    assert asked == ["greedy"] * 2 + ["sampled"] * 8
    assert [(r["id"], r["sample"], r["greedy"]) for r in run.records[:8]] == [
        *[("p0", sample, sample == 0) for sample in range(7)],
        ("p1", 0, True),
    ]
    assert EvalRun.load(path) == run == quiet(refuse, sampled=refuse, samples=6, path=path)

    summary = run.summary()
    assert (summary["accuracy"], summary["n"], summary["samples"]) == (1.0, 20, 6)
    drawn = [[r for r in run.records if r["id"] == p.id and not r["greedy"]] for p in PROBLEMS]
    right = [sum(r["strict"] for r in group) for group in drawn]
    assert summary["sampled_accuracy"] == pytest.approx(sum(right) / 120)
    assert list(summary["pass_at_k"]) == ["1", "2", "4", "6"]
    assert summary["pass_at_k"]["1"] == pytest.approx(sum(right) / 120)
    assert summary["pass_at_k"]["2"] == pytest.approx(sum(1 - (6 - c) * (5 - c) / 30 for c in right) / 20)
    assert summary["pass_at_k"]["6"] == sum(c > 0 for c in right) / 20

    def vote(group):
        given = [r["extracted"] for r in group if r["extracted"]]
        return max(given, key=lambda answer: (given.count(answer), -given.index(answer)), default=None)

    assert summary["maj_at_k"] == sum(vote(group) == group[0]["gold"] for group in drawn) / 20
    json.dumps(summary, allow_nan=False)


@pytest.mark.parametrize(("samples", "ks"), [(1, ["1"]), (2, ["1", "2"]), (8, ["1", "2", "4", "8"])])
def test_pass_at_k_is_given_for_powers_of_two_and_for_all_samples(samples, ks):
    summary = quiet(double, sampled=double, samples=samples).summary()
    assert list(summary["pass_at_k"]) == ks and set(summary["pass_at_k"].values()) == {1.0}


def test_one_greedy_completion_has_no_pass_at_k():
    assert "pass_at_k" not in quiet(double).summary()
    assert quiet(double, samples=2).summary()["pass_at_k"] == {"1": 1.0, "2": 1.0}


def test_a_problem_on_which_all_abstain_has_no_majority():
    summary = quiet(double, sampled=lambda prompts: ["?"] * len(prompts), samples=4).summary()
    assert (summary["maj_at_k"], summary["pass_at_k"]["4"], summary["sampled_accuracy"]) == (0, 0, 0)


def test_the_seed_is_that_of_the_batch():
    seeds = []

    def record(prompts, *, seed):
        seeds.append(seed)
        return double(prompts)

    quiet(record, samples=4, batch_size=10)
    assert len(set(seeds)) == len(seeds) == 8
    assert all(0 <= seed < 2**31 for seed in seeds)
    once, seeds[:] = seeds[:], []
    quiet(record, samples=4, batch_size=10)
    assert seeds == once


def test_only_those_who_ask_are_told_more():
    def with_tasks(prompts, tasks):
        return [Generation(say(2 * int(key[1:])), sample, False) for key, sample in tasks]

    run = quiet(with_tasks, samples=3, batch_size=7)
    assert run.summary()["accuracy"] == 1
    assert [record["tokens"] for record in run.records] == [0, 1, 2] * 20

    def with_anything(prompts, **options):
        assert not options
        return double(prompts)

    assert quiet(with_anything) == quiet(double) == quiet(functools.partial(mixed_or_double, right=True))


def mixed_or_double(prompts, *, right, seed=None):
    assert seed is not None
    return double(prompts) if right else mixed(prompts, seed=seed)


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
        ({"samples": 1, "sampled": refuse}, "number of samples"),
        ({"model": "step 30"}, "holds the answers of step 0, not of step 30"),
        ({"render": lambda question: f"Now: {question}"}, "another prompt for problem p0"),
    ],
)
def test_a_file_for_other_problems_is_refused(tmp_path, change, message):
    path = tmp_path / "before.jsonl"
    quiet(double, path=path, model="step 0")
    assert len(quiet(refuse, path=path).records) == 20  # who does not say which model gets the file's
    with pytest.raises(CourseError, match=message) as caught:
        quiet(refuse, path=path, **change)
    assert str(path) in str(caught.value) and "remove" in str(caught.value)
    assert len(EvalRun.load(path).records) == 20


def test_a_file_made_with_other_settings_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    run = quiet(double, path=path, settings={"max_tokens": 16, "stop": ("a", "b")})
    assert len({record["settings"] for record in run.records}) == 1
    for same in (None, {"stop": ["a", "b"], "max_tokens": 16}):
        assert quiet(refuse, path=path, settings=same) == run
    with pytest.raises(CourseError, match=r"a\.jsonl: made with other settings .*remove"):
        quiet(refuse, path=path, settings={"max_tokens": 512})
    EvalRun([{key: record[key] for key in KEYS} for record in run.records]).save(path)  # it does not say
    assert len(quiet(refuse, path=path, settings={"max_tokens": 512}).records) == 20


@pytest.mark.parametrize("bad", [{"temperature": float("nan")}, {"stop": {1}}, {(1, 2): 3}])
def test_settings_that_no_file_can_hold(bad):
    with pytest.raises(CourseError, match="settings must be what JSON can hold"):
        quiet(refuse, settings=bad)


def test_a_file_is_replaced_only_by_a_whole_one(tmp_path):
    path, partial = tmp_path / "a.jsonl", tmp_path / "a.jsonl.partial"
    quiet(double, path=path, model="step 0")
    old = path.read_bytes()
    for batches in (0, 2):
        interrupt(path, batches, batch_size=6, overwrite=True, model="step 1")
        assert path.read_bytes() == old and partial.exists() == bool(batches)
    asked = []

    def rest(prompts):
        asked.append(len(prompts))
        return double(prompts)

    run = quiet(rest, path=path, batch_size=6, overwrite=True, model="step 1")
    assert asked == [6, 2] and EvalRun.load(path) == run and {r["model"] for r in run.records} == {"step 1"}
    interrupt(path, 1, overwrite=True, batch_size=6, model="step 2")  # what another job left does not matter
    assert quiet(double, path=path, overwrite=True, model="step 3").records[0]["model"] == "step 3"
    assert not partial.exists()


def test_every_reader_sees_the_verdicts_of_one_grader(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"

    def mostly(prompts):
        return [Generation("", 0, False, error="HTTP 500") if " 7 " in p else double([p])[0] for p in prompts]

    def broken(*_):
        raise RecursionError("too deep")

    for grader in (lambda answer, gold: answer == "18", broken):
        with monkeypatch.context() as patch:  # a file and a journal by an older grader
            patch.setattr(answers, "same_value", grader)
            old = quiet(mostly, path=path)
            interrupt(tmp_path / "b.jsonl", 2, mostly, batch_size=6)
            assert old.summary()["accuracy"] <= 0.05
        stored = path.read_bytes()
        run = EvalRun.load(path)
        assert run == quiet(refuse, path=path) == quiet(mostly)
        assert run.summary()["accuracy"] == 0.95 and run.records[7]["error"] == "HTTP 500"
        assert path.read_bytes() == stored
        assert quiet(mostly, path=tmp_path / "b.jsonl", batch_size=6) == run
        path.unlink()
        (tmp_path / "b.jsonl").unlink()


def test_a_torn_file_is_not_a_finished_one(tmp_path):
    path = tmp_path / "before.jsonl"
    quiet(double, path=path)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(CourseError, match="19 records, 20 wanted"):
        quiet(refuse, path=path)


def test_as_many_samples_drawn_in_another_way_are_other_records(tmp_path):
    path = tmp_path / "a.jsonl"
    quiet(double, samples=4, path=path)
    with pytest.raises(CourseError, match="another way of sampling"):
        quiet(refuse, sampled=refuse, samples=3, path=path)


def test_a_file_from_before_the_new_fields_still_loads(tmp_path, root):
    path = tmp_path / "old.jsonl"
    for samples in (1, 3):
        records = [
            {key: value for key, value in record.items() if key not in ("solution", "greedy", "model")}
            for record in quiet(double, samples=samples).records
        ]
        EvalRun(records).save(path)
        run = EvalRun.load(path)
        assert {(r["greedy"], r["model"], r["solution"]) for r in run.records} == {(samples == 1, None, "")}
        old = EvalRun(records).summary()
        assert {key: run.summary()[key] for key in old} == old
        assert quiet(refuse, samples=samples, path=path, model="step 0") == run
    course = EvalRun.load(root / "assets" / "reference" / "course" / "evals" / "after.jsonl")
    assert course.summary()["n"] == 1000


# --- the journal: an evaluation that was stopped goes on ---


def interrupt(path, batches, generate=double, **options):
    """Leave an evaluation that was stopped after so many batches, by an exception."""
    left = iter(range(batches))

    def until(prompts, *, seed):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return generate(prompts, seed=seed) if generate is mixed else generate(prompts)

    with pytest.raises(KeyboardInterrupt):
        quiet(until, path=path, **options)


@pytest.mark.parametrize("batches", [0, 1, 9])
def test_an_interrupted_evaluation_asks_only_for_what_is_missing(tmp_path, batches):
    path, clean = tmp_path / "after.jsonl", tmp_path / "clean.jsonl"
    quiet(mixed, path=clean, batch_size=6, samples=3)
    interrupt(path, batches, mixed, batch_size=6, samples=3)
    assert not path.exists() and (tmp_path / "after.jsonl.partial").exists() == bool(batches)
    asked = []

    def rest(prompts, *, seed):
        asked.append(len(prompts))
        return mixed(prompts, seed=seed)

    run = quiet(rest, path=path, batch_size=6, samples=3)
    assert asked == [6] * (10 - batches)
    assert path.read_bytes() == clean.read_bytes()
    assert run == EvalRun.load(clean)
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["after.jsonl", "clean.jsonl"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"problems": PROBLEMS[:-1]}, "problems, prompts or samples"),
        ({"problems": [*PROBLEMS[:-1], problem(19, answer="1")]}, "problems, prompts or samples"),
        ({"render": str.upper}, "problems, prompts or samples"),
        ({"samples": 2}, "problems, prompts or samples"),
        ({"sampled": refuse}, "problems, prompts or samples"),
        ({"batch_size": 7}, "batch_size"),
        ({"model": "step 60"}, "model"),
        ({"settings": {"temperature": 0.7}}, "settings"),
    ],
)
def test_a_journal_of_something_else_is_refused(tmp_path, change, field):
    path = tmp_path / "a.jsonl"
    options = {"batch_size": 6, "model": "step 30", "settings": {"temperature": 1.0}}
    interrupt(path, 2, **options)
    before = (tmp_path / "a.jsonl.partial").read_bytes()
    with pytest.raises(CourseError, match=rf"a\.jsonl\.partial: .*\({field} differ\); remove it") as caught:
        quiet(refuse, path=path, **options | change)
    assert "\n" not in str(caught.value)
    assert (tmp_path / "a.jsonl.partial").read_bytes() == before
    assert len(quiet(double, path=path, **options).records) == 20


def test_settings_may_hold_tuples_and_the_evaluation_goes_on(tmp_path):
    options = {"batch_size": 6, "settings": {"stop": ("a", "b"), 1: None}}
    interrupt(tmp_path / "a.jsonl", 2, **options)
    assert len(quiet(double, path=tmp_path / "a.jsonl", **options).records) == 20


def test_what_finished_no_batch_does_not_hold_up_a_corrected_retry(tmp_path):
    path, partial = tmp_path / "a.jsonl", tmp_path / "a.jsonl.partial"
    interrupt(path, 1, batch_size=6, model="wrong")
    whole = partial.read_bytes()
    for cut in (0, 9, whole.index(b"\n"), whole.index(b"\n") + 1, len(whole) - 2):  # killed within the first batch
        partial.write_bytes(whole[:cut])
        interrupt(path, 2, batch_size=3, model="right")
        assert len(quiet(double, path=path, batch_size=3, model="right").records) == 20
        path.unlink()


def test_what_was_never_a_journal_is_refused(tmp_path):
    partial = tmp_path / "a.jsonl.partial"
    quiet(double).save(partial)  # what stood there in an earlier version of this library
    with pytest.raises(CourseError, match="not a journal of this version; remove it"):
        quiet(refuse, path=tmp_path / "a.jsonl")
    partial.unlink()
    interrupt(tmp_path / "a.jsonl", 2, batch_size=6)
    header, first, second = partial.read_text().splitlines(keepends=True)
    for lines, message in (
        ([header, first, "{}\n"], "line 3 is not a batch"),
        ([header, first, "nonsense\n", second], "line 3 is not JSON"),
        ([header, first.replace('"batch": 0', '"batch": 3'), second], "batch 3 holds other problems"),
        ([header, first.replace('"batch": 0', '"batch": -1'), second], "batch -1 holds other problems"),
        ([header, first.replace('"batch": 0', '"batch": 99'), second], "batch 99 holds other problems"),
    ):
        partial.write_text("".join(lines))
        with pytest.raises(CourseError, match=message):
            quiet(refuse, path=tmp_path / "a.jsonl", batch_size=6)


def test_a_kill_between_the_file_and_the_end_of_the_journal(tmp_path):
    path, partial = tmp_path / "a.jsonl", tmp_path / "a.jsonl.partial"
    interrupt(path, 3, batch_size=6)
    journal = partial.read_bytes()
    quiet(double, path=path, batch_size=6)
    partial.write_bytes(journal)
    finished = path.read_bytes()
    assert len(quiet(refuse, path=path, batch_size=6).records) == 20
    assert not partial.exists() and path.read_bytes() == finished


def test_a_kill_between_the_last_batch_and_the_file(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(EvalRun, "save", lambda *_: refuse(()))
        with pytest.raises(AssertionError):
            quiet(double, path=path)
    assert len(quiet(refuse, path=path).records) == 20


WILD = st.text(st.characters(codec=None), max_size=30) | st.sampled_from(["", "\n", "\r\u2028\x85", "\ud83d", '"}\n{"'])


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_journal_that_is_cut_anywhere_leads_to_the_same_records(tmp_path_factory, data):
    texts = data.draw(st.lists(WILD | st.just(say(4)), min_size=5, max_size=5))
    folder = tmp_path_factory.mktemp("cut")
    path, partial = folder / "a.jsonl", folder / "a.jsonl.partial"

    def generate(prompts):
        return [texts[int(prompt.split()[2])] for prompt in prompts]

    clean = quiet(generate, PROBLEMS[:5], path=folder / "clean.jsonl", batch_size=2)
    assert EvalRun.load(folder / "clean.jsonl") == clean  # what is returned is what is stored
    interrupt(path, 2, generate, problems=PROBLEMS[:5], batch_size=2)
    whole = partial.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    partial.write_bytes(whole[:cut])
    asked = []

    def rest(prompts):
        asked.append(len(prompts))
        return generate(prompts)

    assert quiet(rest, PROBLEMS[:5], path=path, batch_size=2) == clean
    assert path.read_bytes() == (folder / "clean.jsonl").read_bytes()
    # A line is whole when all of it but its line break is there.
    kept = sum(cut >= end - 1 for end in (i + 1 for i, byte in enumerate(whole) if byte == 10))
    assert len(asked) == 3 - max(0, kept - 1)


CHILD = """
import hashlib, os, sys, time
from grpo_lib.evaluation import Generation, evaluate
from grpo_lib.problems.types import Problem

path, log = sys.argv[1:]
problems = [Problem(f"p{i}", f"{i} and {i}" + "!" * (i % 9), "", str(2 * i), "test") for i in range(90)]

def answer(prompts, seed, what):
    with open(log, "a") as file:
        file.write(f"{what} {seed} {len(prompts)}\\n")
    time.sleep(0.005)
    digests = [hashlib.sha256(f"{prompt} {seed} {i}".encode()).digest() for i, prompt in enumerate(prompts)]
    said = [f"\\u2028<answer>{int(prompt.split()[0]) * (1 + d[0] % 2)}</answer>" for prompt, d in zip(prompts, digests)]
    return [Generation(text * (d[1] % 4), d[2], d[3] < 9) for text, d in zip(said, digests)]

evaluate(
    lambda prompts, seed: answer(prompts, seed, "greedy"), problems, path=path, batch_size=3, progress=False, samples=7,
    sampled=lambda prompts, seed: answer(prompts, seed, "sampled"), model="step 3",
)
"""  # fmt: skip


def test_twenty_kills_leave_the_records_of_one_clean_run(tmp_path):
    def start(name):
        command = [sys.executable, "-c", CHILD, str(tmp_path / f"{name}.jsonl"), str(tmp_path / f"{name}.log")]
        return subprocess.Popen(command, stderr=subprocess.PIPE)

    def asked(name):
        log = tmp_path / f"{name}.log"
        return log.read_text().splitlines() if log.exists() else []

    def finished():
        journal = tmp_path / "killed.jsonl.partial"
        return {line["batch"] for line in read_jsonl(journal)[1:]} if journal.exists() else set()

    clean = start("clean")
    assert clean.wait(timeout=60) == 0
    batches = asked("clean")
    assert len(batches) == len(set(batches)) == 240

    rng, kills, at_work, again = random.Random(0), 0, 0, 0
    while at_work < 20:
        before, known = len(asked("killed")), finished()
        child = start("killed")
        kills += 1
        if kills % 6:  # at a moment counted from the first batch that is asked for
            deadline = time.monotonic() + 60
            while len(asked("killed")) == before and child.poll() is None and time.monotonic() < deadline:
                time.sleep(0.002)
            time.sleep(rng.uniform(0, 0.06))
        else:  # at any moment
            time.sleep(rng.uniform(0, 0.4))
        child.kill()
        assert child.wait(timeout=60) == -signal.SIGKILL, child.stderr.read().decode()
        child.stderr.close()
        fresh = asked("killed")[before:]
        at_work += bool(fresh)
        again += sum(batches.index(line) in known for line in fresh)
        assert known <= finished()  # what was written down stays
    assert again == 0
    assert 0 < len(finished()) < 240 and not (tmp_path / "killed.jsonl").exists()

    known, before = finished(), len(asked("killed"))
    last = start("killed")
    assert last.wait(timeout=60) == 0
    assert asked("killed")[before:] == [line for number, line in enumerate(batches) if number not in known]
    # One batch at most was under way at each kill; nothing else was asked for more often than once.
    assert len(asked("killed")) <= 240 + kills
    assert (tmp_path / "killed.jsonl").read_bytes() == (tmp_path / "clean.jsonl").read_bytes()
    assert not (tmp_path / "killed.jsonl.partial").exists()


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
        *("before", "after", "difference", "difference_interval", "mcnemar_p", "mcnemar_mid_p"),
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
    assert summary["mcnemar_mid_p"] == pytest.approx(1 / 2**12)
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


def test_summarize_refuses_greedy_against_sampled():
    greedy, drawn, both = quiet(double), quiet(double, samples=4), quiet(double, sampled=double, samples=4)
    for before, after, message in (
        (greedy, drawn, "before is greedy and after sampled"),
        (drawn, greedy, "before is sampled and after greedy"),
        (drawn, both, "before is sampled and after greedy"),
    ):
        with pytest.raises(CourseError, match=message):
            summarize(before, after)
    assert summarize(greedy, both)["difference"] == summarize(drawn, drawn)["difference"] == 0


def test_the_bar_shows_the_running_accuracy(capsys):
    evaluate(double, PROBLEMS, label="before", batch_size=5)
    shown = capsys.readouterr().err
    assert "before" in shown and "100.0 % (83.9–100.0)" in shown and "20/20" in shown


def test_the_bar_starts_where_the_evaluation_was(tmp_path, capsys):
    interrupt(tmp_path / "a.jsonl", batches=3, batch_size=5)
    evaluate(double, PROBLEMS, path=tmp_path / "a.jsonl", batch_size=5)
    first = capsys.readouterr().err.split("\r")[1]
    assert "15/20" in first


def test_the_bar_counts_problems_and_not_samples(capsys):
    evaluate(double, PROBLEMS, samples=8)
    assert "100.0 % (83.9–100.0)" in capsys.readouterr().err


@pytest.mark.slow
def test_tunix_samples_what_the_seed_says_and_stays_greedy_without_a_temperature(tiny_recipe):
    from grpo_lib import pipeline
    from grpo_lib.problems import load_problems

    problems = load_problems(tiny_recipe.problems, "test", 12)
    greedy, render = pipeline.standalone_generate(tiny_recipe)
    sampled = functools.partial(greedy, temperature=1.0)
    prompts = [render(problem.question) for problem in problems]
    first = sampled(prompts, seed=1)
    assert sampled(prompts, seed=1) == first != sampled(prompts, seed=2)
    assert greedy(prompts, seed=1) == greedy(prompts, seed=2) != first
    twins = sampled(prompts[:1] * 12, seed=3)
    assert len({generation.text for generation in twins}) > 1  # samples of one problem differ
    run = quiet(greedy, problems, sampled=sampled, samples=4, render=render, batch_size=30)
    assert run.summary()["pass_at_k"]["4"] > run.summary()["pass_at_k"]["1"]


@pytest.mark.slow
def test_the_before_evaluation_is_written_once_and_read_after_training(tmp_path, tiny_recipe):
    from types import SimpleNamespace

    from grpo_lib import pipeline
    from grpo_lib.recipes import parse_recipe

    recipe = parse_recipe(tiny_recipe.model_dump() | {"problems": {"source": "words", "test": 20}})

    def session(step, generate):
        return SimpleNamespace(
            directory=tmp_path, recipe=recipe, step=step, generate=generate, render=str.upper, lead=lambda work: work()
        )

    def idle(prompts):
        return ["?"] * len(prompts)

    before = pipeline.evaluate(session(0, idle), "before", progress=False)
    assert {record["model"] for record in before.records} == {"step 0"}
    written = (tmp_path / "evals" / "before.jsonl").read_bytes()
    for step in (10, 30):  # resumed in the middle, and at the end
        assert pipeline.evaluate(session(step, refuse), "before", progress=False) == before
    with pytest.raises(CourseError, match="10 of 30 steps"):
        pipeline.evaluate(session(10, refuse), "after", progress=False)
    after = pipeline.evaluate(session(30, idle), "after", progress=False)
    assert {record["model"] for record in after.records} == {"step 30"}
    assert (tmp_path / "evals" / "before.jsonl").read_bytes() == written
