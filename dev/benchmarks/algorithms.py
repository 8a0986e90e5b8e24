"""Which parts of the algorithm make a difference: experiments on small models whose predictions were written first.

    python dev/benchmarks/algorithms.py                     # what there is, with the predictions
    python dev/benchmarks/algorithms.py kl                  # five seeds of each arm; its record says how long
    python dev/benchmarks/algorithms.py kl --json           # and write assets/experiments/kl.json
    python dev/benchmarks/algorithms.py real --seeds 3      # SmolLM2-135M (make real-model), 45 minutes for each seed

Each arm trains from the same base with the same seeds: seed s of every arm takes its problems from the same sequence.
The arms of a seed follow each other, so a machine that slows down slows all of them.  A claim is about differences of
two arms, one for each seed, with the 95 % interval of their mean (Student's t).  An interrupted experiment goes on
where it stopped.

A prediction and its bar were committed before the experiment ran for the first time, and stay as they are.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import math
import random
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from job import ROOT, machine
from tqdm import tqdm
from tunix.rl import function_registry

from grpo_lib import analysis, evaluation, rewards
from grpo_lib.common.files import write_json_atomic
from grpo_lib.problems import Problem, batch_of_step, load_problems, take_different
from grpo_lib.prompts import template_completion
from grpo_lib.records import grade
from grpo_lib.statistics import pass_at_k
from grpo_train import cold_start, losses, training
from grpo_train.engines import conversion, maxtext_model, optimizer, weight_sync
from grpo_train.engines.prompt_lengths import render_with
from grpo_train.engines.weight_sync import padded
from grpo_train.recipes import Recipe, load_recipe

RECIPE, REAL = ROOT / "recipes/tiny-cpu.yaml", ROOT / "recipes/smollm2-135m-cpu.yaml"
FOLDER = ROOT / "assets/experiments"
COMMON = ["training.checkpoint_every=1000", "training.validate_every=0", "problems.test=500", "problems.validation=200"]
CURVES = (
    "accuracy", "entropy", "reward", "completions/mean_length", "kl", "clip_ratio", "frac_reward_zero_std",
    "sampler_trainer_gap", "update_applied",
)  # fmt: skip
PASSES = "dynamic_sampling/passes"  # in metrics.jsonl; `sampling_passes` in the records
UNTRAINED = ("base", "start", "solutions")  # arms of which GRPO takes no step
UNITS = {"kl": " nats per token", "entropy": " nats per token", "wrong_length": " tokens"}  # of what is no share
ENDS = ROOT / "runs" / "experiments"  # weights that `precision` compares
SHORT = 20  # characters: an answer without the steps that lead to it, or with other tags

Run = dict[str, Any]


@dataclass(frozen=True)
class Claim:
    """A prediction about the difference of two arms, `one - other`, of a measure, with its bar.

    kind: `above`, the mean is at least `bar` and the interval above 0; `zero`, the interval covers 0; `within`, the
    mean is at most `bar` away from 0; `at most`, the mean is at most `bar`; `half`, of the ratio one / other: the mean
    is at most `bar`.
    """

    text: str
    one: str
    other: str
    measure: str
    kind: str
    bar: float = 0.0


@dataclass(frozen=True)
class Experiment:
    question: str
    arms: dict[str, list[str]]  # changes of the recipe
    claims: list[Claim]
    changes: list[str] = field(default_factory=list)  # of all arms
    before: Callable[[training.Session, str], None] = lambda session, arm: None
    after: Callable[[training.Session], Run] = lambda session: {}
    validate_every: int = 0
    recipe: Path = RECIPE


@rewards.reward_function
def short_answer(completion: str, gold: str = "") -> rewards.Score:
    """0.1 for a completion of fewer than SHORT characters, right or wrong."""
    return (0.1, "short") if len(completion) < SHORT else (0.0, "long")


tosses = random.Random()  # seeded before each run


@rewards.reward_function
def coin(completion: str, gold: str = "") -> rewards.Score:
    """1 or 0, whatever the completion is."""
    return (1.0, "heads") if tosses.random() < 0.5 else (0.0, "tails")


rewards.REWARDS |= {"short_answer": short_answer, "coin": coin}


# What is measured beside the accuracy on 500 test problems.


def exact_kl(session: training.Session) -> Run:
    """KL(π‖base) from the whole distributions, nats per token, on completions that the policy samples."""
    from tunix.rl import common

    prompts = [problem.prompt(session.render) for problem in load_problems(session.recipe.problems, "validation")]
    output = session.sampler.generate(prompts, session.rollout_config)
    pad, eos = session.tokenizer.pad_token_id, session.tokenizer.eos_token_id
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

    policy, reference = logps(session.actor), logps(base)
    each = (np.exp(policy) * (policy - reference)).sum(-1)
    return {"kl": float(each[ids != pad].mean())}


def passes(session: training.Session) -> Run:
    """How many of 32 samples are right, of each of 200 problems; and of how many the working is, stated or not."""

    def sampled(prompts: list[str], *, seed: int) -> list[Any]:  # each run draws with its own seed, the base too
        return session.sample(prompts, seed=(seed + session.recipe.seed) % 2**31)

    run = evaluation.evaluate(
        session.generate, load_problems(session.recipe.problems, "validation"), sampled=sampled, samples=32,
        render=session.render, batch_size=session.recipe.evaluation.batch_size, progress=False,
        settings=session.recipe.evaluation_sampling,
    )  # fmt: skip
    rights, worked = dict.fromkeys(run.rates("strict"), 0), dict.fromkeys(run.rates("strict"), 0)
    for record in (record for record in run.records if not record["greedy"]):
        rights[record["id"]] += record["strict"]
        worked[record["id"]] += analysis.works_out_gold(record)
    found = {
        name: float(np.mean([pass_at_k(32, count, k) for count in counts.values()]))
        for k in (1, 4, 32)
        for name, counts in ((f"pass@{k}", rights), (f"worked@{k}", worked))
    }
    return found | {"right_of_32": list(rights.values()), "worked_of_32": list(worked.values())}


def wrong_lengths(session: training.Session) -> Run:
    """Mean tokens of the wrong ones among 8 samples of each validation problem, end token left out."""
    problems = load_problems(session.recipe.problems, "validation") * 8
    sampled = session.sample([problem.prompt(session.render) for problem in problems], seed=session.recipe.seed)
    graded = [(each.text, grade(each.text, p.answer)) for each, p in zip(sampled, problems, strict=True)]
    texts = [text for text, verdicts in graded if not verdicts["strict"]]
    return {"wrong_length": float(np.mean([len(ids) for ids in session.tokenizer(texts)["input_ids"]]))}


def sync_every(session: training.Session, arm: str, steps: int = 8) -> None:
    """Let the sampler keep its weights for so many steps."""
    sampler, calls = session.sampler, 0
    update = sampler.update_params

    def sometimes(*arguments: Any, **named: Any) -> None:
        nonlocal calls
        calls += 1
        if calls % steps == 0:
            update(*arguments, **named)

    if arm != "synced":
        sampler.update_params = sometimes


def sync_now(session: training.Session) -> Run:
    """The evaluation is to be of the policy, not of the sampler's older weights."""
    vars(session.sampler).pop("update_params", None)  # of the object; that of its class remains
    session.sampler.update_params(session.actor.weights())
    return {}


def use_baseline(session: training.Session, arm: str) -> None:
    """The advantages of an arm: of the recipe, or one of this program by its name."""
    if arm in BASELINES:
        session.learner.algo_config.advantage_estimator = arm


def without_baseline(rewards: np.ndarray, num_generations: int) -> np.ndarray:
    """REINFORCE's (R. Williams, 1992) without a baseline.  Under a reward of 1 or 0: imitate what is right."""
    return np.asarray(rewards)


def less_batch_mean(rewards: np.ndarray, num_generations: int) -> np.ndarray:
    """The mean of all prompts as the baseline of each."""
    return rewards - np.mean(rewards)


BASELINES = {"none": without_baseline, "batch": less_batch_mean}
for name, function in BASELINES.items():
    function_registry.register_advantage_estimator(name)(function)


def imitate(session: training.Session, arm: str) -> None:
    """Expert iteration (arXiv:1705.08439): rounds of sampling, and of imitating what is right; all but `grpo` do it."""
    if arm != "grpo":
        use_baseline(session, "none")
        sync_every(session, arm, ROUNDS[arm])


ROUNDS = {"rounds": 5, "one-round": 1000}  # steps of a round


def mask_stale(session: training.Session, arm: str, factor: float = 2.0) -> None:
    """As `stale`; in the arm `mask` a token with π / π_sampler below 1 / factor or above factor gives no gradient.

    IcePop (Ring-1T, arXiv:2510.18855), with one factor for both sides.
    """
    sync_every(session, arm)
    if arm != "mask":
        return
    rollout, config = session.cluster.rollout, session.learner.algo_config
    ends = {"pad_id": rollout.pad_id(), "eos_id": rollout.eos_id()}

    def loss(model: Any, train_example: Any, algo_config: Any) -> Any:
        logps, _ = losses.model_statistics(
            model, train_example.prompt_ids, train_example.completion_ids, *ends.values(), config.temperature, "jax",
            train_example.segment_ids, train_example.segment_positions,
        )  # fmt: skip
        log_ratio = jax.lax.stop_gradient(logps) - train_example.sampler_per_token_logps
        weights = train_example.weights * (jnp.abs(log_ratio) <= math.log(factor))  # dropped tokens count in the length
        example = dataclasses.replace(train_example, weights=weights)
        return losses.grpo_loss(model, example, config, **ends, implementation="jax")

    session.cluster.actor_trainer.with_loss_fn(loss, has_aux=True)


def toss_anew(session: training.Session, arm: str) -> None:
    tosses.seed(session.recipe.seed)
    only_evaluate(session, arm)


def compare_real(session: training.Session, arm: str) -> None:
    toss_anew(session, arm)
    if arm == "expert":  # arXiv:1705.08439, a round being a step
        use_baseline(session, "none")


class Compensated(NamedTuple):
    """State of `compensated`: what rounding took from each weight so far, in bfloat16."""

    missing: Any
    inner: Any


def compensated(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Kahan summation (W. Kahan, 1965): what a step loses by rounding is added to the next one.

    Weights, and what they miss, are float32 arrays of what bfloat16 can hold, as `optimizer.rounded` gives them.
    """

    def init(weights: Any) -> Compensated:
        return Compensated(jax.tree.map(jnp.zeros_like, weights), inner.init(weights))

    def update(gradients: Any, state: Compensated, weights: Any = None) -> tuple[Any, Compensated]:
        steps, inner_state = inner.update(gradients, state.inner, weights)
        wanted = jax.tree.map(jnp.add, steps, state.missing)

        def lost(weight: jax.Array, step: jax.Array) -> jax.Array:
            return optimizer.round_to_nearest(step - (optimizer.round_to_nearest(weight + step) - weight))

        return wanted, Compensated(jax.tree.map(lost, weights, wanted), inner_state)

    return optax.GradientTransformation(init, update)


def store(session: training.Session, arm: str) -> None:
    """Give the trainer the optimizer of the arm `kahan` of `precision`; those of the others are the library's."""
    if arm == "kahan":
        trainer, recipe = session.cluster.actor_trainer, session.recipe
        chain = compensated(optimizer.make_optimizer(recipe.training, 1, recipe.seed))
        chain = optax.MultiSteps(optimizer.rounded(chain, "nearest", "float32", recipe.seed), 1)
        trainer.optimizer = optimizer.sum_in(nnx.Optimizer(trainer.model, chain, wrt=nnx.Param), "float32")


def distance(session: training.Session) -> Run:
    """How far the weights end from those of float32 with the same seed, over how far these came from the base; and the
    mean of `update_applied`."""
    weights = {
        name: np.asarray(value, np.float32) for name, value in weight_sync.by_name(session.actor.weights()).items()
    }
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


def fall(session: training.Session, arm: str, last: float = 0.7, stages: int = 3) -> None:
    """Let the sampling temperature fall to `last` in stages of equally many steps."""
    learner, cluster, steps = session.learner, session.cluster, session.recipe.training.steps
    config, generate = cluster.get_rollout_config(mode="train"), learner._generate_and_compute_advantage
    first = config.temperature

    def cooler(*arguments: Any) -> Any:
        part = cluster.global_steps * stages // steps / (stages - 1)
        temperature = first + part * (last - first)
        if temperature != config.temperature:  # a constant of compiled programs
            config.temperature = learner.algo_config.temperature = temperature
            cluster.actor_trainer.clear_jit_cache()
        return generate(*arguments)

    if arm == "falling":
        learner._generate_and_compute_advantage = cooler


def only_evaluate(session: training.Session, arm: str) -> None:
    """What was not trained by GRPO as an arm: no step is taken."""
    if arm in UNTRAINED:
        session.cluster.actor_trainer._train_steps = session.recipe.training.steps


# At equal sampled completions, by the curves.


def at_completions(run: Run, completions: float) -> float:
    """The validation accuracy when so many completions were sampled, between two validations by a straight line."""
    sampled = np.cumsum([passes or 1 for passes in run["curves"]["sampling_passes"]]) * run["completions_per_step"]
    steps = [step for step, value in enumerate(run["validation"]) if value is not None]
    return float(np.interp(completions, sampled[steps], [run["validation"][step] for step in steps]))


def dynamic_measures(runs: list[Run]) -> None:
    """Adds `at_updates`, after 12 updates of either arm, and `at_completions`, when as many had been sampled as `on`
    had by then."""
    for seed in {run["seed"] for run in runs}:
        on, off = (next(run for run in runs if (run["seed"], run["arm"]) == (seed, arm)) for arm in ("on", "off"))
        budget = sum(on["curves"]["sampling_passes"][:12]) * on["completions_per_step"]
        for run in (on, off):
            run["at_updates"] = run["validation"][11]
            run["at_completions"] = at_completions(run, budget)


EXPERIMENTS = {
    "kl": Experiment(
        "Does the estimator of the KL penalty matter, as a loss?",
        {"none": ["grpo.beta=0"], "k1": ["grpo.kl=k1"], "k2": ["grpo.kl=k2"], "k3": ["grpo.kl=k3"]},
        [
            Claim("the penalty k1 leaves the KL where no penalty leaves it", "k1", "none", "kl", "zero"),
            Claim("k2 at least halves it", "k2", "none", "kl", "half", 0.5),
            Claim("k3 at least halves it", "k3", "none", "kl", "half", 0.5),
        ],
        ["grpo.beta=0.3", "training.steps=60"],
        after=exact_kl,
    ),
    "std": Experiment(
        "What does the standard deviation do where a reward pays a little for something else?",
        {"std": [], "no-std": ["grpo.advantage=mean"], "std-left-out": ["grpo.dynamic_sampling=1"]},
        [
            Claim("dividing by it costs 10 points", "no-std", "std", "accuracy", "above", 0.10),
            Claim("without groups that are all right or all wrong it costs none of them", "std-left-out", "std",
                  "accuracy", "above", 0.10),
        ],
        ["rewards=[correct_answer, short_answer]", "grpo.group_size=4", "training.prompts_per_step=32",
         "training.steps=40"],
    ),
    "std-hard": Experiment(  # written after `std` had failed: there only few groups were all wrong
        "The same on problems that the base hardly ever gets right.",
        {"std": [], "no-std": ["grpo.advantage=mean"], "std-left-out": ["grpo.dynamic_sampling=1"]},
        [
            Claim("dividing by it costs 10 points", "no-std", "std", "accuracy", "above", 0.10),
            Claim(
                "without groups that are all right or all wrong it costs none of them", "std-left-out", "std",
                "accuracy", "above", 0.10,
            ),
        ],
        [
            "problems.difficulty=hard", "rollout.max_completion_length=30",
            "rewards=[correct_answer, short_answer]", "grpo.group_size=4", "training.prompts_per_step=32",
            "training.steps=40",
        ],
    ),
    "dynamic": Experiment(
        "Is dynamic sampling faster?",
        {"off": [], "on": ["grpo.dynamic_sampling=4"]},
        [
            Claim("after 12 updates it is ahead", "on", "off", "at_updates", "above", 0.02),
            Claim("after as many sampled completions it is not", "on", "off", "at_completions", "zero"),
        ],
        ["training.steps=36"],
        validate_every=3,
    ),
    "stale": Experiment(
        "A sampler that gets new weights every 8 steps only: what helps?",
        {"synced": [], "ratio-1": [], "clipped-ratio": ["grpo.correction=ratio"], "tis": ["grpo.correction=tis"]},
        [
            Claim("as if it had the newest weights: 5 points are lost", "synced", "ratio-1", "accuracy", "above", 0.05),
            Claim("truncated importance sampling is within 2 points of a synced sampler", "tis", "synced", "accuracy",
                  "within", 0.02),
            Claim("the clipped ratio is within 2 points, too", "clipped-ratio", "synced", "accuracy", "within", 0.02),
        ],
        ["training.steps=48", "training.learning_rate=9e-4"],
        before=sync_every,
        after=sync_now,
    ),
    "clip": Experiment(
        "With four updates per batch: does a wider upper clip keep the entropy up?",
        {"0.2": [], "0.28": ["grpo.epsilon_high=0.28"]},
        [Claim("the entropy of the last steps is higher with 0.28", "0.28", "0.2", "entropy", "above", 0.0)],
        ["grpo.iterations=4", "training.steps=40"],
    ),
    "pass": Experiment(
        "Does the policy solve what the base does not solve in 32 samples?",
        {"base": [], "trained": []},
        [
            Claim("pass@1 rises by 20 points", "trained", "base", "pass@1", "above", 0.20),
            Claim("pass@32 rises by 10 points, against what is often reported of larger models: notebook 08 saw it",
                  "trained", "base", "pass@32", "above", 0.10),
        ],
        ["problems.difficulty=hard", "rollout.max_completion_length=30", "training.steps=60"],
        before=only_evaluate,
        after=passes,
    ),
    "lora": Experiment(
        "How low may the rank of the adapters be, at ten times the learning rate?",
        {"full": [], **{f"rank-{r}": [f"lora.rank={r}", "training.learning_rate=3e-3"] for r in (1, 4, 16)}},
        [Claim(f"rank {r} is within 2 points of full training", f"rank-{r}", "full", "accuracy", "within", 0.02)
         for r in (1, 4, 16)],
    ),
    "group": Experiment(
        "How large should a group be, at 128 completions a step?",
        {str(size): [f"grpo.group_size={size}", f"training.prompts_per_step={128 // size}"]
         for size in (2, 4, 8, 16, 32)},
        [Claim("groups of 2 are 5 points worse than groups of 8", "8", "2", "accuracy", "above", 0.05)],
        ["training.steps=30"],
    ),
    "gspo": Experiment(
        "Nothing expected: the ratio of a sequence in the place of that of a token, four updates per batch.",
        {"grpo": [], "gspo": ["grpo.ratio=sequence", "grpo.epsilon=3e-4", "grpo.epsilon_high=4e-4"]},
        [Claim("no difference in accuracy", "gspo", "grpo", "accuracy", "zero")],
        ["grpo.iterations=4", "training.steps=30"],
    ),
    "rloo": Experiment(
        "Nothing expected: RLOO is Dr. GRPO with advantages times G / (G − 1), which Adam divides out.",
        {"dr-grpo": ["grpo.advantage=mean"], "rloo": ["grpo.advantage=leave-one-out"]},
        [Claim("no difference in accuracy", "rloo", "dr-grpo", "accuracy", "zero")],
        ["training.steps=30"],
    ),
    "temperature": Experiment(
        "Nothing expected: a temperature that falls from 0.9 to 0.7 in three stages.",
        {"constant": [], "falling": []},
        [Claim("no difference in accuracy", "falling", "constant", "accuracy", "zero")],
        ["rollout.temperature=0.9", "training.steps=30"],
        before=fall,
    ),
    "baseline": Experiment(
        "Is a baseline worth having, and must it be the group's? No division by the standard deviation in any arm.",
        {"group": [], "batch": [], "none": []},
        [
            Claim("without a baseline training is 3 points behind on the way", "group", "none", "way", "above", 0.03),
            Claim("with the mean of the batch it is within 2 points of the group's", "batch", "group", "way",
                  "within", 0.02),
        ],
        ["rewards=[correct_answer]", "grpo.advantage=mean", "training.steps=30"],
        before=use_baseline,
    ),
    "length": Experiment(
        "A completion's loss over its own length, or over a constant, on problems whose completions differ in length.",
        {"own": [], "constant": ["grpo.aggregation=constant"]},
        [
            Claim("over its own length, wrong completions become longer by half a token", "own", "constant",
                  "wrong_length", "above", 0.5),
            Claim("on the way the accuracies are within 3 points", "own", "constant", "way", "within", 0.03),
        ],
        ["problems.difficulty=hard", "rollout.max_completion_length=48", "rewards=[correct_answer]",
         "grpo.advantage=mean", "training.steps=40"],
        after=wrong_lengths,
    ),
    "no-clip": Experiment(
        "Does the clip prevent anything, with four updates per batch? At the usual learning rate, and at three times.",
        {f"{clip}{rate}": changes + more
         for rate, more in (("", []), ("-fast", ["training.learning_rate=9e-4"]))
         for clip, changes in (("clip", []), ("no-clip", ["grpo.epsilon=0.999", "grpo.epsilon_high=1000"]))},
        [
            Claim("at the usual rate it makes no difference above 2 points", "clip", "no-clip", "accuracy",
                  "within", 0.02),
            Claim("at three times the rate, without it 5 points are lost", "clip-fast", "no-clip-fast", "accuracy",
                  "above", 0.05),
        ],
        ["grpo.iterations=4", "training.steps=30"],
    ),
    "expert": Experiment(
        "Does one need RL? Expert iteration imitates right completions; all arms have 3,840 completions, each once.",
        {"grpo": [], **{name: [] for name in ROUNDS}},
        [
            Claim("six rounds of 640 completions end 3 points behind GRPO", "grpo", "rounds", "accuracy",
                  "above", 0.03),
            Claim("one round, with the base's completions alone, ends 10 points behind", "grpo", "one-round",
                  "accuracy", "above", 0.10),
        ],
        ["rewards=[correct_answer]", "training.steps=30"],
        before=imitate,
        after=sync_now,
    ),
    "maxrl": Experiment(
        "Over the group's mean (MaxRL), its standard deviation (GRPO), or not divided, where right answers are rare.",
        {"std": [], "mean": ["grpo.advantage=mean"], "maxrl": ["grpo.advantage=maxrl"]},
        [
            Claim("what is worked out in 32 samples differs by at most 2 points: in `pass` it was at its ceiling",
                  "maxrl", "std", "worked@32", "within", 0.02),
            Claim("on the way MaxRL is 3 points ahead of no division", "maxrl", "mean", "way", "above", 0.03),
            Claim("and within 3 points of the standard deviation", "maxrl", "std", "way", "within", 0.03),
        ],
        ["problems.difficulty=hard", "rollout.max_completion_length=30", "rewards=[correct_answer]",
         "training.steps=60"],
        after=passes,
    ),
    "stale-mask": Experiment(
        "As `stale`: leave out the tokens whose probability changed most, in place of truncating their weight?",
        {arm: [] if arm == "synced" else ["grpo.correction=tis"] for arm in ("synced", "tis", "mask")},
        [
            Claim("leaving out is within 2 points of truncating", "mask", "tis", "accuracy", "within", 0.02),
            Claim("and within 5 points of a synced sampler", "mask", "synced", "accuracy", "within", 0.05),
        ],
        ["training.steps=48", "training.learning_rate=9e-4"],
        before=mask_stale,
        after=sync_now,
    ),
    "coin": Experiment(
        "Does training help when a coin decides the reward? Nothing can be learnt from it.",
        {"base": [], "coin": []},
        [
            Claim("accuracy does not rise by more than 2 points", "coin", "base", "accuracy", "at most", 0.02),
            Claim("neither does the share of answers in the right form", "coin", "base", "form", "at most", 0.02),
        ],
        ["rewards=[coin]"],
        before=toss_anew,
    ),
    "precision": Experiment(
        "Weights in bfloat16, at a learning rate that is small beside them: does it matter how steps are rounded?",
        {
            "float32": [],
            "nearest": ["model.weight_dtype=bfloat16"],
            "stochastic": ["model.weight_dtype=bfloat16", "training.rounding=stochastic"],
            "kahan": ["model.weight_dtype=bfloat16"],
        },
        [
            Claim("rounded to the nearest, bfloat16 loses 20 points", "float32", "nearest", "accuracy", "above", 0.20),
            Claim("and less than half of a step arrives", "nearest", "float32", "applied", "at most", -0.5),
            Claim("with stochastic rounding nothing is lost", "stochastic", "float32", "accuracy", "zero"),
            Claim("with Kahan summation neither", "kahan", "float32", "accuracy", "zero"),
        ],
        ["training.learning_rate=3e-5", "training.steps=150"],
        before=store,
        after=distance,
    ),
    "real": Experiment(
        "A pretrained model after a cold start: what does GRPO add, and what do other ways with the same problems?",
        {
            "start": [],  # after the cold start, which all arms of a seed have in common
            "grpo": [],
            "solutions": [],  # supervised fine-tuning on the problems that the others see, with their solutions
            "expert": [],  # the right ones of the completions are imitated
            "coin": ["rewards=[coin]"],
            "tiny": ["rewards=[correct_answer, tidy_format]", "grpo.advantage=std"],  # as tiny-cpu
        },
        [
            Claim("GRPO adds 10 points to the cold start", "grpo", "start", "accuracy", "above", 0.10),
            Claim("who has the solutions, too, is 5 points ahead of GRPO", "solutions", "grpo", "accuracy", "above",
                  0.05),
            Claim("imitating what is right is 3 points behind GRPO", "grpo", "expert", "accuracy", "above", 0.03),
            Claim("a coin adds nothing", "coin", "start", "accuracy", "at most", 0.02),
            Claim("a tenth for form, divided by the standard deviation, costs 5 points", "grpo", "tiny", "accuracy",
                  "above", 0.05),
        ],
        ["training.steps=8"],  # half of the recipe's, for the hours
        before=compare_real,
        recipe=REAL,
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=EXPERIMENTS, help="of the experiment; none: print all predictions")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="of each run; default: the experiment's")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "experiments", help="where finished runs wait")
    parser.add_argument("--json", action="store_true", help="write assets/experiments/NAME.json")
    arguments = parser.parse_args()
    if arguments.seeds < 3:
        parser.error(f"--seeds: an interval needs at least 3, got {arguments.seeds}")
    if arguments.json and arguments.steps:
        parser.error("--json: a record is of whole runs; leave out --steps")
    if not arguments.name:
        for name, experiment in EXPERIMENTS.items():
            print(f"{name}: {experiment.question}")
            for claim in experiment.claims:
                print(f"    {claim.text} ({bar_of(claim)})")
        return
    experiment = EXPERIMENTS[arguments.name]
    started = time.perf_counter()
    settings = json.dumps([COMMON, experiment.changes, experiment.arms])  # finished runs of other settings stay apart
    name = f"{arguments.name}-{arguments.steps or 'whole'}-{zlib.crc32(settings.encode()):08x}"
    file = arguments.folder / f"{name}.json"
    runs = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    done = {(run["seed"], run["arm"]) for run in runs}
    todo = [(seed, arm) for seed in range(arguments.seeds) for arm in experiment.arms]
    for seed, arm in tqdm([each for each in todo if each not in done], desc=arguments.name, unit="run"):
        runs.append(run_arm(experiment, arm, seed, arguments.steps))
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json_atomic(file, runs)
        tqdm.write(f"seed {seed}, {arm}: {runs[-1]['accuracy']:.1%}, {runs[-1]['seconds']:.0f} s", file=sys.stderr)
    runs = [run for run in runs if run["seed"] < arguments.seeds]
    result = {
        "command": f"python dev/benchmarks/algorithms.py {arguments.name} --seeds {arguments.seeds} --json",
        "question": experiment.question,
        "changes": experiment.changes,
        "arms": experiment.arms,
        "claims": judged(experiment, runs),
        "runs": runs,
        "seconds": sum(run["seconds"] for run in runs),
        "machine": machine(),
    }
    for claim in result["claims"]:
        print(claim["sentence"])
    print(f"{result['seconds'] / 60:.0f} minutes of runs, {(time.perf_counter() - started) / 60:.0f} of them just now")
    if arguments.json:
        FOLDER.mkdir(exist_ok=True)
        write_json_atomic(FOLDER / f"{arguments.name}.json", result)


@functools.cache
def base_checkpoint(recipe: Path = RECIPE) -> Path:
    """The model of a recipe in MaxText's format."""
    folder = tempfile.mkdtemp(prefix="experiments-base-")
    return conversion.convert_to_maxtext(load_recipe(recipe).model, Path(folder) / "base")


@functools.cache
def taught_checkpoint(path: Path, seed: int) -> Path:
    """It after the recipe's cold start."""
    recipe = load_recipe(path, [f"seed={seed}"])
    taught, _ = take_different(load_problems(recipe.problems, "train"), recipe.training.cold_start)
    return fine_tuned(recipe, taught, base_checkpoint(path))


def fine_tuned(recipe: Recipe, problems: Sequence[Problem], checkpoint: Path) -> Path:
    """A checkpoint after two epochs on the solutions of problems."""
    render = functools.partial(render_with, recipe.prompts, maxtext_model.load_tokenizer(recipe.model))
    pairs = [(problem.prompt(render), template_completion(problem.solution, problem.answer)) for problem in problems]
    folder = Path(tempfile.mkdtemp(prefix="experiments-start-"))
    return cold_start.fine_tune(recipe, pairs, checkpoint, folder / "start", progress=False)


def seen(recipe: Recipe, problems: Sequence[Problem]) -> list[Problem]:
    """The problems of all steps of a training."""
    by_question = {problem.question: problem for problem in problems}
    batch = batch_of_step(problems, str, recipe.plan.prompts_per_step, recipe.seed)
    return [by_question[str(text)] for step in range(recipe.training.steps) for text in batch(step)["prompts"]]


def start_of(experiment: Experiment, arm: str, recipe: Recipe) -> tuple[Path, list[Problem]]:
    """The checkpoint that an arm starts from, and its problems."""
    _, problems = take_different(load_problems(recipe.problems, "train"), recipe.training.cold_start)
    if not recipe.training.cold_start:
        return base_checkpoint(experiment.recipe), problems
    start = taught_checkpoint(experiment.recipe, recipe.seed)
    return fine_tuned(recipe, seen(recipe, problems), start) if arm == "solutions" else start, problems


def run_arm(experiment: Experiment, arm: str, seed: int, steps: int | None) -> Run:
    """Train one arm with one seed, and measure."""
    started = time.perf_counter()
    changes = [*COMMON, *experiment.changes, *experiment.arms[arm], f"seed={seed}"]
    recipe = load_recipe(experiment.recipe, changes + ([f"training.steps={steps}"] if steps else []))
    with tempfile.TemporaryDirectory(prefix="experiments-") as folder:
        start, problems = start_of(experiment, arm, recipe)
        session = training.build_session(recipe, folder, problems, start, log=lambda text: None)
        experiment.before(session, arm)
        validate = functools.partial(validated, session)
        rows = training.train(session, validate=validate, validate_every=experiment.validate_every)
        measures = experiment.after(session)
        summary = summary_of(session, "test")
        measures |= {"accuracy": summary["accuracy"], "form": summary["format_accuracy"]}
    curves = {name: [rounded(row.get(name)) for row in rows] for name in CURVES if any(name in row for row in rows)}
    curves["sampling_passes"] = [row.get(PASSES, 1) for row in rows]
    last = [value for value in curves.get("entropy", [])[-5:] if value is not None]
    run = {
        "seed": seed,
        "arm": arm,
        "seconds": round(time.perf_counter() - started, 1),
        "entropy": float(np.mean(last)) if last else None,
        "way": float(np.mean(curves["accuracy"])) if rows else None,  # of the samples of all steps
        "completions_per_step": recipe.plan.completions_per_step,
        "validation": [rounded(row.get("validation_accuracy")) for row in rows],
        "curves": curves,
        **measures,
    }
    del session
    gc.collect()
    return run


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def validated(session: training.Session) -> dict[str, float]:
    return {"validation_accuracy": summary_of(session, "validation")["accuracy"]}


def summary_of(session: training.Session, split: str) -> dict[str, Any]:
    """Of greedy answers."""
    run = evaluation.evaluate(
        session.generate, load_problems(session.recipe.problems, split), render=session.render, progress=False,
        batch_size=session.recipe.evaluation.batch_size,
    )  # fmt: skip
    return run.summary()


def judged(experiment: Experiment, runs: list[Run]) -> list[dict[str, Any]]:
    """Each claim with the value of each seed, mean, interval, verdict and a sentence."""
    if experiment is EXPERIMENTS["dynamic"]:
        dynamic_measures(runs)
    return [judge(claim, runs) for claim in experiment.claims]


def is_share(claim: Claim) -> bool:
    shares = ("accuracy", "applied", "form", "way", "at_updates", "at_completions")
    return claim.measure in shares or claim.measure.startswith(("pass@", "worked@"))


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Student's t interval for the mean of a few values, such as one difference for each seed: (low, high).

    Raises ValueError for fewer than two values.
    """
    if len(values) < 2:
        raise ValueError(f"an interval needs at least two values, got {len(values)}")
    from scipy.stats import t

    array = np.asarray(values, float)
    half = t.ppf((1 + confidence) / 2, len(array) - 1) * array.std(ddof=1) / math.sqrt(len(array))
    return float(array.mean() - half), float(array.mean() + half)


def smallest_mean(values: Sequence[float], power: float = 0.8, confidence: float = 0.95) -> float:
    """The smallest true mean for which `mean_interval` of as many values, as spread as these, leaves out 0 with
    probability `power`: by the noncentral t distribution.

    Raises ValueError for fewer than three values.
    """
    if len(values) < 3:
        raise ValueError(f"the spread of values needs at least three, got {len(values)}")
    from scipy.optimize import brentq
    from scipy.stats import nct, t

    n = len(values)
    error, limit = float(np.std(values, ddof=1)) / math.sqrt(n), t.ppf((1 + confidence) / 2, n - 1)

    def missing(shift: float) -> float:
        return float(nct.sf(limit, n - 1, shift)) - power  # the other tail is less than a thousandth of it

    return float(brentq(missing, 0.0, limit + 4)) * error


def judge(claim: Claim, runs: Sequence[Run]) -> dict[str, Any]:
    def values(arm: str) -> list[float]:
        return [run[claim.measure] for run in sorted(runs, key=lambda run: run["seed"]) if run["arm"] == arm]

    ones, others = values(claim.one), values(claim.other)
    ratio = claim.kind == "half"
    each = [one / other if ratio else one - other for one, other in zip(ones, others, strict=True)]
    mean, (low, high) = float(np.mean(each)), mean_interval(each)
    held = {
        "above": mean >= claim.bar and low > 0,
        "zero": low <= 0 <= high,
        "within": abs(mean) <= claim.bar,
        "half": mean <= claim.bar,
        "at most": mean <= claim.bar,
    }[claim.kind]
    scale, unit = (100, " points") if is_share(claim) else (1, "" if ratio else UNITS[claim.measure])
    shown = f"{scale * mean:+.3g}{unit} (95 % interval {scale * low:+.3g} to {scale * high:+.3g})"
    what = f"{claim.measure} of {claim.one} {'over' if ratio else 'minus'} {claim.other}"
    measured = f"{what} is {shown}"
    sentence = f"{claim.text}: {measured}; predicted: {bar_of(claim)}; {'held' if held else 'FAILED'}"
    found = dataclasses.asdict(claim) | {
        "values": {claim.one: ones, claim.other: others}, "mean": mean, "low": low, "high": high, "held": held,
        "measured": measured, "predicted": bar_of(claim),
    }  # fmt: skip
    if claim.kind == "zero":
        found["smallest"] = smallest_mean(each)
        sentence += f". Seen with a chance of 80 %: a difference of {scale * found['smallest']:.3g}{unit} or more"
    return found | {"sentence": sentence}


def bar_of(claim: Claim) -> str:
    amount = f"{100 * claim.bar:g} points" if is_share(claim) else f"{claim.bar:g}{UNITS[claim.measure]}"
    return {
        "above": f"at least {amount}, and an interval above 0",
        "zero": "an interval that covers 0",
        "within": f"at most {amount} apart",
        "half": f"a ratio of at most {claim.bar:g}",
        "at most": f"at most {amount}",
    }[claim.kind]


if __name__ == "__main__":
    main()
