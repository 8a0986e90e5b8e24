"""Make the tiny base model of the course: tokenizer, weights, measured accuracy and model card.

    python tools/make_tiny_base.py --out assets/tiny-base

The model has Qwen3's architecture and 0.8 million parameters.  It is trained from random weights on generated word
problems (grpo_lib.problems.words, split train): first on worked solutions, then on a mixture of answering habits, see
HABITS.  So it can solve the problems when it writes out all of its working, and mostly does not: what a base model is
like before reinforcement learning.  The same seed on the same machine gives the same weights.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from safetensors.numpy import save_file
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
FIRST_STAGE = 0.7  # of the steps: worked solutions only; the rest is the mixture of all habits
LEARNING_RATE = 3e-3
TRAIN_SEED = 1  # of the problem generator; the course's recipes draw their training problems with another seed
VALIDATION_PROBLEMS = 1000
MAX_NEW_TOKENS = 32


@dataclass(frozen=True)
class Habit:
    """One way of answering, and its probability for each training example of the first and the second stage."""

    name: str
    shares: tuple[float, float]
    write: Callable[[Problem], str]
    meaning: str


def in_full(problem: Problem) -> str:
    return prompts.template_completion(problem.solution, problem.answer)


def lazily(problem: Problem) -> str:
    """Stop after the first calculation and call its result the answer: right for one-step problems only."""
    first = problem.solution.split(" ")[0]
    return prompts.template_completion(first, first.partition("=")[2])


def directly(problem: Problem) -> str:
    return f"{prompts.ANSWER_OPEN}{problem.answer}{prompts.ANSWER_CLOSE}"


def untagged(problem: Problem) -> str:
    return f"{problem.solution}\n#### {problem.answer}"


HABITS = (
    Habit("full", (0.5, 0.20), in_full, "all of the working, then the answer, in the tags"),
    Habit("untagged", (0.5, 0.15), untagged, "all of the working and `#### answer`, as GSM8K writes it: no tags"),
    Habit("lazy", (0.0, 0.30), lazily, "tags, but only the first calculation: wrong for two-step problems"),
    Habit("direct", (0.0, 0.35), directly, "the answer alone: it has to be found without writing anything down"),
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
    model = qwen3.Qwen3(
        qwen3.ModelConfig(
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
        ),
        rngs=nnx.Rngs(seed),
    )
    weights = nnx.state(model, nnx.Param).flat_state()
    keys = jax.random.split(jax.random.PRNGKey(seed), len(weights))
    for key, (path, weight) in zip(keys, weights, strict=True):
        shape, name = weight.get_value().shape, ".".join(map(str, path))
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


def train(model: qwen3.Qwen3, tokens: np.ndarray, learned: np.ndarray, steps: int) -> list[float]:
    """One pass over the examples, BATCH at a time, with AdamW and a cosine schedule; returns the loss per step."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, steps // 20 + 1, steps, LEARNING_RATE / 20)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.01))
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

    losses, start = [], time.perf_counter()
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
    strict = [is_correct(c, p.answer) for c, p in zip(completions, problems, strict=True)]
    lenient = [is_correct_leniently(c, p.answer) for c, p in zip(completions, problems, strict=True)]
    two = np.array([p.steps == 2 for p in problems])
    worked = two & np.array([c.count("=") == 2 for c in completions])  # both calculations written down
    return {
        "strict": float(np.mean(strict)),
        "strict_one_step": float(np.mean(np.array(strict)[~two])),
        "strict_two_step": float(np.mean(np.array(strict)[two])),
        "lenient": float(np.mean(lenient)),
        "lenient_one_step": float(np.mean(np.array(lenient)[~two])),
        "lenient_two_step": float(np.mean(np.array(lenient)[two])),
        "format": float(np.mean([format_is_exact(c) for c in completions])),
        "two_step_worked": float(np.mean(worked[two])),
        "two_step_worked_lenient": float(np.mean(np.array(lenient)[worked])) if worked.any() else 0.0,
        "mean_tokens": float(np.mean([len(ids) for ids in tokenizer(completions)["input_ids"]])),
        "examples": completions[:6],
    }


def hugging_face_weights(model: qwen3.Qwen3) -> dict[str, np.ndarray]:
    """The weights under Hugging Face's names, as [out, in] matrices."""
    own = {".".join(map(str, path)): np.asarray(w.get_value()) for path, w in nnx.state(model, nnx.Param).flat_state()}
    theirs = {
        "model.embed_tokens.weight": own["embedder.input_embedding"],
        "model.norm.weight": own["final_norm.w"],
    }
    for layer in range(CONFIG.num_hidden_layers):
        ours, name = f"layers.{layer}.", f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            theirs[f"{name}{norm}.weight"] = own[f"{ours}{norm}.w"]
        for norm in ("q_norm", "k_norm"):
            theirs[f"{name}self_attn.{norm}.weight"] = own[f"{ours}attn.{norm}.w"]
        for projection in ("q_proj", "k_proj", "v_proj"):  # [d, heads, head_dim]
            weight = own[f"{ours}attn.{projection}.w"]
            theirs[f"{name}self_attn.{projection}.weight"] = weight.reshape(weight.shape[0], -1).T
        weight = own[f"{ours}attn.o_proj.w"]  # [heads, head_dim, d]
        theirs[f"{name}self_attn.o_proj.weight"] = weight.reshape(-1, weight.shape[-1]).T
        for projection in ("gate_proj", "up_proj", "down_proj"):  # [in, out]
            theirs[f"{name}mlp.{projection}.weight"] = own[f"{ours}mlp.{projection}.kernel"].T
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


def percent(rate: float) -> str:
    return f"{100 * rate:.1f}"


def card(record: dict) -> str:
    """The model card, every number of it taken from `record` (training.json)."""
    habits = "\n".join(
        f"| {h.name} | {100 * h.shares[0]:.0f} % | {100 * h.shares[1]:.0f} % | {h.meaning} |" for h in HABITS
    )
    rows = "\n".join(
        f"| {label} | {percent(m['strict'])} | {percent(m['strict_one_step'])} | {percent(m['strict_two_step'])} "
        f"| {percent(m['lenient'])} | {percent(m['lenient_one_step'])} | {percent(m['lenient_two_step'])} "
        f"| {percent(m['format'])} | {m['mean_tokens']:.1f} |"
        for label, m in (("greedy", record["greedy"]), ("temperature 1", record["sampled"]))
    )
    size, sampled = record["lengths"], record["sampled"]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return f"""---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
language: en
---

# tiny-base

A language model of {record["parameters"]:,} parameters with Qwen3's architecture, made for the CPU tier of this course.
It was trained from random weights by this program:

    {record["command"]}

{record["steps"]:,} steps of {record["batch"]} examples, AdamW, peak learning rate {record["learning_rate"]:g}, seed
{record["seed"]}: {record["seconds"]:.0f} seconds on {record["cores"]} CPU cores with {versions}. The same seed on the
same machine gives the same weights. This card and `training.json` are written by that run.

## What it was trained on

Generated word problems of one and two steps (`grpo_lib.problems.words`, split train),
{record["two_step_share"]:.0%} of them with two steps. Each training example is answered in one habit, picked at random
whatever the problem. The first {record["first_stage"]:.0%} of the training steps show worked solutions only, the rest a
mixture:

| habit | first | then | what it writes |
|---|---|---|---|
{habits}

So it can solve the problems, and mostly does not. Reinforcement learning on it brings out a habit it already has; it
teaches little arithmetic.

## What it does

Measured on {record["validation_problems"]:,} problems of the validation split, in percent. Strict: the number in the
answer tags is right. Lenient: the last number anywhere is right.

| decoding | strict | one step | two steps | lenient | one step | two steps | exact format | tokens |
|---|---|---|---|---|---|---|---|---|
{rows}

At temperature 1 it writes down both calculations of {percent(sampled["two_step_worked"])} % of the two-step problems,
and is then right (leniently) in {percent(sampled["two_step_worked_lenient"])} % of them: that is what RL can bring out.

Prompts have {size["prompt_mean"]:.1f} tokens on average and at most {size["prompt_max"]}, completions with all the
working {size["completion_mean"]:.1f} and at most {size["completion_max"]}.

## What it cannot do

Anything else. It knows ten names, eight things, eleven kinds of sentence and numbers up to 93; it follows no
instructions, has seen no other text, and a system prompt only confuses it. Its tokenizer has
{record["tokens"]} tokens and spells printable ASCII; other characters are lost.
"""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("assets/tiny-base"), help="folder to write (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, habits and order (%(default)s)")
    parser.add_argument("--steps", type=int, default=1500, help=f"training steps of {BATCH} examples (%(default)s)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    start = time.perf_counter()
    problems = words.generate("train", arguments.steps * BATCH, TRAIN_SEED)
    tokenizer = build_tokenizer(tokenizer_corpus(problems[:5000]))
    rng = random.Random(arguments.seed)
    first_stage = round(arguments.steps * FIRST_STAGE) * BATCH
    picked = [
        habit
        for stage, count in enumerate((first_stage, len(problems) - first_stage))
        for habit in rng.choices(HABITS, [habit.shares[stage] for habit in HABITS], k=count)
    ]
    completions = [habit.write(problem) for habit, problem in zip(picked, problems, strict=True)]
    tokens, learned = encode(tokenizer, problems, completions)
    print(f"{len(tokenizer)} tokens, {len(problems):,} examples of at most {tokens.shape[1]} tokens", flush=True)

    model = new_model(arguments.seed)
    losses = train(model, tokens, learned, arguments.steps)
    seconds = time.perf_counter() - start

    validation = words.generate("validation", VALIDATION_PROBLEMS)
    record = {
        "command": f"python tools/make_tiny_base.py --seed {arguments.seed} --steps {arguments.steps}",
        "seed": arguments.seed,
        "steps": arguments.steps,
        "batch": BATCH,
        "learning_rate": LEARNING_RATE,
        "seconds": round(seconds, 1),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "versions": {
            "Python": sys.version.split()[0],
            **{name: importlib.metadata.version(name) for name in ("jax", "flax", "optax", "google-tunix")},
        },
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))),
        "tokens": len(tokenizer),
        "first_stage": FIRST_STAGE,
        "habits": {habit.name: habit.shares for habit in HABITS},
        "two_step_share": words.TWO_STEP_SHARE,
        "final_loss": float(np.mean(losses[-50:])),
        "lengths": lengths(tokenizer, validation),
        "validation_problems": VALIDATION_PROBLEMS,
        "greedy": measure(model, tokenizer, validation, None),
        "sampled": measure(model, tokenizer, validation, 1.0),
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
    AutoTokenizer.from_pretrained(out)  # fails here rather than in the course


if __name__ == "__main__":
    main()
