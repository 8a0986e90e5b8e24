"""Worker of export_parity.py: greedy completions of an export by Transformers on torch.

    .venv-transformers4/bin/python dev/benchmarks/greedy_worker.py /tmp/job.json     # or .venv-trl

The export's own files say all that the reader knows: tokenizer, rotary embedding, end tokens.  The job is one JSON
object: `export`, `prompts`, `length` (tokens), `batch_size`, and `expected`, completions or null; of those that differ
from a completion, the worker says how far apart the two first tokens that differ are, in nats.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import job as jobs


def decode(job: dict[str, Any]) -> dict[str, Any]:
    """`completions`, without the end token, `prompt_tokens`, `gaps` of those that differ, and `versions`."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    export = job["export"]
    tokenizer = AutoTokenizer.from_pretrained(export, padding_side="left", trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32, trust_remote_code=False).eval()
    named = model.generation_config.eos_token_id
    ends = named if isinstance(named, list) else [named]
    config = GenerationConfig(
        max_new_tokens=job["length"], do_sample=False, eos_token_id=ends, pad_token_id=tokenizer.pad_token_id
    )
    completions: list[str] = []
    for first in range(0, len(job["prompts"]), job["batch_size"]):
        batch = job["prompts"][first : first + job["batch_size"]]
        inputs = tokenizer(batch, return_tensors="pt", padding=True, add_special_tokens=False)
        inputs.pop("token_type_ids", None)
        with torch.inference_mode():
            output = model.generate(**inputs, generation_config=config)
        for ids in output[:, inputs["input_ids"].shape[1] :].tolist():
            end = next((place for place, token in enumerate(ids) if token in ends), len(ids))
            completions.append(tokenizer.decode(ids[:end]))

    def gap(prompt: str, one: str, other: str) -> float:
        texts = (f"{prompt}{text}{tokenizer.eos_token}" for text in (one, other))
        a, b = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        if at is None:  # one ends where the other goes on, at a limit of length
            return float("inf")
        with torch.inference_mode():
            logits = model(torch.tensor([a[:at]])).logits[0, -1]
        return abs(float(logits[a[at]] - logits[b[at]]))

    expected = job["expected"] or completions
    trios = zip(job["prompts"], expected, completions, strict=True)
    result: dict[str, Any] = {"completions": completions}
    result["gaps"] = [gap(prompt, one, other) for prompt, one, other in trios if one != other]
    result["prompt_tokens"] = tokenizer(job["prompts"], add_special_tokens=False)["input_ids"]
    result["classes"] = {"tokenizer": type(tokenizer).__name__, "model": type(model).__name__}
    result["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path, help="file made by export_parity.py")
    arguments = parser.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRANSFORMERS_VERBOSITY="error")
    with jobs.only_result_on_stdout() as stdout:
        print(json.dumps(decode(json.loads(arguments.job.read_text(encoding="utf-8")))), file=stdout)


if __name__ == "__main__":
    main()
