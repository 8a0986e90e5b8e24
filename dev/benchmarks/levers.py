"""What each lever gives to a step of the course's trainer: the same job with one thing changed at a time.

    python dev/benchmarks/levers.py                        # 4 prompts a step of recipes/smollm2-135m-cpu.yaml, 2 rounds
    python dev/benchmarks/levers.py --only plain pages --rounds 3 --json

Every variant is step_time.py's worker of the course, in a process of its own; they take turns, and a ratio is one
variant over `plain` of the same round.  `gap` is sampler_trainer_gap: the mean difference between the log-probability
that the sampler gave a token and the trainer's.  `without_…` takes out one of the forms that the course has for one
CPU: 1 over its ratio is what that form gives.  `half the rows` is no lever: it says what a row costs in the rollout,
and so what finished rows that leave the batch could save at most.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import step_time
from job import Job, machine, worker_main

RECIPE = "recipes/smollm2-135m-cpu.yaml"
STEPS = 5


@dataclass(frozen=True)
class Variant:
    """One change to the plain job."""

    text: str
    environment: dict[str, str] = field(default_factory=dict)  # set before the process starts
    changes: tuple[str, ...] = ()  # to the recipe
    without: str = ""  # one of WITHOUT


VARIANTS = {
    "plain": Variant("as the course trains"),
    "pages": Variant("large memory pages", {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}),
    "without_slots": Variant("attention of whole rows", without="slots"),
    "without_narrow": Variant("logits of prompts, too", without="narrow"),
    "scan": Variant("layers as a scan", without="unrolled"),
    "without_threads": Variant("argmax on one thread", without="threads"),
    "without_memory": Variant("freed memory kept up to 2 GiB", without="memory"),
    "without_kept": Variant("tokens scored again after they are drawn", without="kept"),
    "without_factor": Variant("gradients divided by their norm", without="factor"),
    "without_apart": Variant("all widths of rows of groups", without="apart"),
    "eigen": Variant("XLA without YNNPACK", {"XLA_FLAGS": "--xla_cpu_experimental_ynn_fusion_type="}),
    "onednn": Variant("XLA with oneDNN", {"XLA_FLAGS": "--xla_cpu_use_onednn=true"}),
    "scheduler": Variant(
        "XLA's scheduler for concurrency", {"XLA_FLAGS": "--xla_cpu_enable_concurrency_optimized_scheduler=true"}
    ),
    "vectors": Variant("XLA's vectors of 512 bits", {"XLA_FLAGS": "--xla_cpu_prefer_vector_width=512"}),
    "fast_math": Variant("XLA's fast mathematics", {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}),
    "bfloat16": Variant("bfloat16 computations", changes=("model.dtype=bfloat16",)),
    "half": Variant("half the rows", changes=("training.prompts_per_step=2",)),
}


def whole_attention() -> None:
    from grpo_train.losses import slots

    def never(self: slots.SlotSizes, width: int) -> bool:
        return False

    slots.SlotSizes.pays = never


def whole_head() -> None:
    from grpo_train.losses import hidden_states

    hidden_states.narrow_head = lambda module, places: False


def scanned_layers() -> None:
    from grpo_train.engines import cpu_speed

    cpu_speed.UNROLLED = 0


def plain_argmax() -> None:
    import jax.numpy as jnp

    from grpo_train.engines import cpu_speed

    cpu_speed.first_largest = lambda values: jnp.argmax(values, axis=-1)


def two_gibibytes() -> None:
    from grpo_lib.common import environment

    environment.KEEP_ALL = 2**31 - 1


def scored_again() -> None:
    from grpo_train.engines import tunix_sampler

    given = tunix_sampler.TunixSampler.generate

    def generate(self: tunix_sampler.TunixSampler, prompts: Any, rollout_config: Any, **more: Any) -> Any:
        return given(self, prompts, rollout_config, **more | {"scored": 0})

    tunix_sampler.TunixSampler.generate = generate


def divided_gradients() -> None:
    import optax

    from grpo_train.engines import optimizer

    optimizer.clip_by_global_norm = optax.clip_by_global_norm


def all_widths() -> None:
    from grpo_train.recipes import layouts

    layouts.NEAR = 0


WITHOUT: dict[str, Callable[[], None]] = {
    "": lambda: None,
    "slots": whole_attention,
    "narrow": whole_head,
    "unrolled": scanned_layers,
    "threads": plain_argmax,
    "memory": two_gibibytes,
    "kept": scored_again,
    "factor": divided_gradients,
    "apart": all_widths,
}


def train(job: Job) -> dict[str, Any]:
    """The course's worker, with the gap beside its times."""
    import course_grpo

    WITHOUT[os.environ["LEVERS_WITHOUT"]]()

    from grpo_train import training

    gaps: list[float] = []
    given = training.train

    def with_gaps(session: Any) -> list[dict[str, Any]]:
        rows = given(session)
        gaps.extend(row["sampler_trainer_gap"] for row in rows)
        return rows

    training.train = with_gaps
    return course_grpo.train(job) | {"gap": statistics.mean(gaps)}


def measure(variant: Variant, job_file: Path) -> dict[str, Any] | str:
    """Its result, or the last line of what it wrote where it does not run."""
    command = [sys.executable, __file__, "--worker", str(job_file)]
    more = variant.environment | {"LEVERS_WITHOUT": variant.without}
    done = subprocess.run(command, env=os.environ | more, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        return ([line for line in done.stderr.splitlines() if line.strip()] or ["no output"])[-1][:200]
    return json.loads(done.stdout.splitlines()[-1])


def summarize(rounds: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Per variant: medians in seconds, and its ratios to `plain`, round by round; or why it does not run."""
    rows = {}
    for name in rounds[0]:
        results = [round_[name] for round_ in rounds]
        failed = [result for result in results if isinstance(result, str)]
        if failed:
            rows[name] = {"text": VARIANTS[name].text, "failed": failed[0]}
            continue
        row: dict[str, Any] = {"text": VARIANTS[name].text}
        for column in ("seconds", "seconds_rollout", "seconds_update"):
            values = [statistics.median(result[column][1:]) for result in results]
            plain = [statistics.median(round_["plain"][column][1:]) for round_ in rounds]
            row[column] = round(statistics.median(values), 2)
            row[column + "_ratios"] = [round(a / b, 3) for a, b in zip(values, plain, strict=True)]
        for column in ("gap", "process_seconds", "peak_memory_gib"):
            row[column] = round(statistics.median(result[column] for result in results), 6)
        rows[name] = row
    return rows


def table(rows: dict[str, dict[str, Any]]) -> str:
    lines = [f"{'':32} {'s/step':>7} {'rollout':>8} {'update':>7} {'ratio to plain':>15} {'gap':>9} {'GiB':>5}"]
    for row in rows.values():
        if "failed" in row:
            lines.append(f"{row['text']:32} does not run: {row['failed']}")
            continue
        ratios = row["seconds_ratios"]
        seconds = f"{row['seconds']:7.2f} {row['seconds_rollout']:8.2f} {row['seconds_update']:7.2f}"
        between = f"{min(ratios):7.3f}–{max(ratios):.3f}"
        lines.append(f"{row['text']:32} {seconds} {between} {row['gap']:11.2e} {row['peak_memory_gib']:5.1f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="variants, plain among them"
    )
    parser.add_argument("--rounds", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or "plain" not in arguments.only:
        parser.error("--rounds must be 1 or more, and plain among the variants")

    from grpo_lib.common import environment

    environment.prepare()
    before = step_time.load_average()
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="levers-") as directory:
        files = {}
        for name in arguments.only:
            files[name] = Path(directory) / f"{name}.json"
            changes = ["training.prompts_per_step=4", *VARIANTS[name].changes]
            step_time.make_job(RECIPE, changes, STEPS).save(files[name])
        for number in range(1, arguments.rounds + 1):
            rounds.append({})
            for name, file in files.items():
                measured = measure(VARIANTS[name], file)
                rounds[-1][name] = measured
                if isinstance(measured, str):  # why it does not run
                    outcome = measured
                else:
                    outcome = f"{statistics.median(measured['seconds'][1:]):.2f} s per step"
                print(f"round {number}: {VARIANTS[name].text:32} {outcome}", file=sys.stderr, flush=True)
    rows = summarize(rounds)
    print(table(rows))
    if arguments.json:
        load = {"before": before, "after": step_time.load_average()}
        record = {"recipe": RECIPE, "steps": STEPS, "variants": rows, "machine": machine(), "load_average": load}
        print(json.dumps(record))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        del sys.argv[1]
        worker_main(train, __doc__)
    else:
        main()
