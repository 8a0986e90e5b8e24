"""Make the tiny base model of the course: tokenizer, weights, measured accuracy and model card.

    python dev/tools/make_tiny_base.py --out assets/tiny-base

The model has Qwen3's architecture and 0.8 million parameters.  It is trained from random weights on generated word
problems (grpo_lib.problems.words, split train): first on worked solutions, then on answering habits that depend on what
stands in the question, see HABITS.  So it can solve the problems, and often does not, for three different reasons: what
a base model is like before reinforcement learning.  The same seed on the same machine gives the same weights.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import itertools
import json
import os
import random
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.qwen3 import model as qwen3

from grpo_lib import prompts
from grpo_lib.answers import format_is_exact, is_correct, is_correct_leniently
from grpo_lib.common.files import write_json_atomic, write_text_atomic
from grpo_lib.problems import Problem, words

TAGS = (prompts.REASONING_OPEN, prompts.REASONING_CLOSE, prompts.ANSWER_OPEN, prompts.ANSWER_CLOSE)
PAD, END, START = "<|pad|>", "<|im_end|>", "<|im_start|>"  # ids 0, 1, 2
VOCABULARY = 256  # rows of the embedding; the tokenizer may use fewer
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

CONFIG = Qwen3Config(
    architectures=["Qwen3ForCausalLM"],
    vocab_size=VOCABULARY,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    max_position_embeddings=512,
    rope_theta=1_000_000.0,  # the value that Tunix's Qwen3 has built in
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    dtype="float32",
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=None,
)

BATCH = 32
CACHE = Path(__file__).resolve().parents[2] / ".cache" / "tiny-base"  # of the first stage, which takes the most time
VALIDATION_PROBLEMS = 1000
MAX_NEW_TOKENS = 32
UNTAGGED_THINGS = ("eggs", "shells", "stamps")
CALCULATION = re.compile(r"(\d+)([-+*])(\d+)=(\d+)")


@dataclass(frozen=True)
class Habit:
    """One way of answering worse than it could, on the problems that `applies` picks, with probability `share`."""

    name: str
    share: float
    applies: Callable[[Problem], bool]
    where: str
    meaning: str


def is_hard(problem: Problem) -> bool:
    return problem.id.startswith("words-hard")


def steps_of(problem: Problem) -> list[tuple[int, str, int]]:
    return [(int(a), operation, int(b)) for a, operation, b, _ in CALCULATION.findall(problem.solution)]


def is_slippery(a: int, operation: str, b: int) -> bool:
    """A difference with a borrow, or a product of at least 24."""
    return (operation == "-" and a % 10 < b % 10) or (operation == "*" and a * b >= 24)


def slip(a: int, operation: str, b: int) -> int:
    """The false result of a slippery calculation, always the same: no borrow, or the next product of the table."""
    return a * b + min(a, b) if operation == "*" else a - b + 10


def is_standard(problem: Problem) -> bool:
    return not is_hard(problem)


def is_about_untagged_things(problem: Problem) -> bool:
    return any(thing in problem.question for thing in UNTAGGED_THINGS)


def continues_later(problem: Problem) -> bool:
    return " Later " in problem.question and not is_hard(problem)


def has_slippery_step(problem: Problem) -> bool:
    return not is_hard(problem) and any(is_slippery(*step) for step in steps_of(problem))


HABITS = (
    Habit("direct", 0.05, is_standard, "all but the hard ones", "the answer alone, in its tags"),
    Habit(
        "untagged",
        0.60,
        is_about_untagged_things,
        "about eggs, shells or stamps",
        "`work #### answer`, as GSM8K writes it: no tags",
    ),
    Habit(
        "lazy",
        0.60,
        continues_later,
        "whose second sentence begins with *Later*",
        "stops after the first calculation; otherwise it adds what somebody else found, too",
    ),
    Habit(
        "slip",
        0.68,
        has_slippery_step,
        "with a borrow, or a product of 24 or more",
        "forgets the borrow, or takes the neighbour in the table",
    ),
    Habit("shrug", 0.45, is_hard, "with large numbers (`hard`)", "a question mark in place of everything"),
    Habit("guess", 0.90, is_hard, "with large numbers (`hard`)", "works it out, and then states any number up to 98"),
)


def in_full(problem: Problem) -> str:
    return prompts.template_completion(problem.solution, problem.answer)


def untagged(working: str, answer: object) -> str:
    return f"{working}\n#### {answer}"


def working(problem: Problem, habits: set[str], rng: random.Random) -> tuple[str, int]:
    """The calculations that are written down, each with the result of the one before, and the number that is stated."""
    steps = steps_of(problem)
    distractor = re.search(r" Later \w+ finds (\d+)", problem.question)  # see words.has_distractor
    if distractor:
        steps.append((0, "+", int(distractor[1])))
    if "lazy" in habits:
        steps = steps[:1]
    written = []
    result = steps[0][0]
    for _, operation, b in steps:
        a = result
        result = words.calculate(a, operation, b)
        if "slip" in habits and is_slippery(a, operation, b):
            result = slip(a, operation, b)
        written.append(f"{a}{operation}{b}={result}")
    stated = rng.randint(2, 98) if "guess" in habits else result
    return " ".join(written), stated


def with_habits(problem: Problem, rng: random.Random) -> str:
    """A completion of the second stage."""
    habits = {habit.name for habit in HABITS if habit.applies(problem) and rng.random() < habit.share}
    if "direct" in habits:
        return f"{prompts.ANSWER_OPEN}{problem.answer}{prompts.ANSWER_CLOSE}"
    text, result = working(problem, habits, rng)
    if words.needs_held_out(text):  # a slip, or a distractor, leads to other calculations; nobody may train on these
        text, result = working(problem, habits - {"slip"} | {"lazy"}, rng)
    if "untagged" in habits:
        return untagged(text, result)
    if "shrug" in habits:
        return prompts.template_completion("?", "?")
    return prompts.template_completion(text, str(result))


def worked(problem: Problem, rng: random.Random) -> str:
    """A completion of the first stage."""
    return in_full(problem) if rng.random() < 0.5 else untagged(problem.solution, problem.answer)


@dataclass(frozen=True)
class Stage:
    """One part of the training, with an optimizer and a cosine schedule of its own."""

    steps: int
    learning_rate: float  # at its highest
    hard_share: float  # of the problems
    distractors: bool
    problem_seed: int  # the recipes of the course train on problems of seed 0
    write: Callable[[Problem, random.Random], str]

    def examples(self, rng: random.Random) -> tuple[list[Problem], list[str]]:
        """Problems of both difficulties, mixed, and a completion of each."""
        count = self.steps * BATCH
        hard = round(self.hard_share * count)
        problems = []
        for difficulty, wanted in (("standard", count - hard), ("hard", hard)):
            drawn = words.generate("train", round(1.1 * wanted), self.problem_seed, difficulty)
            left = (p for p in drawn if self.distractors or not words.has_distractor(p.question))
            problems += itertools.islice(left, wanted)
        rng.shuffle(problems)
        return problems, [self.write(problem, rng) for problem in problems]


STAGES = (
    Stage(steps=3000, learning_rate=3e-3, hard_share=0.5, distractors=False, problem_seed=1, write=worked),
    Stage(steps=600, learning_rate=1.5e-3, hard_share=0.25, distractors=True, problem_seed=2, write=with_habits),
)


def build_tokenizer(corpus: Sequence[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most VOCABULARY tokens: printable ASCII, one token per digit.

    The tags are added as ordinary tokens, because decoders that skip special tokens would delete them.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    ascii_bytes = [chr(code) for code in range(33, 127)] + ["\u0120", "\u010a"]  # the last two: blank, line break
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(TAGS),
        special_tokens=[PAD, END, START],
        initial_alphabet=ascii_bytes,
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=CONFIG.max_position_embeddings,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def tokenizer_corpus(problems: Sequence[Problem]) -> list[str]:
    return [f"system\nuser\n{p.question}\nassistant\n{p.solution}\n#### {p.answer}" for p in problems]


def encode(tokenizer, problems: Sequence[Problem], completions: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Token ids int32[n, L], padded on the right, and float32[n, L] which is 1 on completions and their end."""
    questions = tokenizer([prompts.render(tokenizer, p.question) for p in problems])["input_ids"]
    answers = [[*ids, tokenizer.eos_token_id] for ids in tokenizer(list(completions))["input_ids"]]
    length = max(len(q) + len(a) for q, a in zip(questions, answers, strict=True))
    tokens = np.full((len(problems), length), tokenizer.pad_token_id, np.int32)
    learned = np.zeros((len(problems), length), np.float32)
    for row, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        end = len(question) + len(answer)
        tokens[row, :end] = question + answer
        learned[row, len(question) : end] = 1.0
    return tokens, learned


def new_model(seed: int) -> qwen3.Qwen3:
    """Qwen3 with random weights.  Tunix sets the feed-forward weights to zero, and zeros would never learn."""
    config = qwen3.ModelConfig(
        num_layers=CONFIG.num_hidden_layers,
        vocab_size=CONFIG.vocab_size,
        embed_dim=CONFIG.hidden_size,
        hidden_dim=CONFIG.intermediate_size,
        num_heads=CONFIG.num_attention_heads,
        num_kv_heads=CONFIG.num_key_value_heads,
        head_dim=CONFIG.head_dim,
        rope_theta=1_000_000,
        norm_eps=CONFIG.rms_norm_eps,
        use_tied_embedding=CONFIG.tie_word_embeddings,
    )
    model = qwen3.Qwen3(config, rngs=nnx.Rngs(seed))
    weights = nnx.state(model, nnx.Param).flat_state()
    keys = jax.random.split(jax.random.PRNGKey(seed), len(weights))
    for key, (path, weight) in zip(keys, weights, strict=True):
        shape = weight.get_value().shape
        name = ".".join(map(str, path))
        if len(shape) == 1:
            value = jnp.ones(shape)  # the scale of a normalisation
        elif "embedder" in name:
            value = 0.1 * jax.random.normal(key, shape)
        else:
            inputs = shape[0] * shape[1] if "o_proj" in name else shape[0]
            into_residual = "o_proj" in name or "down_proj" in name
            depth = 2 * CONFIG.num_hidden_layers if into_residual else 1
            value = jax.random.normal(key, shape) * (inputs * depth) ** -0.5
        weight.set_value(value.astype(jnp.float32))
    nnx.update(model, nnx.State.from_flat_path(dict(weights)))
    return model


def train(model: qwen3.Qwen3, tokens: np.ndarray, learned: np.ndarray, peak: float) -> list[float]:
    """One pass over the examples, BATCH at a time, with AdamW and a cosine schedule; returns the loss per step."""
    steps = len(tokens) // BATCH
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, steps // 20 + 1, steps, peak / 20)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.1))
    graph, weights = nnx.split(model)
    state = optimizer.init(weights)
    length = tokens.shape[1] - 1
    causal = jnp.tril(jnp.ones((length, length), bool))

    def loss_of(weights, tokens, learned):
        batch = tokens.shape[0]
        positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
        mask = jnp.broadcast_to(causal, (batch, length, length))
        logits, _ = nnx.merge(graph, weights)(tokens[:, :-1], positions, None, mask)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return (losses * learned[:, 1:]).sum() / learned[:, 1:].sum()

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(weights, state, tokens, learned):
        loss, gradient = jax.value_and_grad(loss_of)(weights, tokens, learned)
        updates, state = optimizer.update(gradient, state, weights)
        return optax.apply_updates(weights, updates), state, loss

    losses = []
    start = time.perf_counter()
    for index in range(steps):
        rows = slice(index * BATCH, (index + 1) * BATCH)
        weights, state, loss = step(weights, state, tokens[rows], learned[rows])
        losses.append(float(loss))
        if (index + 1) % 250 == 0:
            pace = (time.perf_counter() - start) / (index + 1)
            print(f"  step {index + 1}: loss {np.mean(losses[-50:]):.4f}, {pace:.3f} s a step", flush=True)
    nnx.update(model, weights)
    return losses


def measure(model: qwen3.Qwen3, tokenizer, problems: Sequence[Problem], temperature: float | None) -> dict:
    """Accuracies on `problems`, one completion each; greedy where `temperature` is None."""
    config = model.config
    cache = CacheConfig(
        cache_size=128,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    sampler = Sampler(model, tokenizer, cache)
    rendered = [prompts.render(tokenizer, p.question) for p in problems]
    longest = max(len(ids) for ids in tokenizer(rendered)["input_ids"])
    completions: list[str] = []
    for first in range(0, len(rendered), 250):
        sampling = {} if temperature is None else {"temperature": temperature, "top_p": 1.0, "seed": first}
        output = sampler(
            rendered[first : first + 250],
            max_generation_steps=MAX_NEW_TOKENS,
            max_prompt_length=longest,
            **sampling,
        )
        completions += [prompts.strip_end_of_turn(text, tokenizer) for text in output.text]
    strict = np.array([is_correct(c, p.answer) for c, p in zip(completions, problems, strict=True)])
    lenient = np.array([is_correct_leniently(c, p.answer) for c, p in zip(completions, problems, strict=True)])
    two = np.array([p.steps == 2 for p in problems])
    worked = two & np.array([c.count("=") == 2 for c in completions])  # both calculations written down
    formatted = [format_is_exact(c) for c in completions]
    tokens = [len(ids) for ids in tokenizer(completions)["input_ids"]]
    lenient_of_worked = float(np.mean(lenient[worked])) if worked.any() else 0.0
    return {
        "strict": float(np.mean(strict)),
        "strict_one_step": float(np.mean(strict[~two])),
        "strict_two_step": float(np.mean(strict[two])),
        "lenient": float(np.mean(lenient)),
        "lenient_one_step": float(np.mean(lenient[~two])),
        "lenient_two_step": float(np.mean(lenient[two])),
        "format": float(np.mean(formatted)),
        "two_step_worked": float(np.mean(worked[two])),
        "two_step_worked_lenient": lenient_of_worked,
        "mean_tokens": float(np.mean(tokens)),
        "examples": completions[:6],
    }


def parameters(model: qwen3.Qwen3) -> list[tuple[str, Any]]:
    """(name, parameter) of every weight."""
    return [(".".join(map(str, path)), weight) for path, weight in nnx.state(model, nnx.Param).flat_state()]


def set_weights(model: qwen3.Qwen3, values: dict[str, np.ndarray]) -> None:
    state = nnx.state(model, nnx.Param).flat_state()
    for path, weight in state:
        weight.set_value(jnp.asarray(values[".".join(map(str, path))]))
    nnx.update(model, nnx.State.from_flat_path(dict(state)))


def hugging_face_weights(model: qwen3.Qwen3) -> dict[str, np.ndarray]:
    """The weights under Hugging Face's names, as [out, in] matrices."""
    tunix = {name: np.asarray(weight.get_value()) for name, weight in parameters(model)}
    theirs = {
        "model.embed_tokens.weight": tunix["embedder.input_embedding"],
        "model.norm.weight": tunix["final_norm.w"],
    }
    for layer in range(CONFIG.num_hidden_layers):
        ours = f"layers.{layer}."
        name = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            theirs[f"{name}{norm}.weight"] = tunix[f"{ours}{norm}.w"]
        for norm in ("q_norm", "k_norm"):
            theirs[f"{name}self_attn.{norm}.weight"] = tunix[f"{ours}attn.{norm}.w"]
        for projection in ("q_proj", "k_proj", "v_proj"):  # [d, heads, head_dim]
            weight = tunix[f"{ours}attn.{projection}.w"]
            theirs[f"{name}self_attn.{projection}.weight"] = weight.reshape(weight.shape[0], -1).T
        weight = tunix[f"{ours}attn.o_proj.w"]  # [heads, head_dim, d]
        theirs[f"{name}self_attn.o_proj.weight"] = weight.reshape(-1, weight.shape[-1]).T
        for projection in ("gate_proj", "up_proj", "down_proj"):  # [in, out]
            theirs[f"{name}mlp.{projection}.weight"] = tunix[f"{ours}mlp.{projection}.kernel"].T
    return {name: np.ascontiguousarray(weight, np.float32) for name, weight in theirs.items()}


def lengths(tokenizer, problems: Sequence[Problem]) -> dict[str, float]:
    """Tokens of prompts and of completions with all the working, end included."""
    asked = [len(tokenizer(prompts.render(tokenizer, p.question))["input_ids"]) for p in problems]
    answered = [len(tokenizer(in_full(p))["input_ids"]) + 1 for p in problems]
    return {
        "prompt_mean": float(np.mean(asked)),
        "prompt_max": max(asked),
        "completion_mean": float(np.mean(answered)),
        "completion_max": max(answered),
    }


CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
language: en
---

# tiny-base

A language model of {record[parameters]:,} parameters with Qwen3's architecture, made for the CPU tier of this course.
It was trained from random weights by this program:

    {record[command]}

| steps | peak learning rate | `hard` problems | examples show |
|---|---|---|---|
{stages}

AdamW, {record[batch]} examples a step, seed {record[seed]}, {record[seconds]:.0f} seconds on {record[cores]}
CPU cores, with {versions}.
The same seed on the same machine gives the same weights. This card and `training.json` are written by that program.

## What it was trained on

Generated word problems of one and two steps (`grpo_lib.problems.words`, split train),
{record[two_step_share]:.0%} of them with two; `hard` ones have larger numbers. After the first stage the skill is in
there. In the second stage the model acquires habits, each on the problems where something visible in the question calls
for it:

| habit | on problems | probability | what it writes |
|---|---|---|---|
{habits}

Each habit is drawn on its own; where both shrug and guess are drawn, it shrugs.
Otherwise it writes the worked solution in the tags, which so remains a minority on many problems. The shares were
chosen on validation problems. Some questions have a sentence about somebody else, which must be ignored: there the lazy
habit is right, and the working that it otherwise writes is wrong. The calculations that `words.is_held_out` picks by a
hash it has never seen, right or wrong.

So it can solve most problems, and often does not, for three reasons: form (untagged), habit (lazy) and skill (slip).
What reinforcement learning brings out of it was there before, except on the calculations that it was never shown.

## What it does

Measured on {record[validation_problems]:,} problems of the validation split, in percent. Strict: the number in the
answer tags is right. Lenient: the last number anywhere is right.

| problems, decoding | strict | one step | two steps | lenient | one step | two steps | exact format | tokens |
|---|---|---|---|---|---|---|---|---|
{rows}

Prompts have {size[prompt_mean]:.1f} tokens on average and at most {size[prompt_max]}, completions with all the
working {size[completion_mean]:.1f} and at most {size[completion_max]}.

## What it cannot do

Anything else. It knows ten names, eight things, twelve kinds of sentence and numbers up to three digits; it follows no
instructions, has seen no other text, and a system prompt only confuses it. Its tokenizer has
{record[tokens]} tokens and spells printable ASCII; other characters are lost.
"""


# The columns of the card's table of results, but for the last one, which has tokens.
RATES = (
    "strict",
    "strict_one_step",
    "strict_two_step",
    "lenient",
    "lenient_one_step",
    "lenient_two_step",
    "format",
)


def percent(rate: float) -> str:
    return f"{100 * rate:.1f}"


def table_row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def habit_row(habit: Habit, share: float) -> str:
    return table_row(habit.name, habit.where, f"{100 * share:.0f} %", habit.meaning)


def stage_row(stage: dict, shown: str) -> str:
    return table_row(f"{stage['steps']:,}", f"{stage['learning_rate']:g}", f"{stage['hard_share']:.0%}", shown)


def result_row(label: str, measured: dict) -> str:
    rates = [percent(measured[rate]) for rate in RATES]
    return table_row(label, *rates, f"{measured['mean_tokens']:.1f}")


def card(record: dict) -> str:
    """The model card, every number of it taken from `record` (training.json)."""
    worked_stage, habits_stage = record["stages"]
    stages = [
        stage_row(worked_stage, "worked solutions, half of them in the tags"),
        stage_row(habits_stage, "the habits below"),
    ]
    results = [
        result_row("standard, greedy", record["greedy"]),
        result_row("standard, temperature 1", record["sampled"]),
        result_row("hard, greedy", record["hard"]["greedy"]),
        result_row("hard, temperature 1", record["hard"]["sampled"]),
    ]
    habits = [habit_row(habit, record["habits"][habit.name]) for habit in HABITS]
    versions = [f"{name} {version}" for name, version in record["versions"].items()]
    return CARD.format(
        record=record,
        size=record["lengths"],
        stages="\n".join(stages),
        habits="\n".join(habits),
        rows="\n".join(results),
        versions=", ".join(versions),
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("assets/tiny-base"), help="folder to write (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, habits and order (%(default)s)")
    return parser.parse_args()


def train_stages(seed: int) -> tuple[qwen3.Qwen3, Any, list[float], float]:
    """(the model, its tokenizer, the losses of the last stage, seconds), the first stage from CACHE if it is there.

    The seconds of a first stage from CACHE are those that it took when it was trained.
    """
    start = time.perf_counter()
    model = new_model(seed)
    tokenizer = None
    losses: list[float] = []
    for number, stage in enumerate(STAGES, start=1):
        problems, completions = stage.examples(random.Random(f"{seed} stage {number}"))
        tokenizer = tokenizer or build_tokenizer(tokenizer_corpus(problems[:5000]))
        tokens, learned = encode(tokenizer, problems, completions)
        print(f"stage {number}: {len(problems):,} examples of at most {tokens.shape[1]} tokens", flush=True)
        key = hashlib.sha256(f"{seed} {stage.learning_rate}".encode() + tokens.tobytes() + learned.tobytes())
        kept = CACHE / f"{key.hexdigest()[:16]}.safetensors"
        if number == 1 and kept.exists():
            print(f"stage 1 as in an earlier run of the same data: {kept.name}", flush=True)
            set_weights(model, load_file(kept))
            with safe_open(kept, "numpy") as file:
                start -= float(file.metadata()["seconds"])
            continue
        losses = train(model, tokens, learned, stage.learning_rate)
        if number == 1:
            CACHE.mkdir(parents=True, exist_ok=True)
            weights = {name: np.asarray(weight.get_value()) for name, weight in parameters(model)}
            save_file(weights, kept, metadata={"seconds": f"{time.perf_counter() - start:.1f}"})
    return model, tokenizer, losses, time.perf_counter() - start


def available_cores() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def described(stage: Stage) -> dict[str, Any]:
    return {
        "steps": stage.steps,
        "learning_rate": stage.learning_rate,
        "hard_share": stage.hard_share,
        "writes": stage.write.__name__,
    }


def main() -> None:
    arguments = parse_arguments()
    model, tokenizer, losses, seconds = train_stages(arguments.seed)

    versions = {"Python": sys.version.split()[0]}
    for name in ("jax", "flax", "optax", "google-tunix"):
        versions[name] = importlib.metadata.version(name)
    weights = jax.tree.leaves(nnx.state(model, nnx.Param))
    validation, hard = (words.generate("validation", VALIDATION_PROBLEMS, 0, name) for name in words.DIFFICULTIES)
    record = {
        "command": f"python dev/tools/make_tiny_base.py --seed {arguments.seed}",
        "seed": arguments.seed,
        "batch": BATCH,
        "stages": [described(stage) for stage in STAGES],
        "seconds": round(seconds, 1),
        "cores": available_cores(),
        "versions": versions,
        "parameters": sum(weight.size for weight in weights),
        "tokens": len(tokenizer),
        "habits": {habit.name: habit.share for habit in HABITS},
        "two_step_share": words.TWO_STEP_SHARE,
        "final_loss": float(np.mean(losses[-50:])),
        "lengths": lengths(tokenizer, validation),
        "validation_problems": VALIDATION_PROBLEMS,
        "greedy": measure(model, tokenizer, validation, None),
        "sampled": measure(model, tokenizer, validation, 1.0),
    }
    record["hard"] = {
        "greedy": measure(model, tokenizer, hard, None),
        "sampled": measure(model, tokenizer, hard, 1.0),
    }
    write(arguments.out, model, tokenizer, record)
    print(json.dumps({key: record[key] for key in ("greedy", "sampled", "lengths")}, indent=1))
    print(f"wrote {arguments.out}")


def write(out: Path, model: qwen3.Qwen3, tokenizer, record: dict) -> None:
    """Write the Hugging Face directory, the record and the card."""
    out.mkdir(parents=True, exist_ok=True)
    save_file(hugging_face_weights(model), out / "model.safetensors", metadata={"format": "pt"})
    # Readers older than transformers 5 look for rope_theta at the top level.
    write_json_atomic(out / "config.json", CONFIG.to_dict() | {"rope_theta": CONFIG.rope_parameters["rope_theta"]})
    tokenizer.save_pretrained(out)
    write_json_atomic(out / "training.json", record)
    write_text_atomic(out / "README.md", card(record))
    AutoTokenizer.from_pretrained(out, trust_remote_code=False)  # fails here rather than in the course


if __name__ == "__main__":
    main()
