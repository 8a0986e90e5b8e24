"""What is measured of a run, in addition to the accuracy on 500 test problems.

A function of AFTER gets the trained session and returns its measures by name.  One of ACROSS gets the runs of all arms
and adds measures to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from shared import ROOT
from starts import base_checkpoint

from grpo_lib import analysis, evaluation
from grpo_lib.problems import Problem, load_problems, words
from grpo_lib.records import grade
from grpo_lib.statistics import pass_at_k
from grpo_train import training
from grpo_train.engines import maxtext_model, weight_sync
from grpo_train.engines.weight_sync import padded
from grpo_train.recipes import Recipe

Run = dict[str, Any]

CURVES = (
    "accuracy",
    "entropy",
    "reward",
    "completions/mean_length",
    "kl",
    "clip_ratio",
    "frac_reward_zero_std",
    "sampler_trainer_gap",
    "update_applied",
)
PASSES = "dynamic_sampling/passes"  # in metrics.jsonl; `sampling_passes` in the records
SEEN = 1000  # test problems of seed 0 that a recipe or a text may have been made by
ENDS = ROOT / "runs" / "experiments"  # weights that `precision` compares


# --- of every run --------------------------------------------------------------------------------------------------


def tests_of_recipe(recipe: Recipe) -> list[Problem]:
    return load_problems(recipe.problems, "test")


def unseen_tests(recipe: Recipe) -> list[Problem]:
    """As many word problems that no choice was made by: of the generator's seed 1, without the 1,000 of seed 0."""
    known = {problem.question for problem in words.generate("test", SEEN)}
    wanted = len(tests_of_recipe(recipe))
    drawn = words.generate("test", wanted + SEEN, seed=1)
    return [problem for problem in drawn if problem.question not in known][:wanted]


TESTS: dict[str, Callable[[Recipe], list[Problem]]] = {"recipe": tests_of_recipe, "unseen": unseen_tests}


def summary_of(session: training.Session, problems: Sequence[Problem], samples: int = 0) -> dict[str, Any]:
    """Of greedy answers, and of so many samples of each problem at the recipe's temperature."""

    def sampled(prompts: list[str], *, seed: int) -> list[Any]:  # each run draws with its own seed, the base too
        return session.sample(prompts, seed=(seed + session.recipe.seed) % 2**31)

    run = evaluation.evaluate(
        session.generate,
        problems,
        sampled=sampled if samples else None,
        samples=samples or 1,
        render=session.render,
        progress=False,
        batch_size=session.recipe.evaluation.batch_size,
    )
    return run.summary()


def validated(session: training.Session) -> dict[str, float]:
    problems = load_problems(session.recipe.problems, "validation")
    return {"validation_accuracy": summary_of(session, problems)["accuracy"]}


def tested(session: training.Session, problems: Sequence[Problem], samples: int) -> Run:
    """The measures of greedy answers to test problems; with samples also the majority's and pass@k."""
    summary = summary_of(session, problems, samples)
    measures = {"accuracy": summary["accuracy"], "form": summary["format_accuracy"]}
    if samples:
        measures[f"maj@{samples}"] = summary["maj_at_k"]
        measures[f"pass@{samples}"] = summary["pass_at_k"][str(samples)]
    return measures


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def curves_of(rows: list[dict[str, Any]]) -> dict[str, list[float | None]]:
    """{metric: [steps]}, of the CURVES that any step has.  None: not in the metrics of that step."""
    curves: dict[str, list[float | None]] = {}
    for name in CURVES:
        if any(name in row for row in rows):
            curves[name] = [rounded(row.get(name)) for row in rows]
    curves["sampling_passes"] = [row.get(PASSES, 1) for row in rows]
    return curves


# --- of a trained session ------------------------------------------------------------------------------------------


def exact_kl(session: training.Session) -> Run:
    """KL(π‖base) from the whole distributions, nats per token, on completions that the policy samples."""
    from tunix.rl import common

    prompts = [problem.prompt(session.render) for problem in load_problems(session.recipe.problems, "validation")]
    output = session.sampler.generate(prompts, session.rollout_config)
    pad = session.tokenizer.pad_token_id
    eos = session.tokenizer.eos_token_id
    width = session.rollout_config.max_tokens_to_generate
    ids = padded(output.tokens, width, pad)
    tokens, positions, mask, _ = common.process_ids(output.left_padded_prompt_tokens, ids, pad, eos)
    base = maxtext_model.load_actor(
        session.recipe.model, base_checkpoint(), session.rollout_config.kv_cache_size, pad_id=pad
    )

    def logps(actor: maxtext_model.Actor) -> np.ndarray:  # [B, C, V]
        with actor.scope():
            logits, _ = actor.module(tokens, positions, None, mask)
        return np.asarray(jax.nn.log_softmax(logits[:, -width - 1 : -1].astype("float32")), np.float64)

    policy = logps(session.actor)
    reference = logps(base)
    kl_of_token = (np.exp(policy) * (policy - reference)).sum(-1)  # [B, C]
    return {"kl": float(kl_of_token[ids != pad].mean())}


def passes(session: training.Session) -> Run:
    """How many of 32 samples are right, of each of 200 problems; and of how many the working is, stated or not."""

    def sampled(prompts: list[str], *, seed: int) -> list[Any]:  # each run draws with its own seed, the base too
        return session.sample(prompts, seed=(seed + session.recipe.seed) % 2**31)

    run = evaluation.evaluate(
        session.generate,
        load_problems(session.recipe.problems, "validation"),
        sampled=sampled,
        samples=32,
        render=session.render,
        batch_size=session.recipe.evaluation.batch_size,
        progress=False,
        settings=session.recipe.evaluation_sampling,
    )
    rights = dict.fromkeys(run.rates("strict"), 0)
    worked = dict.fromkeys(run.rates("strict"), 0)
    for record in run.records:
        if not record["greedy"]:
            rights[record["id"]] += record["strict"]
            worked[record["id"]] += analysis.works_out_gold(record)
    measured: Run = {}
    for k in (1, 4, 32):
        measured[f"pass@{k}"] = mean_pass_at(k, rights)
        measured[f"worked@{k}"] = mean_pass_at(k, worked)
    measured["right_of_32"] = list(rights.values())
    measured["worked_of_32"] = list(worked.values())
    return measured


def mean_pass_at(k: int, counts: dict[str, int]) -> float:
    """pass@k, the mean over problems, from how many of the 32 samples of each are right."""
    return float(np.mean([pass_at_k(32, count, k) for count in counts.values()]))


def wrong_lengths(session: training.Session) -> Run:
    """Mean tokens of the wrong ones among 8 samples of each validation problem, end token left out."""
    problems = load_problems(session.recipe.problems, "validation") * 8
    completions = session.sample([problem.prompt(session.render) for problem in problems], seed=session.recipe.seed)
    wrong = []
    for completion, problem in zip(completions, problems, strict=True):
        if not grade(completion.text, problem.answer)["strict"]:
            wrong.append(completion.text)
    return {"wrong_length": float(np.mean([len(ids) for ids in session.tokenizer(wrong)["input_ids"]]))}


def sync_now(session: training.Session) -> Run:
    """The evaluation is to be of the policy, not of the sampler's older weights."""
    vars(session.sampler).pop("update_params", None)  # of the object; that of its class remains
    session.sampler.update_params(session.actor.weights())
    return {}


def distance(session: training.Session) -> Run:
    """How far the weights end from those of float32 with the same seed, over how far these came from the base; and the
    mean of `update_applied`."""
    named = weight_sync.by_name(session.actor.weights())
    weights = {name: np.asarray(value, np.float32) for name, value in named.items()}
    file = ENDS / f"precision-float32-{session.recipe.seed}.npz"
    if session.recipe.model.trainer_dtype == "float32":
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(file, **weights)
    start = maxtext_model.load_actor(session.recipe.model, base_checkpoint(), session.rollout_config.kv_cache_size)
    base = weight_sync.by_name(start.weights())
    with np.load(file) as end:
        apart = sum(np.square(weights[name] - end[name]).sum() for name in end)
        moved = sum(np.square(end[name] - np.asarray(base[name], np.float32)).sum() for name in end)
    applied = [row.get("update_applied", 1.0) for row in session.recorder.rows]  # float32 takes all of it
    return {"distance": math.sqrt(apart / moved), "applied": float(np.mean(applied))}


AFTER: dict[str, Callable[[training.Session], Run]] = {
    "distance": distance,
    "exact_kl": exact_kl,
    "passes": passes,
    "sync_now": sync_now,
    "wrong_lengths": wrong_lengths,
}


# --- of the runs of all arms, by their curves ----------------------------------------------------------------------


def at_completions(run: Run, completions: float) -> float:
    """The validation accuracy when so many completions were sampled, between two validations by a straight line."""
    sampled = np.cumsum([count or 1 for count in run["curves"]["sampling_passes"]]) * run["completions_per_step"]
    steps = [step for step, value in enumerate(run["validation"]) if value is not None]
    return float(np.interp(completions, sampled[steps], [run["validation"][step] for step in steps]))


def at_equal_completions(runs: list[Run]) -> None:
    """Adds `at_updates`, after 12 updates of either arm, and `at_completions`, when as many had been sampled as `on`
    had by then."""
    by_seed_and_arm = {(run["seed"], run["arm"]): run for run in runs}
    for seed in {run["seed"] for run in runs}:
        on = by_seed_and_arm[seed, "on"]
        off = by_seed_and_arm[seed, "off"]
        budget = sum(on["curves"]["sampling_passes"][:12]) * on["completions_per_step"]
        for run in (on, off):
            run["at_updates"] = run["validation"][11]
            run["at_completions"] = at_completions(run, budget)


def against_majority(runs: list[Run]) -> None:
    """Adds `accuracy_or_majority`: of a start the share of problems whose most frequent answer of 8 samples is right,
    else the accuracy.  Who only says more often what the start says most often does not get above it."""
    for run in runs:
        run["accuracy_or_majority"] = run.get("maj@8", run["accuracy"])


ACROSS: dict[str, Callable[[list[Run]], None]] = {
    "against_majority": against_majority,
    "at_equal_completions": at_equal_completions,
}
