"""Does the exported model, read by another implementation, score what the actor scored?

    python dev/benchmarks/export_parity.py runs/course

The run's export/ (Hugging Face layout) is loaded by transformers on torch, in the environment .venv-trl, and decodes
greedily the prompts that evals/after.jsonl holds.  The same grader then reads both.  Exit status 1 if the accuracies
differ by more than --tolerance.  The two implementations round differently, so where two tokens are equally likely
either may be chosen: a completion that differs is called a tie if, for transformers, the logits of the first two tokens
that differ are within TIE of each other.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import job  # noqa: F401  (it makes grpo_lib importable in .venv-trl)

from grpo_lib.answers import is_correct
from grpo_lib.common.errors import CourseError
from grpo_lib.common.files import read_jsonl

TIE = 1e-3  # nats


def decode(directory: Path, records: list[dict[str, Any]], length: int, batch_size: int) -> tuple[list[str], int]:
    """Greedy completions from transformers, without the end token, and how many of those that differ are ties."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left", trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, trust_remote_code=False).eval()
    config = GenerationConfig(
        max_new_tokens=length,
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    completions: list[str] = []
    prompts = [record["prompt"] for record in records]
    for first in range(0, len(prompts), batch_size):
        batch = prompts[first : first + batch_size]
        inputs = tokenizer(batch, return_tensors="pt", padding=True, add_special_tokens=False)
        inputs.pop("token_type_ids", None)
        with torch.inference_mode():
            output = model.generate(**inputs, generation_config=config)
        for ids in output[:, inputs["input_ids"].shape[1] :].tolist():
            end = ids.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in ids else len(ids)
            completions.append(tokenizer.decode(ids[:end]))

    def gap(prompt: str, one: str, other: str) -> float:
        texts = (f"{prompt}{text}{tokenizer.eos_token}" for text in (one, other))
        a, b = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
        at = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
        with torch.inference_mode():
            logits = model(torch.tensor([a[:at]])).logits[0, -1]
        return abs(float(logits[a[at]] - logits[b[at]]))

    pairs = [(r["prompt"], r["completion"], text) for r, text in zip(records, completions, strict=True)]
    return completions, sum(gap(*pair) <= TIE for pair in pairs if pair[1] != pair[2])


def compare(records: list[dict[str, Any]], completions: list[str]) -> dict[str, Any]:
    """Both accuracies by the strict grader, and the share of completions that are equal, character for character."""
    n = len(records)
    actor = sum(is_correct(record["completion"], record["gold"]) for record in records)
    export = sum(is_correct(text, record["gold"]) for text, record in zip(completions, records, strict=True))
    same = sum(text == record["completion"] for text, record in zip(completions, records, strict=True))
    return {
        "n": n,
        "identical_completions": same / n,
        "actor_accuracy": actor / n,
        "export_accuracy": export / n,
        "difference": (export - actor) / n,
    }


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
    parser.add_argument("run", nargs="?", type=Path, default=Path("runs/course"), help="run directory (%(default)s)")
    parser.add_argument("--export", type=Path, help="Hugging Face directory (RUN/export)")
    parser.add_argument("--records", type=Path, help="the actor's evaluation records (RUN/evals/after.jsonl)")
    parser.add_argument("--limit", type=int, help="only the first so many records")
    parser.add_argument("--batch-size", type=int, default=250, help="prompts at a time (%(default)s)")
    parser.add_argument("--tolerance", type=float, default=0.005, help="largest difference of accuracies (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    export = arguments.export or arguments.run / "export"
    path = arguments.records or arguments.run / "evals" / "after.jsonl"
    try:
        if not (export / "config.json").is_file():
            raise CourseError(f"{export} is not a Hugging Face directory; export the model first (notebook 04)")
        if not path.is_file():
            raise CourseError(f"{path} does not exist; evaluate the trained model first (notebook 05)")
        records = [record for record in read_jsonl(path) if record["greedy"]][: arguments.limit]
        if not records:
            raise CourseError(f"{path} holds no records; evaluate the trained model again")
        _continue_in_trl_environment()
        completions, ties = decode(export, records, completion_length(arguments.run), arguments.batch_size)
    except CourseError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    import torch
    import transformers

    found = compare(records, completions) | {"ties": ties}
    found["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(f"{found['n']} problems, greedy; transformers {transformers.__version__} on torch {torch.__version__}")
    print(f"the actor's accuracy      {found['actor_accuracy']:.1%}")
    print(f"the exported model's      {found['export_accuracy']:.1%}   (difference {found['difference']:+.2%})")
    print(f"identical completions     {found['identical_completions']:.1%}   (of the others {ties} are ties)")
    agrees = abs(found["difference"]) <= arguments.tolerance
    if not agrees:
        print(f"error: the accuracies differ by more than {arguments.tolerance:.1%}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(found))
    sys.exit(0 if agrees else 1)


def _continue_in_trl_environment() -> None:
    """Start this program again with the Python of .venv-trl, unless that is the one which runs it."""
    from trl_environment import ENVIRONMENT, EnvironmentFailed, ensure

    if Path(sys.prefix).resolve() == ENVIRONMENT.resolve():
        return
    try:
        python = ensure()
    except EnvironmentFailed as error:
        raise CourseError(str(error)) from None
    sys.stdout.flush()
    os.execv(python, [str(python), *sys.argv])


if __name__ == "__main__":
    main()
