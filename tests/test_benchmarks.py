"""The benchmarks and the experiments: what they count, and that they start."""

import argparse
import collections
import importlib
import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from grpo_lib import analysis, plain_grpo
from grpo_lib.problems import batch_of_step, load_problems, take_different, words
from grpo_train.recipes import load_recipe

# isort: split

import jax
import jax.numpy as jnp

DEV = Path(__file__).resolve().parents[1] / "dev"
FOLDERS = ("benchmarks", "experiments")


@pytest.fixture(scope="module")
def program():
    """A program as a module, by its name; a folder's modules import each other by name, as they do when run."""
    before = list(sys.path)
    sys.path[:0] = [str(DEV / folder) for folder in FOLDERS]
    yield importlib.import_module
    sys.path[:] = before


@pytest.mark.parametrize("name", sorted(path.stem for folder in FOLDERS for path in (DEV / folder).glob("*.py")))
def test_every_program_imports_what_is_there(program, name) -> None:
    program(name)


# --- the experiments ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(program):
    return program("run")


@pytest.fixture(scope="module")
def judge(program):
    return program("judge")


@pytest.fixture(scope="module")
def records(root):
    """{name: record} of assets/experiments."""
    files = sorted((root / "assets" / "experiments").glob("*.json"))
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}


@pytest.mark.parametrize(
    ("kind", "bar", "one", "other", "held"),
    [
        # Seeds differ by far more than the arms do: only pairs can tell.
        ("above", 0.05, [0.16, 0.57, 0.96], [0.1, 0.5, 0.9], True),
        ("above", 0.07, [0.16, 0.57, 0.96], [0.1, 0.5, 0.9], False),
        ("above", 0.0, [0.2, 0.4, 0.9], [0.1, 0.5, 0.8], False),  # an interval with 0 in it
        ("zero", 0.0, [0.2, 0.4, 0.9], [0.1, 0.5, 0.8], True),
        ("within", 0.02, [0.5, 0.52], [0.51, 0.5], True),
        ("at most", 0.02, [0.1, 0.5], [0.3, 0.3], True),
        ("at most", 0.02, [0.33, 0.3], [0.3, 0.3], True),
        ("at most", 0.02, [0.36, 0.3], [0.3, 0.3], False),
        ("half", 0.5, [0.1, 0.2], [0.2, 0.5], True),
        ("half", 0.4, [0.1, 0.2], [0.2, 0.4], False),
    ],
)
def test_a_claim_is_judged_by_pairs_of_seeds(judge, kind, bar, one, other, held):
    runs = [
        {"seed": seed, "arm": arm, "accuracy": value}
        for arm, values in (("a", one), ("b", other))
        for seed, value in reversed(list(enumerate(values)))
    ]
    assert judge.judge(judge.Claim("it", "a", "b", "accuracy", kind, bar), runs)["held"] == held


PREDICTED: set[str] = set()  # and not run yet: these have no record


def test_the_records_are_of_the_experiments_and_arms_as_they_stand(run, records):
    recorded = {name: (record["question"], record["changes"], record["arms"]) for name, record in records.items()}
    written = {name: (each.question, each.changes, each.arms) for name, each in run.EXPERIMENTS.items()}
    assert recorded == {name: facts for name, facts in written.items() if name not in PREDICTED}


def test_the_records_are_of_the_predictions_as_they_stand(run, records):
    for name, record in records.items():
        experiment = run.EXPERIMENTS[name]
        judged = run.judged(experiment, record["runs"])
        for saved, claim, again in zip(record["claims"], experiment.claims, judged, strict=True):
            assert saved.items() >= vars(claim).items()
            assert saved["held"] == again["held"]
            assert saved["mean"] == pytest.approx(again["mean"])


def test_the_records_have_every_step_of_every_arm_and_seed(program, run, records):
    untrained = program("arms").UNTRAINED
    for name, record in records.items():
        fewer, all_arms = run.EXPERIMENTS[name].seeds, 3 if name == "real" else 5
        expected = [(arm, seed) for arm in record["arms"] for seed in range(fewer.get(arm, all_arms))]
        assert sorted((done["arm"], done["seed"]) for done in record["runs"]) == sorted(expected)
        for done in record["runs"]:
            changes = [*record["changes"], *record["arms"][done["arm"]]]
            recipe = load_recipe(run.EXPERIMENTS[name].recipe_path, changes)
            steps = 0 if done["arm"] in untrained else recipe.training.steps
            assert len(done["validation"]) == steps


def test_an_experiment_names_functions_and_arms_that_there_are(run):
    for name, experiment in run.EXPERIMENTS.items():
        assert experiment.before in ("", *run.BEFORE), name
        assert experiment.after in ("", *run.AFTER), name
        assert experiment.across in ("", *run.ACROSS), name
        assert experiment.tested in run.TESTS, name
        assert experiment.seeds.keys() | experiment.samples.keys() <= set(experiment.arms), name
        for claim in experiment.claims:
            assert {claim.one, claim.other} <= set(experiment.arms), name


def test_a_claim_is_judged_by_the_seeds_that_both_arms_have(judge):
    values = {"a": [0.3, 0.4, 0.5, 0.9, 0.9], "b": [0.1, 0.2, 0.3]}
    runs = [
        {"seed": seed, "arm": arm, "accuracy": value}
        for arm, of_arm in values.items()
        for seed, value in enumerate(of_arm)
    ]
    judged = judge.judge(judge.Claim("it", "a", "b", "accuracy", "above", 0.1), runs)
    assert judged["values"] == {"a": [0.3, 0.4, 0.5], "b": [0.1, 0.2, 0.3]}
    assert judged["mean"] == pytest.approx(0.2)


def test_the_problems_of_the_blind_experiment_are_none_of_seed_0(run):
    experiment = run.EXPERIMENTS["real-blind"]
    recipe = run.recipe_of(experiment, "maxrl", seed=3)
    tested = {problem.question for problem in run.TESTS[experiment.tested](recipe)}
    assert len(tested) == 250
    assert not tested & {problem.question for problem in words.generate("test", 1000)}
    assert {words.split_of(question) for question in tested} == {"test"}


def test_what_training_met_of_the_blind_problems_is_what_the_results_say(root, run):
    """Of each seed: the problems whose calculations, and those whose working, stand in the problems trained on."""
    experiment = run.EXPERIMENTS["real-blind"]
    calculated, worked = [], []
    for seed in range(5):
        recipe = run.recipe_of(experiment, "maxrl", seed)
        taught, others = take_different(load_problems(recipe.problems, "train"), recipe.training.cold_start)
        solution_of = {problem.question: problem.solution for problem in others}
        batch = batch_of_step(others, str, recipe.plan.prompts_per_step, recipe.seed)
        sampled = [question for step in range(recipe.training.steps) for question in batch(step)["prompts"]]
        met = {problem.solution for problem in taught} | {solution_of[question] for question in sampled}
        results = {one for solution in met for one in analysis.simple_calculations(solution)}
        tested = [problem.solution for problem in run.TESTS[experiment.tested](recipe)]
        calculated.append(100 * fmean(results.issuperset(analysis.simple_calculations(one)) for one in tested))
        worked.append(100 * fmean(solution in met for solution in tested))
    text = (root / "docs" / "results.md").read_text(encoding="utf-8")
    assert f"All calculations of {min(calculated):.0f} to {max(calculated):.0f} % of the 250 problems" in text
    assert f"the whole working of {min(worked):.0f} to {max(worked):.0f} %" in text


def test_each_arm_of_the_blind_experiment_has_its_seeds(run):
    arms = collections.Counter(arm for _, arm in run.planned(run.EXPERIMENTS["real-blind"], 5))
    assert {arm for arm, seeds in arms.items() if seeds == 5} == {"start", "grpo", "maxrl", "imitation"}
    assert {seeds for arm, seeds in arms.items()} == {3, 5}


STAND_IN = """
tiny:
  question: does it go on after a kill?
  changes: [training.steps=1, training.cold_start=16, training.prompts_per_step=2, "rewards=[correct_answer]",
    problems.test=16, problems.validation=16, problems.train=64]
  before: toss_anew
  tested: unseen
  arms: {start: [], imitation: [], maxrl: [grpo.advantage=maxrl]}
  samples: {start: 2}
  seeds: {maxrl: 1}
  claims: []
"""


@pytest.fixture
def tiny(program, run, tmp_path, monkeypatch):
    """An experiment of two seeds and three arms, called tiny."""
    file = tmp_path / "tiny.yaml"
    file.write_text(STAND_IN, encoding="utf-8")
    experiment = program("experiment").read_experiments(file)["tiny"]
    monkeypatch.setitem(run.EXPERIMENTS, "tiny", experiment)
    return experiment


def killed_at(count, run_arm, asked):
    """`run_arm` that is interrupted at its call of this number; `asked` gets the arms."""

    def run_or_kill(experiment, arm, recipe):
        asked.append(arm)
        if len(asked) == count:
            raise KeyboardInterrupt
        return run_arm(experiment, arm, recipe)

    return run_or_kill


def test_an_experiment_that_was_killed_goes_on_from_its_file(run, tiny, tmp_path, monkeypatch):
    asked = []

    def stand_in(experiment, arm, recipe):
        accuracy = recipe.training.steps / 3 + recipe.seed + len(arm)
        return {"seed": recipe.seed, "arm": arm, "accuracy": accuracy, "seconds": 1.0}

    monkeypatch.setattr(run, "run_arm", stand_in)
    whole = run.all_runs("tiny", 2, None, tmp_path / "whole")
    seeds_and_arms = [(0, "start"), (0, "imitation"), (0, "maxrl"), (1, "start"), (1, "imitation")]
    assert [(each["seed"], each["arm"]) for each in whole] == seeds_and_arms

    monkeypatch.setattr(run, "run_arm", killed_at(3, stand_in, asked))
    with pytest.raises(KeyboardInterrupt):
        run.all_runs("tiny", 2, None, tmp_path / "killed")
    with open(tmp_path / "killed" / "tiny.jsonl", "a", encoding="utf-8") as file:
        file.write('{"settings": "maxrl 0 1234')  # and so it is cut off in the middle of a line
    assert run.all_runs("tiny", 2, None, tmp_path / "killed") == whole
    assert asked == ["start", "imitation", "maxrl", "maxrl", "start", "imitation"]  # what was finished is not run again

    # An arm whose recipe changes is run again; the others are kept.
    tiny.arms["maxrl"].append("training.steps=2")
    run.all_runs("tiny", 2, None, tmp_path / "killed")
    assert asked[6:] == ["maxrl"]


@pytest.mark.nightly
def test_a_killed_experiment_with_a_model_ends_as_a_whole_one(program, run, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(program("imitation"), "RATES", (1e-4, 3e-4))
    whole = run.all_runs("tiny", 1, None, tmp_path / "whole")
    assert whole[0]["maj@2"] <= whole[0]["pass@2"]
    assert whole[1]["dose"] == whole[1]["updates"] * whole[1]["rate"] > 0
    assert 0 < whole[2]["dose"] < 1e-2

    monkeypatch.setattr(run, "run_arm", killed_at(2, run.run_arm, []))
    with pytest.raises(KeyboardInterrupt):
        run.all_runs("tiny", 1, None, tmp_path / "killed")
    resumed = run.all_runs("tiny", 1, None, tmp_path / "killed")
    for one, other in zip(whole, resumed, strict=True):
        assert one | {"seconds": 0} == other | {"seconds": 0}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        # YAML's off is a truth value: it needs quotes.
        ("a: {question: why, arms: {off: []}, claims: []}", "input_value=False"),
        ("a: {question: why, arms: {}, claims: [], befor: fall}", "a.befor"),
    ],
)
def test_an_experiment_that_is_written_wrong_is_refused(program, tmp_path, text, wrong):
    file = tmp_path / "group.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=wrong):
        program("experiment").read_experiments(file)


# --- another checkout beside this one, in step_time.py ------------------------------------------------------------


@pytest.fixture
def other_checkout(tmp_path):
    """A checkout whose programs write the job that is in its file `own.json`, and say where they run."""
    folder = tmp_path / "other" / "benchmarks"  # where it was before it moved to dev
    folder.mkdir(parents=True)
    (folder / "step_time.py").write_text(
        "import pathlib, sys\n"
        "pathlib.Path('said').write_text(' '.join(sys.argv[1:-2]))\n"
        "print(pathlib.Path(sys.argv[-1]).write_text(pathlib.Path('own.json').read_text()))\n",
        encoding="utf-8",
    )
    (folder / "course_grpo.py").write_text(
        "import json, os, pathlib\n"
        "first = os.environ['PYTHONPATH'].split(os.pathsep)[0]\n"
        "print(json.dumps([pathlib.Path('said').read_text(), os.getcwd(), first]))\n",
        encoding="utf-8",
    )
    return tmp_path / "other"


def job_of(program, **changes):
    sections = {"grpo": {"group_size": 8}, "rollout": {"max_completion_length": 24}, "model": {"dtype": "float32"}}
    values = {"model": "m", "checkpoint": "c", "recipe": sections, "max_prompt_length": 9} | changes
    return program("job").Job(**({"prompts": [["2 + 2?"]], "answers": [["4"]]} | values))


def test_another_checkout_writes_its_own_job_and_trains_with_its_own_packages(program, tmp_path, other_checkout):
    step_time = program("step_time")
    own = job_of(program)
    job_of(program, checkpoint="of the other").save(other_checkout / "own.json")
    arguments = argparse.Namespace(recipe="recipes/a.yaml", overrides=["seed=1"], steps=5)
    worker = step_time.worker_of_checkout(
        step_time.checkout(str(other_checkout)), arguments, own, tmp_path / "job.json"
    )
    where = str(other_checkout)
    assert step_time.measure(worker) == ["recipes/a.yaml seed=1 --steps 5", where, where]


def test_another_checkout_with_other_work_is_refused(program, tmp_path, other_checkout):
    step_time = program("step_time")
    longer = job_of(program).recipe | {"rollout": {"max_completion_length": 36}}
    arguments = argparse.Namespace(recipe="recipes/a.yaml", overrides=[], steps=5)
    for other, named in (
        (job_of(program, prompts=[["3?"]]), "prompts"),
        (job_of(program, recipe=longer), "rollout.max_c"),
    ):
        other.save(other_checkout / "own.json")
        with pytest.raises(SystemExit, match=f"has other {named}"):
            step_time.worker_of_checkout(other_checkout, arguments, job_of(program), tmp_path / "job.json")


def test_a_folder_that_is_no_other_checkout_is_refused(program, tmp_path, root):
    for text, said in (("", "another checkout"), (str(root), "another checkout"), (str(tmp_path), "is no checkout")):
        with pytest.raises(argparse.ArgumentTypeError, match=said):
            program("step_time").checkout(text)


def test_a_worker_that_fails_says_how(program, tmp_path):
    script = tmp_path / "dies.py"
    script.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"dies.py failed, exit status -9"):
        program("job").run_worker([sys.executable, script])


# --- the floor of step_time.py ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_qwen3():
    """Weights of a random Qwen3 of two layers, and its settings; 0 pads, 1 and 2 end."""
    depth, heads, head_dim, vocabulary = 32, 4, 8, 24
    shapes = {"embed_tokens": (vocabulary, depth), "norm": (depth,)}
    for layer in range(2):
        matrices = {"self_attn.q_proj": (depth, heads * head_dim), "self_attn.o_proj": (heads * head_dim, depth)}
        matrices |= dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (depth, heads // 2 * head_dim))
        matrices |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (depth, 3 * depth))
        matrices |= {"mlp.down_proj": (3 * depth, depth)}
        matrices |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (head_dim,))
        matrices |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (depth,))
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in matrices.items()}
    generator = np.random.default_rng(0)
    weights = {}
    for name, shape in shapes.items():
        values = generator.normal(size=shape) * (0.2 if len(shape) == 2 else 0.1) + (len(shape) == 1)
        weights[name] = jnp.asarray(values, jnp.float32)
    # Tokens that differ in probability, and a padding token that is not drawn.
    weights["embed_tokens"] = (3 * weights["embed_tokens"]).at[:, 0].set(2).at[0, 0].set(-2)
    return weights, plain_grpo.Config(2, head_dim, 10_000.0, 1e-6, 0, (1, 2))


@pytest.mark.long(minutes=1)
def test_the_floor_has_the_texts_the_loss_and_the_gradient_of_plain_grpo(program, small_qwen3):
    floor = program("floor")
    weights, config = small_qwen3
    prompts = np.repeat([[0, 0, 5, 6], [7, 8, 9, 10], [0, 4, 4, 3]], 4, axis=0)  # [12, 4], groups of 4
    arguments = (weights, config, prompts, jax.random.PRNGKey(3), 9, 0.8)
    completions, kept = floor.sample(*arguments, group_size=4)
    assert np.array_equal(completions, plain_grpo.sample(*arguments))
    lengths = np.sum(np.asarray(completions) != 0, axis=1)
    assert lengths.min() < 9 == lengths.max()  # some end and some are cut

    settings = plain_grpo.Settings(temperature=0.8)
    advantages = jnp.asarray(np.random.default_rng(1).normal(size=12), jnp.float32)

    def plain(weights):
        logps = plain_grpo.per_token_logps(weights, config, prompts, completions, 0.8)
        old = jax.lax.stop_gradient(logps)
        return plain_grpo.policy_loss(logps, old, advantages, completions != 0, settings)

    def fast(weights):
        return floor.loss_of(weights, config, settings, prompts[::4], completions, advantages, kept)

    (loss, gradient), (wanted, of_plain) = (jax.value_and_grad(each)(weights) for each in (fast, plain))
    assert loss == pytest.approx(wanted, abs=1e-6)
    for name, found in gradient.items():
        difference = np.linalg.norm(found - of_plain[name])
        assert difference < 1e-3 * np.linalg.norm(of_plain[name]), name  # the head's is rounded to bfloat16


# --- exports, read by others --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parity(program):
    return program("export_parity")


@pytest.mark.parametrize(
    ("change", "good"),
    [
        ({}, True),
        ({"same": 99}, False),
        ({"same_prompt_tokens": False}, False),
        ({"control_same": 100}, False),  # it could not have found another rotary embedding
        ({"unscaled_same": 100}, False),
        ({"distinct": 3}, False),
    ],
)
def test_a_comparison_that_could_not_fail_is_no_parity(parity, change, good) -> None:
    row = {"n": 100, "same": 100, "same_prompt_tokens": True, "control_same": 40, "distinct": 90}
    assert parity.sound(row | change) == good


def test_the_control_is_the_export_as_transformers_5_alone_spells_it(parity, tmp_path) -> None:
    (tmp_path / "export").mkdir()
    config = {"rope_parameters": {"rope_theta": 1e6}, "rope_theta": 1e6, "rope_scaling": None}
    (tmp_path / "export" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    folder = parity.write_control(tmp_path / "export", tmp_path / "control", ("rope_theta", "rope_scaling"))
    assert json.loads((folder / "config.json").read_text()) == {"rope_parameters": {"rope_theta": 1e6}}


@pytest.mark.nightly
def test_transformers_4_and_5_complete_an_export_alike(root) -> None:
    """It makes both environments, and takes minutes."""
    command = [sys.executable, str(root / "dev" / "benchmarks" / "export_parity.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=3600)
    if "check the network" in done.stderr:
        pytest.skip("the package index, for torch and Transformers")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("100 of 100") == 4
