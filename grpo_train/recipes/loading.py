"""Read recipes from YAML: profiles, `section.key=value` overrides, errors.

recipe = load_recipe("recipes/tiny-cpu.yaml", ["training.steps=2", "problems.source=gsm8k"])
"""

import difflib
import re
import reprlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from grpo_lib.common import environment
from grpo_lib.common.errors import CourseError, first_line
from grpo_lib.common.files import has_half_a_character
from grpo_train.recipes import batch_plan
from grpo_train.recipes.removed import REMOVED
from grpo_train.recipes.schema import ProblemsRecipe, Recipe, TaskRecipe, TemperatureSchedule

RECIPES = "recipes"  # the folder of the shipped ones
FOLDERS = ("published", "lessons")  # those in it
TINY = f"{RECIPES}/tiny-cpu.yaml"  # the course's own recipe
ELSEWHERE = "no recipes are here: they are in the course's repository, in recipes/; give the path of a file"
# Kinds of `problems` and of `rollout.temperature`; pydantic's errors name them after the key.
KINDS = {"section": ProblemsRecipe, "list": TaskRecipe, "schedule": TemperatureSchedule}
# Other parts of its places that are not in the file.
PYDANTICS = re.compile(r"constrained-|literal\[|function-|list\[|\[key\]|(int|float|str|bool|number)$")
LARGEST = 2**17  # bytes of a recipe file; those here have up to 2**13
MOST_MERGED = 100_000  # keys of a recipe, merge keys counted as often as they are used
MOST_ERRORS = 10  # that are explained at once
SHORT = reprlib.Repr(maxstring=100, maxother=100, maxlong=100)
PLAIN = {
    "model_type": "it is a section: give its keys, such as training.steps=2, or a mapping",
    "list_type": "it is a list: write it in brackets, such as rewards=[correct_answer]",
}
ONE_DEVICE = "hardware.trainer_devices=1"  # on any slice: the tiny model gains nothing from more


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file and apply `section.key=value` overrides (values are YAML; the last one wins).

    `path` is found as `find_recipe` says.

    `FILE.yaml@PROFILE` applies the changes under `profiles: PROFILE:` in the file, and adds the profile to the
    recipe's name; `@ONE,OTHER` applies both, in that order.

    Args: overrides as a list, or as one text in which spaces are between them.

    Raises:
      CourseError: the file is missing or not YAML, or a key or value is not in the schema.
    """
    file, _, chosen = str(path).partition(".yaml@")
    path = find_recipe(f"{file}.yaml" if chosen else path)
    data = _read(path)
    profiles = data.pop("profiles", None) or {}
    if not isinstance(profiles, dict) or not all(isinstance(changes, dict) for changes in profiles.values()):
        raise CourseError(f"{path}: profiles must be a mapping from names to changes")
    for name in filter(None, chosen.split(",")):
        if name not in profiles:
            raise CourseError(f"{path} has no profile {name}; profiles there: {', '.join(profiles) or 'none'}")
        _merge(data, profiles[name])
        data["name"] = f"{data.get('name')}-{name}"
    for override in overrides.split() if isinstance(overrides, str) else overrides:
        _apply_override(data, override)
    return parse_recipe(data, origin=str(path))


def find_recipe(path: str | Path) -> Path:
    """Return a file as it is named, or a shipped recipe that is named with another of its folders, or with none.

    recipes/lessons/tiny-hard.yaml is also recipes/tiny-hard.yaml and tiny-hard.yaml, wherever one stands.  A path of
    which no file is there is returned as it is.
    """
    path = Path(path)
    shipped = environment.repo_root() / RECIPES
    if path.exists() or path.parent.name not in ("", RECIPES, *FOLDERS):
        return path
    places = (shipped / folder / path.name for folder in ("", *FOLDERS))
    return next((place for place in places if place.is_file()), path)


def shipped_recipes() -> list[Path]:
    """The files of the shipped recipes: those that one starts from, then the others by folder."""
    shipped = environment.repo_root() / RECIPES
    return [file for folder in ("", *FOLDERS) for file in sorted((shipped / folder).glob("*.yaml"))]


def profiles_of(path: str | Path) -> list[str]:
    """Names of the profiles in a recipe file."""
    return list(_read(find_recipe(path)).get("profiles") or {})


def parse_recipe(data: dict, origin: str = "recipe") -> Recipe:
    """Validate a mapping.  Raises CourseError with one sentence per wrong field."""
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        found = error.errors()
        sentences = [_explain(one) for one in found[:MOST_ERRORS]]
        if len(found) > MOST_ERRORS:
            sentences.append(f"and {len(found) - MOST_ERRORS} more")
        raise CourseError(f"{origin}: {'; '.join(sentences)}") from None


def dump_recipe(recipe: Recipe, encoding: str = "utf-8") -> str:
    """The resolved recipe as YAML: every field, defaults included.

    Args:
      encoding: of where it is going; what that cannot hold is escaped, and is read as the same recipe.
    """
    data = recipe.model_dump(mode="json")
    text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return yaml.safe_dump(data, sort_keys=False, allow_unicode=False)
    return text


def plan_table(recipe: Recipe) -> str:
    """The batch plan as text, given and derived sizes side by side."""
    text = batch_plan.table(recipe.plan, recipe.batch_given)
    if recipe.hardware.accelerator or recipe.hardware.trainer_devices:
        return text
    return f"{text}\ncounted on one device: the recipe uses the devices that JAX finds"


def differences(one: Recipe, other: Recipe) -> list[str]:
    """Fields in which two recipes differ, as `section.key: a != b`."""
    return [f"{key}: {a} != {b}" for key, (a, b) in changed_values(one, other).items()]


def changed_values(one: Recipe, other: Recipe) -> dict[str, tuple[Any, Any]]:
    """Fields in which two recipes differ: section.key -> (value of one, value of the other); None: it has no such."""
    a, b = _flatten(one.model_dump(mode="json")), _flatten(other.model_dump(mode="json"))
    return {key: (a.get(key), b.get(key)) for key in {**a, **b} if a.get(key) != b.get(key)}


def plain_settings(recipe: Recipe) -> Any:
    """Settings of grpo_lib.plain_grpo.  Raises CourseError where the recipe has a switch that plain_grpo has not."""
    from grpo_lib.plain_grpo import Settings  # imports JAX

    names = [field.name for field in fields(Settings)]
    changed = {
        "grpo": recipe.grpo.model_dump(exclude_defaults=True),
        "lora": recipe.lora.model_dump(exclude_defaults=True),
        "training": recipe.training.model_dump(
            include={"schedule", "schedule_steps", "optimizer"}, exclude_defaults=True
        ),
        "prompts": recipe.prompts.model_dump(exclude={"system"}, exclude_defaults=True),
        "rollout": recipe.rollout.model_dump(include={"top_k", "top_p"}, exclude_defaults=True),
    }
    missing = [f"{section}.{key}" for section, keys in changed.items() for key in keys if key not in names]
    missing += ["a list of problems"] if recipe.tasks else []
    missing += ["a schedule of rollout.temperature"] if recipe.rollout.has_schedule else []
    if missing:
        raise CourseError(f"plain_grpo does not have {missing[0]}; leave it at its default, or use grpo train")
    values = recipe.training.model_dump() | recipe.grpo.model_dump() | recipe.rollout.model_dump()
    values |= {"rewards": tuple(recipe.rewards), "system": recipe.prompts.system, "seed": recipe.seed}
    values["prompts_per_step"] = recipe.plan.prompts_per_step  # also where the recipe gives it per device
    return Settings(**{name: values[name] for name in names})


def demo_recipe(path: str | Path, overrides: Sequence[str] = (), changes: Sequence[str] = ()) -> Recipe:
    """The recipe of the notebooks' demonstrations: this one if its model fits them, else the course's tiny recipe.

    A demonstration loads the model a second time, breaks it, or trains it at ten times the learning rate.  That needs a
    second implementation next to MaxText's (Tunix's Qwen3), float32, so that rounding is much smaller than an error,
    and a sampler that can exist several times in a process.  A vLLM engine reserves the memory of its devices.  And its
    base must earn some reward as it is, without a cold start.

    Args:
      overrides: of the recipe that is named, as `load_recipe` takes them; the tiny recipe does not get them.
      changes: overrides of the demonstration, which either recipe gets.
    """
    own = overrides.split() if isinstance(overrides, str) else overrides
    if _fits_demonstrations(load_recipe(path, own)):
        return load_recipe(path, [*own, *changes])
    return load_recipe(environment.repo_root() / TINY, [ONE_DEVICE, *changes])


def demo_reason(path: str | Path, overrides: Sequence[str] = ()) -> str:
    """A sentence about the choice of `demo_recipe`."""
    recipe = load_recipe(path, overrides)
    if _fits_demonstrations(recipe):
        return f"model of the demonstrations: the recipe's own model, {recipe.model.path}"
    why = (
        "it is sampled by vLLM"
        if recipe.rollout.engine == "vllm"
        else "it needs a cold start"
        if recipe.training.cold_start
        else f"it is in {recipe.model.dtype}"
    )
    return f"model of the demonstrations: the course's tiny model ({TINY}), not the recipe's own, because {why}"


def _fits_demonstrations(recipe: Recipe) -> bool:
    return recipe.rollout.engine == "tunix" and recipe.model.dtype == "float32" and not recipe.training.cold_start


def _read(path: Path) -> dict:
    try:
        with open(path, "rb") as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise CourseError(f"recipe {path} has over {LARGEST // 1024} kB, which no recipe has; give a recipe file")
        data = yaml.load(content.decode("utf-8"), _RecipeLoader)
    except FileNotFoundError:
        names = ", ".join(str(file.relative_to(environment.repo_root())) for file in shipped_recipes())
        raise CourseError(f"recipe {path} does not exist; {f'recipes here: {names}' if names else ELSEWHERE}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise CourseError(f"recipe {path} cannot be read as YAML: {first_line(error)}") from None
    if not isinstance(data, dict):
        raise CourseError(f"recipe {path} must be a YAML mapping, with at least the keys name and model")
    return data


class _RecipeLoader(yaml.SafeLoader):
    """YAML's safe loader, which refuses four things with a YAMLError.

    It would take the last of several values of a key without a word, end with an error of Python for a scalar that only
    looks like a date or a number, copy without end where merge keys (<<) are nested, and take "\\ud800", half a
    character, which no file can hold.
    """

    def __init__(self, stream: Any):
        super().__init__(stream)
        self.merged = 0  # keys of all mappings, as often as they are merged

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        own = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        times = Counter(key.value for key in own if isinstance(key, yaml.ScalarNode))
        for name, number in times.items():
            if number > 1:
                raise yaml.YAMLError(f"the key {name} is there {number} times; leave one")
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, ValueError) as error:
            if not isinstance(node, yaml.ScalarNode):
                raise
            kind = node.tag.rpartition(":")[2]
            reason = first_line(error) if isinstance(error, ValueError) else "no such value"
            raise yaml.YAMLError(f"{SHORT.repr(node.value)} is no YAML {kind}: {reason}") from None

    def construct_scalar(self, node: yaml.ScalarNode) -> Any:
        value = super().construct_scalar(node)
        if has_half_a_character(str(value)):
            raise yaml.YAMLError(f"{SHORT.repr(value)} has half a character (\\ud800 to \\udfff); write a whole one")
        return value

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        self.merged += len(node.value)
        if self.merged > MOST_MERGED:
            raise yaml.YAMLError(f"merge keys (<<) make over {MOST_MERGED:,} keys of it; write the keys out")


def _flatten(data: dict, prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in data.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            value = {str(number): item for number, item in enumerate(value)}
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _merge(data: dict, changes: dict) -> None:
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(data.get(key), dict):
            _merge(data[key], value)
        else:
            data[key] = value


def _apply_override(data: dict, override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise CourseError(f"override {override!r} must read section.key=value, for example training.steps=2")
    try:
        value = yaml.load(text, _RecipeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise CourseError(f"override {SHORT.repr(override)}: the value is not YAML ({first_line(error)})") from None
    *sections, last = key.split(".")
    place: Any = data
    try:
        for name in sections:  # of a list, such as the tasks of `problems`, the number of an item
            place = place[int(name)] if isinstance(place, list) else place.setdefault(name, {})
        place[int(last) if isinstance(place, list) else last] = value
    except (ValueError, IndexError):
        raise CourseError(
            f"override {SHORT.repr(override)}: no such item; number them from 0 to {len(place) - 1}"
        ) from None
    except (AttributeError, TypeError):
        raise CourseError(f"override {SHORT.repr(override)}: {SHORT.repr(place)} is a value, not a section") from None


def _explain(error: dict) -> str:
    loc = [part for part in error["loc"] if part not in KINDS and not PYDANTICS.match(str(part))]
    where = ".".join(map(str, loc))
    if error["type"] == "extra_forbidden":
        if where in REMOVED:
            return f"{where} was removed: {REMOVED[where]}"
        known = _known_keys(error["loc"][:-1])
        near = difflib.get_close_matches(str(loc[-1]), known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
        return f"unknown key {where}; {hint}"
    if error["type"] == "missing":
        return f"{where} is missing"
    message = PLAIN.get(error["type"], error["msg"]).removeprefix("Value error, ")[:1000]
    if not where:
        return message  # about several sections at once: the sentence names the fields
    given = f"={SHORT.repr(error['input'])}" if isinstance(error["input"], (str, int, float)) else ""
    return f"{where}{given}: {message}"


def _known_keys(loc: tuple) -> list[str]:
    section: Any = Recipe
    for part in loc:
        if part in KINDS:
            section = KINDS[part]
        elif isinstance(part, str):
            section = section.model_fields[part].annotation
            section = next((kind for kind in get_args(section) if hasattr(kind, "model_fields")), section)
    return [field.alias or name for name, field in section.model_fields.items()]
