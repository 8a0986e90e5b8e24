"""docs/estimates.md: estimates of published times, beside what was measured.  Made in two steps, each a commit.

    .venv/bin/python dev/tools/make_estimates.py predict      # assets/estimates/predictions.json, before comparing
    .venv/bin/python dev/tools/make_estimates.py compare      # docs/estimates.md, with assets/estimates/measured.yaml
    .venv/bin/python dev/tools/make_estimates.py compare --check

The programs' times are in assets/estimates/programs.json, so that nothing is compiled again.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

import yaml

from grpo_lib.common import environment
from grpo_lib.common.files import read_json, write_json_atomic, write_text_atomic
from grpo_train.recipes import load_recipe
from grpo_train.recipes.slices import CHIPS
from grpo_train.tpu import preflight
from grpo_train.tpu.estimate import Estimate, EstimatedPart
from grpo_train.tpu.op_costs import RATES

ROOT = environment.repo_root()
FOLDER = ROOT / "assets" / "estimates"
PAGE = ROOT / "docs" / "estimates.md"

Range = tuple[float, float]

INTRODUCTION = """\
# Estimates beside what others measured

`grpo preflight` estimates what a step takes on a TPU from the program that the compiler makes (libtpu {versions}).
No TPU was used here. This page puts estimates by the same method beside published times of other people's code;
`dev/tools/make_estimates.py` writes it from assets/estimates. Predictions and bars were committed before the
comparison, and misses stay. (The two rows of float32 attention, which are no blind ones, are an exception: their
measurements were committed two minutes before their predictions.)

## Predictions

Of the {blind} blind ones {held} are within their bar; {ranges} of them are ranges, and {inside} of these hold the
measurement. There are fewer predictions than rows: the last three of MLLM-JAX have one and the same. Two kinds of code
are here, both on v6e, so no time of another chip is among them:

- MLLM-JAX's GRPO of Qwen2.5-3B, near full length. Two layers are compiled and carried on to all 36, and attention's
  kernel is counted by hand.
- MaxText's steps of pre-training that tpu-recipes publishes, compiled whole with the published settings
  (`dev/tools/compile_published.py`; assets/estimates/published.yaml says what differs) by a newer MaxText and JAX
  than the measured ones. Attention's kernel counts with the bundles of its loops, listed without the segment ids that
  the compiled steps have; with them, listed after the comparison (`--kernel`), it has 8 % more (16,867 and 24,055 in
  place of 15,151 and 23,206), which is 2 % of the 8B's step. Copies to the host count with nothing. Measured is
  {least:.2f} to {most:.2f} times the estimate. The order of commits proves little here: predictions and times are
  minutes or seconds apart, and Mistral's time stood on this page before.

Of a recipe the whole program is compiled, too, and kernels count with their bytes.

- *Seen*: the method was made with this measurement known. No constant was fitted to it, but the share of attention's
  kernel was counted knowing it.
- *Repeat*: the same quantity as a seen one, of another run or commit. It says how much a measurement varies.
- *Blind*: not used to make the method; whoever wrote the cases had read the measurement. MLLM-JAX's are of the code and
  the compiled programs that the seen ones are of, so they are one witness rather than many. Of MaxText's, Mistral-7B
  and the 8B on v6e-16 have the settings of the seen one; the 70B has bfloat16 weights, and does not offload out_proj.
- A range comes from lengths that were not published: at the high end every batch goes on to the limit of tokens, and
  the low end is a guess. Neither is a bound of the time. A case is within its bar when the measurement lies in the
  range, above it by no more than that share, or below it by as large a factor (30 %: ÷ 1.3). Bars were committed
  before the blind predictions; they are no error bounds.
- The column of ratios has measured / high end, then measured / low end, both of numbers that are not rounded.
"""
SLICE_PAGE = "https://cloud.google.com/tpu/docs/v6e"
BOOK = "https://github.com/jax-ml/scaling-book/blob/04d8de58b9f64e2d6cc1df469b8a36f506a0138d/tpus.md"
RATES_OF = f"""\
Peaks and bandwidths are the vendor's. A link: v6e has 3,200 Gbit/s over 4 ports ([Cloud TPU]({SLICE_PAGE})), which is
the one-way rate of the [scaling book]({BOOK}), as are the others. The clock is what peak and matrix units imply.
"""
NO_ESTIMATE = """\
These have no estimate. Their preflights were stored before there were estimates. The command makes one by compiling
at full effort ({took}); with `--output assets/preflight/NAME.json` it is stored. `dev/tools/estimate_stored.py NAME`
adds it to the stored preflight with less to compile, where the program is still the stored one (docs/tpu.md names four
where it is not). Where decoding is by vLLM the command estimates the update, and no step: for a budget run ten steps on
the slice, or look at a recipe that decodes with Tunix.
"""


RECIPES = """\
From `assets/preflight`. First number: every completion has a third of the longest length; second: all have all of it;
likely: a third on average, and one of each batch has all of it. Plan with this one; docs/tpu.md says what is left out.
≥: decoding is vLLM's, of which only the time to read the weights is known: no step and no run is made of a bound. For
comparison: where Tunix's sampler was compiled, decoding takes {over} times that bound. Run: all steps, two evaluations
and the validations, where their problems are counted.

Traffic between chips counts as the schedule has it; nobody has measured one of these recipes. {estimated} of the
{stored} stored preflights have an estimate so far, {steps} of them with a step. Rows of one model are not the same
run; compare slices with `grpo preflight RECIPE --compare hardware.accelerator=…`. Decoding of Qwen3-0.6B takes longer
than that of Qwen2.5-0.5B since its KV cache is nine times as large (8 heads of 128 in 28 layers, for 2 of 64 in 24).
Why the update of its adapters takes longer than that of all weights of 0.5B was not found: trust that number least.
"""


def predict(cases: dict[str, Any], programs: dict[str, Any]) -> dict[str, Range]:
    """Seconds of each case whose programs are there."""
    predictions = {}
    for name, case in cases.items():
        if all(part["program"] in programs for part in case["parts"]):
            parts = [_part(part, programs) for part in case["parts"]]
            predictions[name] = tuple(sum(ends) for ends in zip(*parts, strict=True))
    return predictions


def _part(part: dict[str, Any], programs: dict[str, Any]) -> Range:
    program = programs[part["program"]]
    if "whole" in program:  # compile_published.py
        return program["whole"]["seconds"], program["whole"]["seconds"]
    seconds = _whole(program, part["layers"], in_loop="tokens" in part)
    if kernels := part.get("kernels"):
        seconds += _kernels(programs[kernels]) * part["layers"]
    low, high = part.get("tokens", (1, 1))
    times = part.get("times", 1)
    return times * low * seconds, times * high * seconds


def _whole(program: dict[str, Any], layers: int, *, in_loop: bool) -> float:
    """Seconds with all layers: what two layers take, and as much for each further one as the second."""
    return _seconds(program["two_layers"], in_loop) + (layers - 2) * program["a_layer"]


def _seconds(time: dict[str, Any], in_loop: bool) -> float:
    return time["open_loops"][0] if in_loop else time["seconds"]


def _kernels(kernel: dict[str, Any]) -> float:
    """Seconds of a layer's kernels: the bundles of their loops, a cycle each, as often as the loops turn."""
    cycles = kernel["rows"] * kernel["turns"] * sum(kernel["bundles"]) * kernel["share"]
    return cycles / RATES[kernel["generation"]].clock


def page(cases: dict[str, Any], predictions: dict[str, Range], measured: dict[str, Any], programs: Any) -> str:
    """docs/estimates.md."""
    rows = list(_rows(cases, predictions, measured))
    blind = [row for row in rows if row["kind"] == "blind"]
    held = [row for row in blind if row["held"]]
    versions = ", ".join(sorted({program["libtpu"] for program in programs.values() if "libtpu" in program}))
    ranges = [row for row in blind if row["low"] < row["high"]]
    inside = [row for row in ranges if row["low"] <= row["measured"] <= row["high"]]
    over = [row["measured"] / row["high"] for row in rows if "pre-training" in row["title"]]
    counts = {"blind": len(blind), "held": len(held), "ranges": len(ranges), "inside": len(inside)}
    counts |= {"least": min(over), "most": max(over)}
    begin = INTRODUCTION.format(versions=versions, **counts)
    table = ["| what | | estimate, s | measured, s | measured / estimate | bar | |", "|---|---|--:|--:|--:|--:|---|"]
    table += [_line(row) for row in rows]
    left_out = ["", "Left out of all estimates: prefill, host work, rewards, the first step's compilation."]
    not_made = yaml.safe_load((FOLDER / "not_made.yaml").read_text(encoding="utf-8"))
    sections = {
        "Published times without a prediction": [f"- {reason}" for reason in not_made],
        "Sources of the measurements": [f"- {row['title']}: {row['source']}" for row in rows],
        "The rates that are used": _rates(),
        "Estimates of the recipes": _recipes(),
    }
    lines = [begin, *table, *left_out]
    for title, text in sections.items():
        lines += ["", f"## {title}", "", *text]
    return "\n".join(lines) + "\n"


def _rows(cases: dict[str, Any], predictions: dict[str, Range], measured: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name, case in cases.items():
        if name not in predictions or name not in measured:
            continue
        low, high = predictions[name]
        seconds = measured[name]["seconds"]
        nearer = min(max(seconds, low), high)
        held = 1 / (1 + case["bar"]) <= seconds / nearer <= 1 + case["bar"]
        numbers = {"low": low, "high": high, "measured": seconds, "held": held}
        yield {**case, **numbers, "source": measured[name]["source"]}


def _line(row: dict[str, Any]) -> str:
    low, high, measured = row["low"], row["high"], row["measured"]
    same = low == high
    predicted = f"{low:.3g}" if same else f"{low:.3g} to {high:.3g}"
    ratio = f"{measured / high:.2f}" if same else f"{measured / high:.2f} to {measured / low:.2f}"
    verdict = "within the bar" if row["held"] else "**missed**"
    if not same:
        verdict = "in the range" if low <= measured <= high else f"outside the range, {verdict}"
    return f"| {row['title']} | {row['kind']} | {predicted} | {measured:.4g} | {ratio} | {row['bar']:.0%} | {verdict} |"


def _rates() -> list[str]:
    """A table of chips."""
    lines = [
        RATES_OF,
        "| chip | TFLOP/s | memory, GB/s | a link, one way, GB/s | clock, GHz |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, rates in RATES.items():
        chip = CHIPS[name]
        numbers = (chip.flops / 1e12, chip.bandwidth / 1e9, rates.link / 1e9, rates.clock / 1e9)
        lines.append(f"| {name} | {' | '.join(f'{number:,.4g}' for number in numbers)} |")
    return lines


def _recipes() -> list[str]:
    """Each stored preflight: its estimate, or why it has none."""
    results = preflight.saved_results()
    estimated = [result.estimate for result in results if result.estimate]
    steps = sum(estimate.step is not None for estimate in estimated)
    counts = {"estimated": len(estimated), "stored": len(results), "steps": steps}
    lines = [
        *RECIPES.format(over=_over_bounds(results), **counts).splitlines(),
        "",
        "| recipe | slice | steps × completions, longest | trains | update, s | decoding, s | step, s | run, hours "
        "| chip-hours |",
        "|---|---|---|---|--:|--:|--:|--:|--:|",
    ]
    missing = []
    for result in results:
        if not (found := result.estimate):
            missing.append(result)
            continue
        whole = (found.step, found.run_hours, found.chip_hours)
        times = [str(found.update), _decoding(found).shown, *(each.planned if each else "-" for each in whole)]
        cells = [*_size(result), *times]
        lines.append(f"| {result.name} | {result.accelerator} | {' | '.join(cells)} |")
    return [*lines, "", *_without(missing, preflight.compiling_took(results))] if missing else lines


def _decoding(estimate: Estimate) -> EstimatedPart:
    return next(part for part in estimate.parts if part.name == preflight.roofline.DECODING)


def _over_bounds(results: list[preflight.Result]) -> str:
    """Estimated decoding over the bound by the weights, from the least to the most."""
    ratios = []
    for result in results:
        if result.estimate and result.lower_bound and not _decoding(result.estimate).is_bound:
            ratios.append(_decoding(result.estimate).seconds.high / result.lower_bound.parts[0].seconds)
    return f"{min(ratios):.1f} to {max(ratios):.1f}"


def _size(result: preflight.Result) -> list[str]:
    """Steps, completions and longest length of a stored recipe, and what it trains."""
    recipe = load_recipe(ROOT / result.command.removeprefix("grpo preflight "))
    completions = f"{recipe.training.steps:,} × {recipe.plan.completions_per_step}"
    trains = "adapters" if recipe.lora.rank else "all weights"
    return [f"{completions}, {recipe.rollout.max_completion_length:,} tokens", trains]


def _without(results: list[preflight.Result], took: str) -> list[str]:
    """The stored preflights that have no estimate: why not, and what makes one."""
    lines = [
        NO_ESTIMATE.format(took=took),
        "| recipe | slice | decoding by | why not, or what makes one |",
        "|---|---|---|---|",
    ]
    for result in results:
        kinds = {program.kind for program in result.programs}
        by = "Tunix" if "decode" in kinds else "vLLM"
        why = result.not_estimated or f"`{result.command}`"
        lines.append(f"| {result.name} | {result.accelerator} | {by} | {why} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["predict", "compare"])
    parser.add_argument("--check", action="store_true", help="only say whether the file would change")
    arguments = parser.parse_args()
    cases = yaml.safe_load((FOLDER / "cases.yaml").read_text(encoding="utf-8"))
    programs = read_json(FOLDER / "programs.json", "")
    if arguments.what == "predict":
        write_json_atomic(FOLDER / "predictions.json", predict(cases, programs))
        return
    predictions = json.loads((FOLDER / "predictions.json").read_text(encoding="utf-8"))
    measured = yaml.safe_load((FOLDER / "measured.yaml").read_text(encoding="utf-8"))
    made = page(cases, predictions, measured, programs)
    if arguments.check:
        sys.exit(PAGE.read_text(encoding="utf-8") != made and "docs/estimates.md is not what make_estimates.py writes")
    write_text_atomic(PAGE, made)


if __name__ == "__main__":
    main()
