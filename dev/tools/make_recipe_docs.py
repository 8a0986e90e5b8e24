"""Write docs/recipes.md from the recipe schema, and the table in docs/long-runs.md of the keys that may change when a
run continues: python dev/tools/make_recipe_docs.py
"""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from grpo_train.engines.model_files import IN_A_BUCKET, disk_use, vm_disk
from grpo_train.recipes import TINY, Recipe, continuing, load_recipe, profiles_of, shipped_recipes
from grpo_train.tpu.preflight import saved_results

PAGE = Path(__file__).resolve().parents[2] / "docs" / "recipes.md"
LONG_RUNS = PAGE.with_name("long-runs.md")
# Of the table there.
BEGIN = "<!-- Made from grpo_train/recipes/continuing.py by dev/tools/make_recipe_docs.py. -->\n"
END = "<!-- The end of the table. -->\n"

INTRO = """\
# Recipe keys

A recipe is one YAML file with everything about a run. It states what differs from the defaults; unknown keys and
wrong types are refused. The first table has the keys of the course's own recipe, which are enough to begin with; all
keys follow, by section, to look things up. This page is generated from the schema (`grpo_train/recipes/schema.py`) by
`python dev/tools/make_recipe_docs.py`.

## The keys of tiny-cpu.yaml

{first}
## Using recipes

- `grpo config RECIPE` prints the resolved recipe with every default, and the sizes of a step that follow from it.
- `section.key=value` after any command overrides a value: `grpo train recipes/tiny-cpu.yaml training.steps=2`.
- `RECIPE.yaml@NAME` applies the changes under `profiles: NAME:` in the file; `@ONE,OTHER` applies both, in that order.
- `recipes/` has the four to start from: the course's own, a real model for a CPU, one chip, and Llama-3.1-8B.
  `recipes/published/` has those that remake a published system, `recipes/lessons/` those that a notebook or an exercise
  uses. The comment at the top of each says what it is for and what it runs on. A recipe is found with and without
  its folder: `grpo config tiny-hard.yaml`.

## A prompt of your own

`prompts.user` is a text with `{question}` where the question stands, and `prompts.system` goes in front of it. With
`prompts.chat_template: false` both are sent as bare text, as a model without a chat template needs it. A prompt may end
with the beginning of the completion, such as `prompts.completion_prefix: <reasoning>`. Rewards, graders and records
then have that text in front of what the model wrote, so that a well continued form counts as whole; each record has it
in a field `completion_prefix`, too. `recipes/published/qwen3-1.7b-gsm8k-tunix.yaml` uses all of these. Either text may
be the name of a .txt or .md file with it.

## A reward of your own

`rewards: [my_reward.py:brief]` takes the function `brief` of a file; the path is relative to where the command is given
or to the repository. It gets keyword arguments, and returns one number for each completion:

```python
def brief(prompts, completions, answer, **kwargs):
    return [1.0 if len(text) < 400 else 0.0 for text in completions]
```

It may stand beside functions of the library; the values are added. Whatever the file does wrong is one line, most of it
before a model is loaded: `grpo train` calls the function on two problems first. A run keeps the SHA-256 of the file in
environment.json, and goes on with the same content alone. The file runs in the trainer's process, so take none that you
have not read. With `grpo_lib.rewards.reward_function` a function scores one completion and says why, which the report
shows (`recipes/published/qwen3_tunix_reward.py`). [own-data.md](own-data.md) trains with a table and a function of your
own, step by step.

## Batch sizes

Three sizes define a step, each over all processes and devices, or in place of that per device.

| size | key | or per device |
|---|---|---|
| prompts of a step | `training.prompts_per_step` | `training.prompts_per_step_per_device` |
| prompts sampled at once | `rollout.micro_batch_size` | `rollout.micro_batch_size_per_device` |
| completions per gradient computation | `training.micro_batch_size` | `training.micro_batch_size_per_device` |

With tensor parallelism several devices form one data-parallel replica, and "per device" is per replica: of the
sampler for `rollout`, of the trainer for `training`. A size is given in one of the two ways; that of a shipped recipe
is set to null first: `training.micro_batch_size=null training.micro_batch_size_per_device=1`.

A recipe whose micro-batches are given per device moves to a larger slice by one key, `hardware.accelerator`: its
step has the same prompts, in fewer and larger micro-batches. With prompts per device the step grows with the slice,
which is another training.

A step has `prompts_per_step × grpo.group_size` completions. `rollout.micro_batch_size` must divide the prompts of a
step, and `training.micro_batch_size` its completions, in whole groups and in equal parts for all replicas and
processes. If a size does not fit, the error lists the nearest values that do.
"""

DISK = """\
## Disk

What a run writes, in GB (10^9 bytes), for the recipes whose weights `grpo preflight` has counted. *Downloaded* goes to
`HF_HOME`; *base* is the converted model; *checkpoints* are those that are kept and one more, while it is written
(`training.max_to_keep`, `training.checkpoint_every`); for the *export* of adapters the whole weights are saved once
more. In a bucket (`training.checkpoints=gs://BUCKET/FOLDER`) the checkpoints take nothing here. `grpo train`,
`grpo convert` and `grpo self-check` refuse a disk that has less free than what is still to be written, notebooks 01 and
04, too. A Cloud TPU VM has 107 GB, of which 16 are kept: the packages take 8 (their cache, on the same disk, has the
same files), and the system the rest. A recipe for one host that writes more than the other 91 needs a bucket
([tpu-vm.md](tpu-vm.md#the-notebooks-in-your-browser)), and `grpo config` says so.

| recipe | weights, billions | downloaded | base | checkpoints | export | in all | needs a bucket |
|---|--:|--:|--:|--:|--:|--:|---|
"""


def main() -> None:
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")


def pages() -> dict[Path, str]:
    """The pages that this program writes, with their texts."""
    before, _, rest = LONG_RUNS.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return {PAGE: page(), LONG_RUNS: f"{before}{BEGIN}\n{continuing.table()}\n{END}{after}"}


def page() -> str:
    schema = Recipe.model_json_schema()
    parts = [
        INTRO.replace("{first}", _first_keys(schema)),
        DISK + _disk_rows(),
        "## All keys: top level\n",
        _table(schema, schema["$defs"]),
        *_sections(schema, schema["$defs"]),
    ]
    return "\n".join(parts) + "\n"


def _first_keys(schema: dict) -> str:
    """A row for each key that the course's own recipe sets, with its value there."""
    file = yaml.safe_load((PAGE.parents[1] / TINY).read_text(encoding="utf-8"))
    rows = ["| key | value there | meaning |", "|---|---|---|"]
    for name, value in file.items():
        if name == "profiles":
            continue
        if not isinstance(value, dict):
            rows.append(f"| `{name}` | `{json.dumps(value)}` | {schema['properties'][name]['description']} |")
            continue
        [(_, section), *_] = _sections_of(name, schema["properties"][name], schema["$defs"])
        for key, inner in value.items():
            rows.append(f"| `{name}.{key}` | `{json.dumps(inner)}` | {section['properties'][key]['description']} |")
    return "\n".join(rows) + "\n"


def _disk_rows() -> str:
    """A row for each recipe, and for each profile with other numbers."""
    weights = {result.name: result.parameters for result in saved_results()}
    rows: dict[tuple[str, ...], str] = {}
    for file in shipped_recipes():
        for path in (str(file), *(f"{file}@{profile}" for profile in profiles_of(file))):
            recipe = load_recipe(path)
            if recipe.name in weights:
                sizes = [size * weights[recipe.name] / 1e9 for size in disk_use(recipe).values()]
                cells = [f"{weights[recipe.name] / 1e9:.2f}", *(f"{size:.1f}" for size in (*sizes, sum(sizes)))]
                vm = vm_disk(recipe)
                cells.append("yes" if vm and IN_A_BUCKET in vm else "no" if vm else "–")
                rows.setdefault((file.stem, *cells), f"| {recipe.name} | {' | '.join(cells)} |")
    return "\n".join(rows.values()) + "\n"


def _sections(schema: dict, definitions: dict, prefix: str = "") -> list[str]:
    parts = []
    for name, field in schema["properties"].items():
        for title, section in _sections_of(name, field, definitions):
            intro = section.get("description", "").replace("\n", " ")
            parts += [f"## {prefix}{title}\n", f"{intro}\n", _table(section, definitions)]
            parts += _sections(section, definitions, f"{prefix}{name}.") if title == name else []
    return parts


def _sections_of(name: str, field: dict, definitions: dict) -> list[tuple[str, dict]]:
    """(title, section) of a field: none, one, or for a list of sections also the keys that only its items have."""
    refs = [(kind, kind.get("items", kind).get("$ref")) for kind in (field, *field.get("oneOf", []))]
    found = [(kind, definitions[ref.rpartition("/")[2]]) for kind, ref in refs if ref]
    if len(found) < 2:
        return [(name, section) for _, section in found]
    (_, section), (_, item) = sorted(found, key=lambda pair: "items" in pair[0])
    own = {key: value for key, value in item["properties"].items() if key not in section["properties"]}
    return [(name, section), (f"{name} as a list", item | {"properties": own})]


def _table(section: dict, definitions: dict) -> str:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in section["properties"].items():
        if "description" in field:
            default = f"`{json.dumps(field['default'])}`" if "default" in field else "required"
            rows.append(f"| `{name}` | {_type(field)} | {default} | {field['description']} |")
    return "\n".join(rows) + "\n"


def _type(field: dict) -> str:
    if "$ref" in field:
        return "section"
    if kinds := field.get("anyOf") or field.get("oneOf"):
        return " or ".join(map(_type, kinds))
    if values := field.get("enum", [field["const"]] if "const" in field else []):
        return ", ".join(f"`{value}`" for value in values)
    name = {"array": "list", "object": "mapping", "null": "`null`"}.get(field["type"], field["type"])
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{sign} {field[key]:g}" for key, sign in bounds.items() if key in field]
    return " ".join([name, ", ".join(limits)]).strip()


if __name__ == "__main__":
    main()
