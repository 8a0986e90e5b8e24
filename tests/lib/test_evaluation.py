"""Every problem counts, the order does not, the baseline is computed once, and no batch is generated twice."""

import functools
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lib import answers, contamination, evaluation
from grpo_lib.common.errors import CourseError
from grpo_lib.common.files import read_jsonl, write_jsonl_atomic
from grpo_lib.evaluation import EvalRun, Generation, evaluate, summarize
from grpo_lib.problems.types import Problem
from grpo_lib.records import REQUIRED, reward_means
from grpo_lib.rewards import correct_answer, tidy_format
from grpo_lib.statistics import wilson_interval

KEYS = [
    *("id", "sample", "greedy", "model", "question", "solution", "prompt", "completion", "extracted", "gold"),
    "kind",
    *("strict", "lenient", "partial", "format", "truncated", "tokens", "error", "steps"),
]


def problem(i, answer=None):
    return Problem(
        id=f"p{i}",
        question=f"What is {i} plus {i}?" + " Take your time." * (i % 7),
        solution=f"{i}+{i}={2 * i}",
        answer=str(2 * i) if answer is None else answer,
        source="test",
        steps=i % 3,
    )


def tagged(answer, reasoning="so it is"):
    return f"<reasoning>{reasoning}</reasoning><answer>{answer}</answer>"


def double(prompts):
    """A model that is always right."""
    return [Generation(tagged(2 * int(prompt.split()[2])), 9, False) for prompt in prompts]


def refuse(prompts):
    raise AssertionError("generate was called")


PROBLEMS = [problem(i) for i in range(20)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "before.jsonl"


@pytest.fixture
def partial(path):
    """Where an evaluation keeps the batches that it has finished."""
    return path.with_name("before.jsonl.partial")


def quiet(generate, problems=PROBLEMS, **options):
    return evaluate(generate, problems, progress=False, **options)


# --- records ---


def test_a_record_holds_everything_and_records_stand_in_problem_order():
    run = quiet(double, batch_size=6)
    assert [record["id"] for record in run.records] == [p.id for p in PROBLEMS]
    assert all(list(record) == KEYS for record in run.records)
    assert run.records[9].items() >= {
        "gold": "18", "extracted": "18", "solution": "9+9=18", "steps": 0, "greedy": True, "model": None,
        "tokens": 9, "truncated": False, "error": None, **dict.fromkeys(evaluation.VERDICTS, True),
    }.items()  # fmt: skip
    assert quiet(double, model="step 7").records[9] == run.records[9] | {"model": "step 7"}


def test_the_record_keeps_what_was_sent(path):
    class Chat:
        def __call__(self, prompts):
            return double(prompts)

        def sent(self, prompt, task):
            return f"{task} {prompt}"

    run = quiet(Chat(), path=path)
    assert run.records[1]["prompt"] == "('p1', 0) What is 1 plus 1? Take your time."
    assert quiet(Chat(), path=path) == run


def test_verdicts_are_separate():
    completions = {
        "p5": tagged(10),  # right
        "p6": "it is 12",  # right without the tags
        "p7": tagged("14.5"),  # within 10 %
        "p8": f" {tagged(16)}\n",  # right, format off by white space
        "p9": "",
    }
    run = quiet(lambda prompts: [completions[f"p{prompt.split()[2]}"] for prompt in prompts], PROBLEMS[5:10])
    assert [tuple(record[name] for name in evaluation.VERDICTS) for record in run.records] == [
        (True, True, True, True),
        (False, True, False, False),
        (False, False, True, True),
        (True, True, True, False),
        (False, False, False, False),
    ]
    assert run.summary().items() >= {
        "accuracy": 0.4, "lenient_accuracy": 0.6, "partial_accuracy": 0.6, "format_accuracy": 0.4, "n": 5
    }.items()  # fmt: skip


def test_a_completion_that_breaks_the_grader_counts_as_wrong(monkeypatch):
    def fragile(answer, gold):
        if gold == "6":
            raise RecursionError("too deep")
        return answer == gold

    monkeypatch.setattr(answers, "same_value", fragile)
    run = quiet(double)
    assert run.records[3]["error"] == "the grader raised RecursionError: too deep"
    assert not any(run.records[3][name] for name in evaluation.VERDICTS)
    assert [value for key, value in run.summary().items() if key.endswith("accuracy")] == [0.95] * 4


def test_a_failure_counts_as_wrong_whatever_its_text():
    """A server may fail after half of a right answer."""
    run = quiet(lambda prompts: [Generation(double([p])[0].text, None, True, error="HTTP 400") for p in prompts])
    assert (run.summary()["accuracy"], run.summary()["lenient_accuracy"], run.summary()["n"]) == (0, 0, 20)
    assert (run.records[9]["error"], run.records[9]["completion"]) == ("HTTP 400", tagged(18))
    run = quiet(lambda prompts: [None] * len(prompts))
    assert run.summary()["accuracy"] == 0
    assert run.summary()["n"] == 20
    assert "NoneType" in run.records[0]["error"]


def mixed(prompts, *, seed):
    """Right, wrong, or nothing: as the seed and the place in the batch have it."""
    rng = random.Random(seed)
    return [rng.choice([tagged(2 * int(prompt.split()[2])), tagged(1_000_000), "I do not know"]) for prompt in prompts]


def test_greedy_and_sampled_in_one_run(path):
    run = quiet(double, sampled=mixed, samples=6, path=path, batch_size=15)
    assert [(r["id"], r["sample"], r["greedy"]) for r in run.records[:8]] == [
        *[("p0", sample, sample == 0) for sample in range(7)],
        ("p1", 0, True),
    ]
    assert EvalRun.load(path) == run == quiet(refuse, sampled=refuse, samples=6, path=path)

    summary = run.summary()
    assert (summary["accuracy"], summary["n"], summary["samples"]) == (1.0, 20, 6)
    right = [sum(r["strict"] for r in run.records if r["id"] == p.id and not r["greedy"]) for p in PROBLEMS]
    assert 0 < sum(right) < 120
    assert summary["sampled_accuracy"] == summary["pass_at_k"]["1"] == pytest.approx(sum(right) / 120)
    assert summary["pass_at_k"]["6"] == sum(c > 0 for c in right) / 20


def test_each_problem_is_graded_by_its_own_grader(path):
    cases = {
        "q1": ("Answer: 033", "33", "integer"),
        "q2": (r"so \boxed{\frac{1}{2}}", r"\dfrac12", "latex"),
        "q3": (tagged(7), "7", "tagged"),
        "q4": ("Answer: 7, or 8", "8", "integer"),
    }
    problems = [Problem(q, q, "", gold, "test", kind=by) for q, (_, gold, by) in cases.items()]
    run = quiet(lambda prompts: [cases[prompt][0] for prompt in prompts], problems, path=path)
    assert [tuple(record[name] for name in evaluation.VERDICTS) for record in run.records] == [
        *[(True, True, True, True)] * 3,
        (False, True, False, False),  # it ends in its number
    ]
    assert EvalRun.load(path) == run  # graded again by the same graders


def test_samples_of_latex_vote_by_their_text():
    answers = iter([r"\boxed{x+1}", r"\boxed{2}", r"\boxed{x+1}"])
    problem = Problem("p", "q", "", "1+x", "test", kind="latex")
    summary = quiet(lambda prompts: [next(answers) for _ in prompts], [problem], samples=3).summary()
    assert summary["maj_at_k"] == 1
    assert summary["pass_at_k"]["1"] == pytest.approx(2 / 3)
    low, high = summary["pass_at_k_interval"]["1"]
    assert 0 <= low < 2 / 3 < high <= 1


def test_the_seed_is_that_of_the_batch_and_the_longest_prompts_come_first():
    batches = []

    def record(prompts, *, seed):
        batches.append((seed, [len(prompt) for prompt in prompts]))
        return double(prompts)

    for _ in ("once", "again"):
        quiet(record, samples=4, batch_size=30)
    assert batches[:3] == batches[3:]
    seeds, lengths = zip(*batches[:3], strict=True)
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert [len(batch) for batch in lengths] == [30, 30, 20]
    in_order = [length for batch in lengths for length in batch]
    assert in_order == sorted(in_order, reverse=True)


def test_a_generate_gets_the_keywords_that_it_has():
    def with_tasks(prompts, tasks):
        return [Generation(tagged(2 * int(key[1:])), sample, False) for key, sample in tasks]

    run = quiet(with_tasks, samples=3, batch_size=7)
    assert run.summary()["accuracy"] == 1
    assert [record["tokens"] for record in run.records] == [0, 1, 2] * 20

    def with_anything(prompts, **options):
        assert not options
        return double(prompts)

    assert quiet(with_anything) == quiet(double)


# --- what evaluate refuses ---


@pytest.mark.parametrize(
    ("completions", "options", "message"),
    [
        ([], {}, "0 completions for 20 prompts"),
        (["a"], {}, "1 completions for 20 prompts"),
        (["a"] * 21, {}, "21 completions for 20 prompts"),
        ([], {"problems": []}, "no problems"),
        (["a"] * 2, {"problems": [problem(1), problem(1)]}, "same id"),
        ([], {"batch_size": 0}, "batch_size"),
    ],
)
def test_what_evaluate_refuses(completions, options, message):
    with pytest.raises(CourseError, match=message):
        quiet(lambda prompts: completions, **options)


# --- files: the baseline once ---


def test_a_finished_file_is_loaded_and_nothing_is_generated(tmp_path):
    path = tmp_path / "evals" / "before.jsonl"
    first = quiet(double, path=path)
    assert len(path.read_text().splitlines()) == 20
    assert quiet(refuse, path=path) == first == EvalRun.load(path)
    # The order of the problems is the caller's, not the file's.
    assert quiet(refuse, PROBLEMS[::-1], path=path).records == first.records[::-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"problems": PROBLEMS[:-1]}, "other problems"),
        ({"problems": [*PROBLEMS[:-1], problem(19, answer="1")]}, "gold of problem p19 is '38', not '1'"),
        ({"samples": 1, "sampled": refuse}, "number of samples"),
        ({"model": "step 30"}, "model of problem p0 is 'step 0', not 'step 30'"),
        ({"render": lambda question: f"Now: {question}"}, "prompt of problem p0"),
        ({"settings": {"max_tokens": 512}}, "settings of problem p0"),
    ],
)
def test_a_file_of_another_evaluation_is_refused(path, change, message):
    run = quiet(double, path=path, model="step 0", settings={"max_tokens": 16, "stop": ("a", "b")})
    # Who does not say which model and which settings gets the file's.
    assert quiet(refuse, path=path) == run == quiet(refuse, path=path, settings={"stop": ["a", "b"], "max_tokens": 16})
    with pytest.raises(CourseError, match=message) as caught:
        quiet(refuse, path=path, **change)
    assert str(path) in str(caught.value)
    assert EvalRun.load(path) == run


def test_a_file_is_replaced_only_by_a_whole_one(path, partial):
    quiet(double, path=path, model="step 0")
    old = path.read_bytes()
    for batches in (0, 2):
        interrupt(path, batches, batch_size=6, overwrite=True, model="step 1")
        assert path.read_bytes() == old
        assert partial.exists()
    asked = []

    def rest(prompts):
        asked.append(len(prompts))
        return double(prompts)

    run = quiet(rest, path=path, batch_size=6, overwrite=True, model="step 1")
    assert asked == [6, 2]
    assert EvalRun.load(path) == run
    assert {r["model"] for r in run.records} == {"step 1"}
    interrupt(path, 1, overwrite=True, batch_size=6, model="step 2")  # a partial file of another evaluation
    assert quiet(double, path=path, overwrite=True, model="step 3").records[0]["model"] == "step 3"
    assert not partial.exists()


def broken_grader(*_):
    raise RecursionError("too deep")


@pytest.mark.parametrize("grader", [lambda answer, gold: answer == "18", broken_grader])
def test_every_reader_sees_the_verdicts_of_one_grader(path, tmp_path, monkeypatch, grader):
    def mostly(prompts):
        return [Generation("", 0, False, error="HTTP 500") if " 7 " in p else double([p])[0] for p in prompts]

    with monkeypatch.context() as patch:  # a file and a partial file by an older grader
        patch.setattr(answers, "same_value", grader)
        assert quiet(mostly, path=path).summary()["accuracy"] <= 0.05
        interrupt(tmp_path / "b.jsonl", 2, mostly, batch_size=6)
    stored = path.read_bytes()
    run = EvalRun.load(path)
    assert run == quiet(refuse, path=path) == quiet(mostly)
    assert run.summary()["accuracy"] == 0.95
    assert run.records[7]["error"] == "HTTP 500"
    assert path.read_bytes() == stored
    assert quiet(mostly, path=tmp_path / "b.jsonl", batch_size=6) == run


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("", "has no records"),
        ('{"id": "p0", "sample": 0}\n', "record 1 lacks greedy"),
        (json.dumps(dict.fromkeys(REQUIRED)), "record 1 has id None"),
    ],
)
def test_a_foreign_file_is_not_an_evaluation(path, text, message):
    if text is not None:
        path.write_text(text)
    with pytest.raises(CourseError, match=rf"before\.jsonl: {message}"):
        EvalRun.load(path)


def test_a_torn_file_is_not_a_finished_one(path):
    quiet(double, samples=4, path=path)
    with pytest.raises(CourseError, match="greedy of problem p0 is False, not True"):
        quiet(refuse, sampled=refuse, samples=3, path=path)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(CourseError, match=r"before\.jsonl: the last line is not whole"):
        quiet(refuse, samples=4, path=path)


# --- an evaluation that was interrupted goes on ---


def interrupt(path, batches, generate=double, **options):
    """Leave an evaluation that was stopped after so many batches, by an exception."""
    left = iter(range(batches))

    @functools.wraps(generate)
    def until(prompts, **keywords):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return generate(prompts, **keywords)

    with pytest.raises(KeyboardInterrupt):
        quiet(until, path=path, **options)


def test_a_kill_just_before_or_after_the_file_is_written(path, partial, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(EvalRun, "save", lambda *_: refuse(()))
        with pytest.raises(AssertionError):
            quiet(double, path=path)
    left = partial.read_bytes()
    assert len(quiet(refuse, path=path).records) == 20
    partial.write_bytes(left)
    finished = path.read_bytes()
    assert len(quiet(refuse, path=path).records) == 20
    assert not partial.exists()
    assert path.read_bytes() == finished


@pytest.mark.parametrize("size", [2, 5, 50])
def test_it_goes_on_with_batches_of_another_size(path, tmp_path, size):
    """As after an evaluation that ran out of memory: what is answered is kept, each problem has one record."""
    asked = []

    def rest(prompts):
        asked.append(len(prompts))
        return double(prompts)

    interrupt(path, 2, batch_size=6)
    run = quiet(rest, path=path, batch_size=size)
    assert sum(asked) == 20 - 12
    assert max(asked) == min(size, 8)
    assert run == quiet(double, path=tmp_path / "whole.jsonl", batch_size=6)


def test_the_seconds_of_an_interrupted_evaluation_add_up(path, partial):
    """A second run has those of the batches that the first one finished."""
    interrupt(path, 2, batch_size=6)
    head, *batches = read_jsonl(partial)
    assert len(batches) == 2
    assert all(batch["seconds"] > 0 for batch in batches)
    write_jsonl_atomic(partial, [head, *(batch | {"seconds": 1000.0} for batch in batches)])
    assert 2000 < quiet(double, path=path, batch_size=6).seconds < 2100
    assert quiet(refuse, path=path, batch_size=6).seconds is None  # only read


WILD = st.text(st.characters(codec=None), max_size=30) | st.sampled_from(["", "\n", "\r\u2028\x85", "\ud83d", '"}\n{"'])


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_partial_file_that_is_cut_anywhere_leads_to_the_same_records(tmp_path_factory, data):
    texts = data.draw(st.lists(WILD | st.just(tagged(4)), min_size=5, max_size=5))
    samples = data.draw(st.integers(1, 3))
    folder = tmp_path_factory.mktemp("cut")
    path, partial = folder / "a.jsonl", folder / "a.jsonl.partial"

    def generate(prompts, *, seed):
        return [texts[(int(prompt.split()[2]) + seed) % 5] for prompt in prompts]

    clean = quiet(generate, PROBLEMS[:5], path=folder / "clean.jsonl", batch_size=2, samples=samples)
    assert EvalRun.load(folder / "clean.jsonl") == clean  # what is returned is what is stored
    interrupt(path, 2, generate, problems=PROBLEMS[:5], batch_size=2, samples=samples)
    whole = partial.read_bytes()
    cut = data.draw(st.integers(0, 10_000)) % (len(whole) + 1)  # the length varies with the digits of the seconds
    partial.write_bytes(whole[:cut])
    asked = []

    def rest(prompts, *, seed):
        asked.append(len(prompts))
        return generate(prompts, seed=seed)

    assert quiet(rest, PROBLEMS[:5], path=path, batch_size=2, samples=samples) == clean
    assert path.read_bytes() == (folder / "clean.jsonl").read_bytes()
    # A line is whole when all of it but its line break is there.
    kept = sum(cut >= end - 1 for end in (i + 1 for i, byte in enumerate(whole) if byte == 10))
    assert len(asked) == -(-5 * samples // 2) - max(0, kept - 1)


# --- the summary ---


def test_summarize_has_exactly_the_keys_of_summary_json():
    def worse(prompts):
        return [Generation("no idea", 3, True) if int(p.split()[2]) < 12 else double([p])[0] for p in prompts]

    times = {"wall_seconds": 12.5, "train_seconds": 10.0, "steps": 3}
    summary = summarize(quiet(worse), quiet(double), **times, base=quiet(worse))
    assert summary.pop("cold_start")["difference"] == 0
    low, high = summary.pop("difference_interval")
    assert 0.3 < low < 0.6 < high < 0.9
    eight_of_twenty = {
        "accuracy": 0.4,
        "lenient_accuracy": 0.4,
        "partial_accuracy": 0.4,
        "format_accuracy": 0.4,
        "n": 20,
        "interval": list(wilson_interval(8, 20)),
        "truncated": 0.6,
    }
    assert summary == {
        "before": eight_of_twenty,
        "after": quiet(double).summary(),
        "difference": pytest.approx(0.6),
        "mcnemar_p": pytest.approx(2 / 2**12),
        "mcnemar_mid_p": pytest.approx(1 / 2**12),
        **times,
    }


def test_summarize_pairs_by_id_and_not_by_position():
    def some(prompts):
        return [tagged(0) if int(p.split()[2]) % 3 else double([p])[0] for p in prompts]

    summary = summarize(quiet(some), quiet(some, PROBLEMS[::-1]))
    assert (summary["difference_interval"], summary["mcnemar_p"]) == ([0, 0], 1.0)


def test_summarize_refuses_what_cannot_be_compared():
    greedy = quiet(double)
    drawn = quiet(double, samples=4)
    both = quiet(double, sampled=double, samples=4)
    one_less = quiet(double, PROBLEMS[:-1])
    another_gold = quiet(double, [*PROBLEMS[:-1], problem(19, answer="7")])
    for before, after, message in (
        (greedy, one_less, "19"),
        (greedy, another_gold, "19"),
        (greedy, drawn, "greedy.*sampled"),
        (drawn, both, "sampled.*greedy"),
    ):
        with pytest.raises(CourseError, match=message):
            summarize(before, after)
    several = summarize(drawn, drawn)
    assert several["mcnemar_p"] is None
    assert several["difference"] == 0
    assert summarize(greedy, both)["difference"] == 0


@pytest.mark.slow
def test_the_before_evaluation_is_written_once_and_read_after_training(tmp_path, tiny_recipe):
    from types import SimpleNamespace

    from grpo_train import pipeline
    from grpo_train.recipes import parse_recipe

    recipe = parse_recipe(
        tiny_recipe.model_dump() | {"problems": {"source": "words", "test": 20}, "training": {"steps": 30}}
    )

    def evaluated(step, which, generate=refuse):
        fields = {"directory": tmp_path, "recipe": recipe, "render": str.upper, "run_on_main": lambda work: work()}
        return pipeline.evaluate(SimpleNamespace(step=step, generate=generate, **fields), which, progress=False)

    def idle(prompts):
        return ["?"] * len(prompts)

    before = evaluated(0, "before", idle)
    assert {record["model"] for record in before.records} == {"step 0"}
    assert evaluated(10, "before") == evaluated(30, "before") == before  # resumed in the middle, and at the end
    with pytest.raises(CourseError, match="10 of 30 steps"):
        evaluated(10, "after")
    after = evaluated(30, "after", idle)
    assert {record["model"] for record in after.records} == {"step 30"}
    rewards = {f"rewards/{name}/mean": 0.0 for name in recipe.rewards}
    logged = {"step": 0, "accuracy": 0.0, "reward": 0.0, "seconds": before.seconds} | rewards
    assert json.loads((tmp_path / "evals/before.json").read_text()) == {"seconds": before.seconds, "logged": logged}

    write_jsonl_atomic(tmp_path / "metrics.jsonl", [{"step": 30, "seconds": 1.5}])
    summary = pipeline.write_summary(recipe, tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert [summary["before"], summary["after"]] == [
        run.summary() | {"reward": 0.0, "rewards": dict.fromkeys(recipe.rewards, 0.0), "seconds": run.seconds}
        for run in (before, after)
    ]
    (tmp_path / "evals" / "after.json").unlink()  # as version 0.1 left it
    assert pipeline.write_summary(recipe, tmp_path)["after"]["seconds"] is None
    assert evaluated(30, "after") == after


def test_reward_means_are_of_each_function_and_by_the_kind_of_the_record():
    said = {"tagged": tagged(33), "integer": "Answer: 33", "latex": "no idea"}
    run = quiet(
        lambda prompts: [said[prompt] for prompt in prompts],
        [Problem(kind, kind, "", "33", "test", kind=kind) for kind in said],
    )
    assert reward_means(run.counted, [correct_answer]) == [pytest.approx(2 / 3)]
    assert reward_means(run.counted[:1], [correct_answer, tidy_format]) == [1.0, 0.1]


# --- has it seen the questions? ---


def test_who_knows_a_question_completes_it():
    """One model knows every other question by heart; of each remaining one it has the next word, and then none."""
    known = {" ".join(p.question.split()): number % 2 == 0 for number, p in enumerate(PROBLEMS)}

    def goes_on(prompts):
        for prompt in prompts:
            question = next(each for each in known if each.startswith(prompt))
            rest = question.removeprefix(prompt).split()
            yield Generation(" ".join(rest if known[question] else [*rest[:1], "or", *rest[1:]]) + " So:", 9, False)

    asked = contamination.partial_prompts(PROBLEMS)
    found = contamination.summary(quiet(lambda prompts: list(goes_on(prompts)), asked))
    assert found["n"] == 20
    assert found["exact"] == 0.5
    assert found["interval"][0] < 0.5 < found["interval"][1]
    assert found["words"] == pytest.approx((10 + sum(1 / len(p.solution.split()) for p in asked[1::2])) / 20)
    assert contamination.summary(quiet(lambda prompts: [""] * len(prompts), asked))["words"] == 0


@given(st.text(st.characters(), min_size=1).filter(lambda text: text.split()), st.floats(0.1, 0.6))
def test_a_question_is_cut_between_words_and_something_is_left(text, share):
    (half,) = contamination.partial_prompts([Problem("p", text, "1", "1", "test")], share)
    assert [*half.question.split(), *half.solution.split()] == text.split()
    assert half.solution
