"""Do others read an export as the same model?  Transformers 4 and 5 on torch, greedy, in two environments.

    python dev/benchmarks/export_parity.py                       # small random models of four architectures
    python dev/benchmarks/export_parity.py runs/course           # a run: its export against its own evaluation
    python dev/benchmarks/export_parity.py --json                # also into assets/reference/export_parity.json

The environments are .venv-transformers4 and .venv-trl, which has the course's version 5; each is made when it is first
needed (1 GB and 1.4 GB).

Random models: Qwen3, Qwen2.5, SmolLM2 (Llama, tied) and Llama 3.1 with its scaled rotary embedding, 2 layers.  Each is
converted to MaxText and exported as a run's policy is.  Both versions complete the same 100 prompts; all must be the
same.  The control is the same export with config.json as Transformers 5 alone spells it: version 4 then reads another
rotary embedding, and fewer completions are the same; where all are, the comparison shows nothing, and the program
fails.  Llama 3.1 has a second control, without `rope_scaling` alone.  `distinct` counts different completions.

Runs: the prompts that evals/after.jsonl holds.  The same grader reads both texts.  The accuracies may differ by
--tolerance.  MaxText and torch round differently, so where two tokens are equally likely either may be chosen: a
completion that differs is called a tie if, for transformers, the logits of the first two tokens that differ are within
TIE of each other.

Exit status 1 where one of these does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from job import ROOT, machine, run_worker
from peer_environments import TRANSFORMERS4, TRL, EnvironmentFailed, ensure

from grpo_lib.answers import is_correct
from grpo_lib.common.errors import CourseError
from grpo_lib.common.files import read_json, read_json_if_exists, read_jsonl, write_json_atomic

TIE = 1e-3  # nats
READERS = {"4": TRANSFORMERS4, "5": TRL}
RECORD = ROOT / "assets" / "reference" / "export_parity.json"
PROMPTS = ROOT / "assets" / "reference" / "course" / "evals" / "before.jsonl"
# Name -> MaxText's name, what differs from the published sizes, and the tokenizer class that the base names.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any], str]] = {
    "Qwen3": ("qwen3-1.7b", {}, "Qwen2Tokenizer"),
    "Qwen2.5": ("qwen2.5-1.5b", {}, "Qwen2TokenizerFast"),
    "SmolLM2": ("llama3-8b", {"logits_via_embedding": True}, "GPT2Tokenizer"),
    "Llama 3.1": ("llama3.1-8b", {}, "PreTrainedTokenizerFast"),
}
LOUDER = {"q_proj": 2, "k_proj": 2, "q_norm": 2, "k_norm": 2, "o_proj": 10, "down_proj": 10}
COUNT, QUESTIONS, LENGTH = 100, 4, 32  # prompts, questions in each, tokens of a completion


def compare_architectures(pythons: dict[str, Path]) -> list[dict[str, Any]]:
    """A row for each architecture; a line is printed for each."""
    rows = []
    for name in ARCHITECTURES:
        with tempfile.TemporaryDirectory(prefix="export-parity-") as folder:
            rows.append({"model": name} | compare_architecture(name, Path(folder), pythons))
        row = rows[-1]
        found = f"{row['same']} of {row['n']} completions are the same ({row['distinct']} distinct)"
        unscaled = f", without rope_scaling alone: {row['unscaled_same']}" if "unscaled_same" in row else ""
        print(f"{name:10} {found}; control: {row['control_same']}{unscaled}", flush=True)
    return rows


def compare_architecture(name: str, folder: Path, pythons: dict[str, Path]) -> dict[str, Any]:
    """Export a random model, and have both versions complete the same prompts."""
    export = export_random_model(name, folder)
    prompts = long_prompts(COUNT)
    found = {version: greedy(python, export, prompts, LENGTH) for version, python in pythons.items()}
    as_before = write_control(export, folder / "control", ("rope_theta", "rope_scaling"))
    control = greedy(pythons["4"], as_before, prompts, LENGTH)
    four, five = (found[version] for version in ("4", "5"))
    lengths = [len(ids) for ids in four["prompt_tokens"]]
    row: dict[str, Any] = {"n": len(prompts), "same": same(four, five), "control_same": same(control, five)}
    row["same_prompt_tokens"] = four["prompt_tokens"] == five["prompt_tokens"]
    row["distinct"] = len(set(four["completions"]))
    row["prompt_lengths"] = [min(lengths), max(lengths)]
    row["tokenizers"] = {version: one["classes"]["tokenizer"] for version, one in found.items()}
    row["versions"] = {version: one["versions"] for version, one in found.items()}
    if read_json(export / "config.json", "make the export again")["rope_scaling"]:
        unscaled = write_control(export, folder / "unscaled", ("rope_scaling",))
        row["unscaled_same"] = same(greedy(pythons["4"], unscaled, prompts, LENGTH), five)
    return row


def export_random_model(name: str, folder: Path) -> Path:
    """A small random model of an architecture as the project exports it, through a MaxText checkpoint."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # its table of architectures is MaxText's
    import hand_jitted  # noqa: F401  # prepares the environment, so before jax

    from grpo_train.engines import conversion
    from grpo_train.recipes import ModelRecipe
    from grpo_train.tpu.random_model import write_random_model

    maxtext_name, sizes, tokenizer_class = ARCHITECTURES[name]
    published = ModelRecipe(path="nobody/nothing", maxtext_name=maxtext_name, sizes=sizes)
    base = write_random_model(published, folder / "base")
    louder(base / "model.safetensors")
    tokenizer_config = read_json(base / "tokenizer_config.json", "make the model again")
    write_json_atomic(base / "tokenizer_config.json", tokenizer_config | {"tokenizer_class": tokenizer_class})
    model = ModelRecipe(path=str(base), maxtext_name=maxtext_name)
    weights = conversion.convert_to_maxtext(model, folder / "maxtext")
    return conversion.export_weights(lambda _: weights, model, folder / "export")


def louder(file: Path) -> None:
    """Make what the layers add large beside the token itself, which a tied model would else only repeat."""
    from safetensors.numpy import load_file, save_file

    weights = load_file(file)
    for name, weight in weights.items():
        factors = [factor for part, factor in LOUDER.items() if part in name and name.endswith(".weight")]
        weights[name] = weight * np.float32(factors[0] if factors else 1)
    save_file(weights, file, metadata={"format": "pt"})


def write_control(export: Path, folder: Path, dropped: tuple[str, ...]) -> Path:
    """A copy of an export, its config.json without these keys, which version 5 has in `rope_parameters` as well."""
    shutil.copytree(export, folder)
    config = read_json(folder / "config.json", "make the export again")
    kept = {key: value for key, value in config.items() if key not in dropped}
    write_json_atomic(folder / "config.json", kept)
    return folder


def long_prompts(count: int) -> list[str]:
    """Several questions after each other: far positions, for random models, which read them anyhow."""
    texts = [record["prompt"] for record in read_jsonl(PROMPTS)]
    return ["".join(texts[first : first + QUESTIONS]) for first in range(count)]


def greedy(
    python: Path, export: Path, prompts: list[str], length: int, expected: list[str] | None = None
) -> dict[str, Any]:
    """What greedy_worker.py finds with that Python."""
    with tempfile.TemporaryDirectory(prefix="export-parity-") as folder:
        job = {"export": str(export.resolve()), "prompts": prompts, "length": length, "batch_size": 50}
        file = Path(folder) / "job.json"
        write_json_atomic(file, job | {"expected": expected})
        return run_worker([str(python), str(ROOT / "dev" / "benchmarks" / "greedy_worker.py"), str(file)])


def same(one: dict[str, Any], other: dict[str, Any]) -> int:
    """How many completions are equal, character for character."""
    return sum(a == b for a, b in zip(one["completions"], other["completions"], strict=True))


def sound(row: dict[str, Any]) -> bool:
    """Whether both versions agree, and the control shows that they could have differed."""
    agree = row["same"] == row["n"] and row["same_prompt_tokens"]
    told = max(row["control_same"], row.get("unscaled_same", 0)) < row["n"]
    return agree and told and row["distinct"] > row["n"] // 2


def compare_run(export: Path, records: list[dict[str, Any]], length: int, pythons: dict[str, Path]) -> dict[str, Any]:
    """A row for each version, of the export against the actor's records; a few lines are printed for each."""
    prompts, expected = ([record[key] for record in records] for key in ("prompt", "completion"))
    rows = {}
    for version, python in pythons.items():
        found = greedy(python, export, prompts, length, expected)
        row = compare(records, found["completions"]) | {"ties": sum(gap <= TIE for gap in found["gaps"])}
        rows[version] = row | {"versions": found["versions"]}
        named = " on torch ".join(found["versions"][name] for name in ("transformers", "torch"))
        print(f"{row['n']} problems, greedy; transformers {named}")
        print(f"the actor's accuracy      {row['actor_accuracy']:.1%}")
        print(f"the exported model's      {row['export_accuracy']:.1%}   (difference {row['difference']:+.2%})")
        print(f"identical completions     {row['identical_completions']:.1%}   (of the others {row['ties']} are ties)")
    return rows


def compare(records: list[dict[str, Any]], completions: list[str]) -> dict[str, Any]:
    """Both accuracies by the strict grader, and the share of completions that are equal, character for character."""
    n = len(records)
    actor = sum(is_correct(record["completion"], record["gold"]) for record in records)
    export = sum(is_correct(text, record["gold"]) for text, record in zip(completions, records, strict=True))
    equal = sum(text == record["completion"] for text, record in zip(completions, records, strict=True))
    return {
        "n": n,
        "identical_completions": equal / n,
        "actor_accuracy": actor / n,
        "export_accuracy": export / n,
        "difference": (export - actor) / n,
    }


def records_of(run: Path, path: Path | None, export: Path, limit: int | None) -> list[dict[str, Any]]:
    """The actor's greedy completions.  Raises CourseError where a file is missing."""
    path = path or run / "evals" / "after.jsonl"
    if not (export / "config.json").is_file():
        raise CourseError(f"{export} is not a Hugging Face directory; export the model first (notebook 04)")
    if not path.is_file():
        raise CourseError(f"{path} does not exist; evaluate the trained model first (notebook 05)")
    records = [record for record in read_jsonl(path) if record["greedy"]][:limit]
    if not records:
        raise CourseError(f"{path} holds no records; evaluate the trained model again")
    return records


def completion_length(run: Path) -> int:
    """The limit under which the actor was evaluated, in tokens, from the run's recipe."""
    import yaml

    try:
        recipe = yaml.safe_load((run / "recipe.yaml").read_text(encoding="utf-8"))
    except OSError as error:
        raise CourseError(f"{run / 'recipe.yaml'} cannot be read ({error.strerror}); give a finished run") from None
    return recipe.get("evaluation", {}).get("max_completion_length") or recipe["rollout"]["max_completion_length"]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path, help="run directory, such as runs/course")
    parser.add_argument("--export", type=Path, help="Hugging Face directory (RUN/export)")
    parser.add_argument("--records", type=Path, help="the actor's evaluation records (RUN/evals/after.jsonl)")
    parser.add_argument("--limit", type=int, help="only the first so many records")
    parser.add_argument("--tolerance", type=float, default=0.005, help="largest difference of accuracies (%(default)s)")
    parser.add_argument(
        "--json", action="store_true", help="put the result into assets/reference/export_parity.json, and print it"
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    result: dict[str, Any] = {}
    wrong = []
    try:
        if arguments.run:
            export = arguments.export or arguments.run / "export"
            records = records_of(arguments.run, arguments.records, export, arguments.limit)
        pythons = {version: ensure(peer) for version, peer in READERS.items()}
        if arguments.run:
            result["run"] = compare_run(export, records, completion_length(arguments.run), pythons)
            off = [version for version, row in result["run"].items() if abs(row["difference"]) > arguments.tolerance]
            wrong += [f"Transformers {version}: the accuracies differ by more than the tolerance" for version in off]
        else:
            result["architectures"] = compare_architectures(pythons)
            failed = [row["model"] for row in result["architectures"] if not sound(row)]
            wrong += [f"{name}: the versions differ, or the control does not" for name in failed]
    except (CourseError, EnvironmentFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    if arguments.json:
        result["machine"] = machine()
        write_json_atomic(RECORD, read_json_if_exists(RECORD) | result)  # a run beside the random models
        print(json.dumps(result))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
