"""A recipe is one YAML file that says everything about a run: model, problems, rewards, GRPO, training.

    recipe = load_recipe("recipes/tiny-cpu.yaml", ["training.steps=2", "problems.source=gsm8k"])

The schema is closed: an unknown key or a wrong type is refused with the name of the field.  The defaults are the
values that most runs share; a recipe file states what it changes.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from grpo_lib import batch_plan
from grpo_lib.accelerators import Slice, parse_slice
from grpo_lib.batch_plan import BatchPlan
from grpo_lib.errors import CourseError

# Sizes that MaxText lets a config override.
Size = Literal[
    "base_emb_dim", "base_mlp_dim", "base_num_decoder_layers", "base_num_query_heads", "base_num_kv_heads",
    "head_dim", "vocab_size", "logits_via_embedding",
]  # fmt: skip
Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ModelRecipe(_Section):
    """Which weights, and which MaxText architecture reads them."""

    path: str = Field(description="Hugging Face directory with weights and tokenizer, or a hub name")
    maxtext_name: str = Field(description="MaxText model_name of the same architecture; sizes come from config.json")
    sizes: dict[Size, int | bool] = Field({}, description="MaxText size keys that differ from those of maxtext_name")
    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: Literal["minimal", "full"] = "minimal"


class HardwareRecipe(_Section):
    """Which slice, and which of its devices train and sample.  A device is a chip (v4 and v5p: two cores as one).

    Without an accelerator the recipe takes the devices that JAX finds.  Trainer and sampler spread over shares of their
    devices: trainer_tensor, or sampler_tensor, devices hold one copy of the model and work on one part of a batch.
    """

    accelerator: str | None = Field(None, description="Cloud TPU slice such as v6e-8; null: what JAX finds")
    trainer_devices: Positive | None = Field(None, description="null: all of them")
    trainer_tensor: Positive = Field(1, description="tensor parallelism of the trainer; the rest is fsdp")
    sampler_devices: Positive | None = Field(
        None, description="devices of the sampler alone; null: it shares the trainer's (colocated)"
    )
    sampler_tensor: Positive | None = Field(
        None, description="tensor parallelism of the sampler; the rest of its devices are replicas; null: all of them"
    )
    processes: Positive | None = Field(None, description="one to a host; null: the hosts of the accelerator, or 1")

    @property
    def slice(self) -> Slice | None:
        return parse_slice(self.accelerator) if self.accelerator else None

    @property
    def colocated(self) -> bool:
        return self.sampler_devices is None

    def trainer_count(self, found: int | None = None) -> int:
        """Devices that train; `found` is how many there are where the recipe names no accelerator."""
        return self.trainer_devices or (self.slice.devices if self.slice else found or 1)

    def sampler_count(self, found: int | None = None) -> int:
        return self.sampler_devices or self.trainer_count(found)

    @property
    def devices_known(self) -> bool:
        """Whether the recipe itself says how many devices train."""
        return bool(self.accelerator or self.trainer_devices)

    def process_count(self) -> int:
        return self.processes or (self.slice.hosts if self.slice else 1)

    @model_validator(mode="after")
    def _devices_fit(self) -> HardwareRecipe:
        if not self.accelerator:
            return self
        have, trainer, sampler = self.slice.devices, self.trainer_count(), self.sampler_count()
        want = trainer if self.colocated else trainer + sampler
        if want > have or (not self.colocated and self.trainer_devices is None):
            raise ValueError(
                f"trainer_devices={self.trainer_devices} and sampler_devices={self.sampler_devices} do not fit the "
                f"{have} devices of {self.accelerator}: give both, {have} or fewer together"
            )
        for name, parts, whole in (
            ("trainer_tensor", self.trainer_tensor, trainer),
            ("sampler_tensor", self.sampler_tensor or sampler, sampler),
        ):
            if whole % parts:
                ways = batch_plan.listed(batch_plan.divisors(whole))
                raise ValueError(f"{name}={parts} must divide its {whole} devices: use {ways}")
        return self


class ProblemsRecipe(_Section):
    """Which problems.  Counts are upper limits; null means all, or 20,000, 500 and 1,000 generated word problems."""

    source: Literal["words", "gsm8k"] = "words"
    path: str | None = Field(
        None, description="gsm8k: folder with train.jsonl and test.jsonl; null: tensorflow-datasets"
    )
    train: Positive | None = None
    validation: Positive | None = None
    test: Positive | None = None
    seed: NonNegative = Field(0, description="seed of the word-problem generator, not of the training order")


class PromptsRecipe(_Section):
    """What stands around a question.  `system: default` is grpo_lib.prompts.SYSTEM_PROMPT."""

    system: str = "default"


class VllmRecipe(_Section):
    """The vLLM engine of `rollout.engine: vllm`.  Names in brackets are vLLM's own."""

    memory_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.2, description="of a device's memory, for weights and KV cache of the sampler (gpu_memory_utilization)"
    )
    max_sequences: Positive = Field(128, description="sampled at once, per replica (max_num_seqs)")
    block_size: Positive | None = Field(None, description="tokens in a page of the KV cache; null: vLLM's choice")
    kv_blocks: Positive | None = Field(
        None, description="pages of the KV cache (num_gpu_blocks_override); null: what memory_fraction leaves"
    )


class RolloutRecipe(_Section):
    """How completions are sampled.  Lengths are in tokens.

    A step is sampled in passes, one after the other.  At most one of the two sizes of a pass is given; neither: the
    whole step in one pass.
    """

    engine: Literal["tunix", "vllm"] = Field("tunix", description="tunix: Qwen3 on any machine; vllm: on a TPU")
    vllm: VllmRecipe = VllmRecipe()
    prompts_per_pass: Positive | None = Field(None, description="all processes together")
    prompts_per_device: Positive | None = Field(
        None, description="of a pass, to a share of the sampler: sampler devices / sampler_tensor are the shares"
    )
    max_prompt_length: Positive | Literal["auto"] = Field("auto", description="auto: the longest prompt of the run")
    overlong_prompts: Literal["refuse", "skip"] = Field(
        "refuse", description="training problems whose prompt is longer: refuse the run, or leave them out and say so"
    )
    max_completion_length: Positive = 512
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Positive | None = None


class GRPORecipe(_Section):
    """The algorithm, in the letters of the GRPO paper (arXiv:2402.03300): G, mu, beta, epsilon."""

    group_size: Annotated[int, Field(ge=2)] = Field(8, description="G, completions per prompt")
    iterations: Positive = Field(1, description="mu, updates per batch of completions")
    beta: Annotated[float, Field(ge=0)] = Field(0.0, description="weight of the KL penalty; 0 needs no reference model")
    epsilon: Annotated[float, Field(gt=0, lt=1)] = Field(0.2, description="clip range of the probability ratio")


class LossRecipe(_Section):
    """How the policy loss is computed; the value is the same, the memory and the time are not."""

    implementation: Literal["jax", "chunked", "pallas"] = Field(
        "jax", description="jax: Tunix's own, from all logits; chunked: a few tokens at a time; pallas: a TPU kernel"
    )


class TrackingRecipe(_Section):
    """Weights & Biases, beside metrics.jsonl and TensorBoard.  The key is read from WANDB_API_KEY."""

    wandb: Literal["off", "offline", "online"] = "off"
    project: str = "grpo-hands-on"


class TrainingRecipe(_Section):
    """Batch and optimizer.

    Of the three sizes of a step one is given; none: 16 prompts per step.  Of the two sizes of a micro-batch, which is
    one gradient computation, at most one; neither: the whole step.
    """

    steps: Positive = 60
    prompts_per_step: Positive | None = Field(None, description="all processes together")
    prompts_per_process: Positive | None = Field(None, description="of a step, in each process")
    prompts_per_device: Positive | None = Field(
        None, description="of a step, to a share of the trainer: trainer devices / trainer_tensor are the shares"
    )
    micro_batch_size: Positive | None = Field(
        None, description="completions per gradient computation, all processes together; whole groups"
    )
    micro_batch_per_device: Positive | None = Field(
        None, description="completions per gradient computation, to a share of the trainer"
    )
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    warmup_steps: NonNegative = 5
    schedule: Literal["constant", "cosine"] = Field("constant", description="after the warm-up; cosine ends at 0")
    b1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    b2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    clip: Annotated[float, Field(gt=0)] = Field(1.0, description="global gradient norm is clipped to this")
    checkpoint_every: Positive = 20
    keep: Annotated[int, Field(ge=2)] = Field(2, description="checkpoints; the one before the last is a spare")
    checkpoints: str | None = Field(
        None, description="folder or gs:// address for checkpoints, which get the run's name there; null: in the run"
    )
    validate_every: NonNegative = Field(20, description="steps between looks at the validation problems; 0: never")

    @model_validator(mode="before")
    @classmethod
    def _prompts_by_default(cls, data: Any) -> Any:
        spelled = ("prompts_per_step", "prompts_per_process", "prompts_per_device")
        if isinstance(data, dict) and all(data.get(key) is None for key in spelled):
            return data | {"prompts_per_step": batch_plan.PROMPTS_PER_STEP}
        return data


class EvaluationRecipe(_Section):
    """Greedy evaluation.  `max_completion_length: null` takes the rollout's."""

    batch_size: Positive = 250
    max_completion_length: Positive | None = None


class Recipe(_Section):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    seed: NonNegative = 0
    model: ModelRecipe
    hardware: HardwareRecipe = HardwareRecipe()
    problems: ProblemsRecipe = ProblemsRecipe()
    prompts: PromptsRecipe = PromptsRecipe()
    rollout: RolloutRecipe = RolloutRecipe()
    rewards: Annotated[list[str], Field(min_length=1)] = [
        "match_format_exactly", "match_format_approximately", "check_answer", "check_numbers",
    ]  # fmt: skip
    grpo: GRPORecipe = GRPORecipe()
    loss: LossRecipe = LossRecipe()
    training: TrainingRecipe = TrainingRecipe()
    evaluation: EvaluationRecipe = EvaluationRecipe()
    tracking: TrackingRecipe = TrackingRecipe()

    @model_validator(mode="before")
    @classmethod
    def _micro_batch_in_completions(cls, data: Any) -> Any:
        """The key of before counted prompts.  Null said nothing, and stands in the recipe.yaml of many a run."""
        training = data.get("training") if isinstance(data, dict) else None
        if not isinstance(training, dict) or "micro_batch" not in training:
            return data
        prompts = training["micro_batch"]
        if prompts is not None:
            raise ValueError(_micro_batch_remedy(prompts, data.get("grpo")))
        return data | {"training": {key: value for key, value in training.items() if key != "micro_batch"}}

    @model_validator(mode="after")
    def _batch_divides(self) -> Recipe:
        if self._open_size:  # the rest is found when the devices are
            training, rollout = self.training, self.rollout
            batch_plan.check_spellings(
                (training.prompts_per_step, training.prompts_per_process, training.prompts_per_device),
                (rollout.prompts_per_pass, rollout.prompts_per_device),
                (training.micro_batch_size, training.micro_batch_per_device),
            )
        else:
            self._make_plan()
        return self

    @property
    def plan(self) -> BatchPlan:
        """Every size of a step.  A recipe that names no devices is counted on one device and one process.

        Raises CourseError where a size is given per device and the recipe names none.
        """
        if self._open_size:
            raise CourseError(f"{self._open_size} needs the devices: add hardware.trainer_devices or an accelerator")
        return self._plan_or_error()

    def plan_on(self, devices: int, processes: int = 1) -> BatchPlan:
        """The plan on what JAX finds: devices and processes, of the whole run.

        Raises CourseError where the batch does not divide there, or hardware.processes is another number.
        """
        if self.hardware.processes not in (None, processes):
            raise CourseError(
                f"hardware.processes={self.hardware.processes} and there are {processes} here: "
                "start as many, or set it to null"
            )
        return self._plan_or_error(devices, processes)

    @property
    def prompts_per_step(self) -> int:
        """Prompts of a step, all processes together, however the recipe says it."""
        return self.plan.prompts_per_step

    @property
    def completions_per_step(self) -> int:
        return self.plan.completions_per_step

    @property
    def micro_batch_completions(self) -> int:
        """Completions in one gradient computation, over all devices."""
        return self.plan.micro_batch_size

    @property
    def sampler_tensor(self) -> int:
        """Devices to a share of the sampler.  Tunix's own engine keeps the whole model on each."""
        return self._sampler_tensor()

    def _sampler_tensor(self, found: int | None = None) -> int:
        if self.rollout.engine == "tunix":
            return 1
        return self.hardware.sampler_tensor or self.hardware.sampler_count(found)

    @property
    def batch_given(self) -> dict[str, int]:
        """What the recipe says of a step's sizes: section.key -> value."""
        said = {
            "hardware.processes": self.hardware.processes,
            "grpo.group_size": self.grpo.group_size,
            "grpo.iterations": self.grpo.iterations,
            "rollout.prompts_per_pass": self.rollout.prompts_per_pass,
            "rollout.prompts_per_device": self.rollout.prompts_per_device,
            "training.prompts_per_step": self.training.prompts_per_step,
            "training.prompts_per_process": self.training.prompts_per_process,
            "training.prompts_per_device": self.training.prompts_per_device,
            "training.micro_batch_size": self.training.micro_batch_size,
            "training.micro_batch_per_device": self.training.micro_batch_per_device,
        }
        return {key: value for key, value in said.items() if value is not None}

    @property
    def _open_size(self) -> str | None:
        """A size that counts by the device in a recipe that names none."""
        if self.hardware.devices_known:
            return None
        return next((f"{key}={value}" for key, value in self.batch_given.items() if key.endswith("_per_device")), None)

    def _plan_or_error(self, devices: int | None = None, processes: int | None = None) -> BatchPlan:
        try:
            return self._make_plan(devices, processes)
        except ValueError as error:
            raise CourseError(str(error)) from None

    def _make_plan(self, found: int | None = None, processes: int | None = None) -> BatchPlan:
        """Args: the devices and the processes that there are; None: those that the recipe names."""
        hardware, rollout, training = self.hardware, self.rollout, self.training
        trainer, sampler = hardware.trainer_count(found), hardware.sampler_count(found)
        trainer_shards, sampler_shards, devices = 1, 1, found
        if found or hardware.devices_known:
            trainer_shards = _shares("trainer_tensor", trainer, hardware.trainer_tensor)
            sampler_shards = _shares("sampler_tensor", sampler, self._sampler_tensor(found))
            whole = trainer if hardware.colocated else trainer + sampler
            devices = hardware.slice.devices if hardware.slice else found or whole
        known = rollout.max_prompt_length != "auto"
        return batch_plan.make_plan(
            group_size=self.grpo.group_size,
            processes=processes or hardware.process_count(),
            devices=devices,
            trainer_shards=trainer_shards,
            sampler_shards=sampler_shards,
            prompts_per_step=training.prompts_per_step,
            prompts_per_process=training.prompts_per_process,
            prompts_per_device=training.prompts_per_device,
            rollout_prompts_per_pass=rollout.prompts_per_pass,
            rollout_prompts_per_device=rollout.prompts_per_device,
            micro_batch_size=training.micro_batch_size,
            micro_batch_per_device=training.micro_batch_per_device,
            updates_per_step=self.grpo.iterations,
            tokens_per_sequence=rollout.max_prompt_length + rollout.max_completion_length if known else None,
        )

    @property
    def evaluation_completion_length(self) -> int:
        return self.evaluation.max_completion_length or self.rollout.max_completion_length


def load_recipe(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Recipe:
    """Read a recipe file and apply `section.key=value` overrides (values are YAML, the later one wins).

    `FILE.yaml@PROFILE` takes the changes that the file keeps under `profiles: PROFILE:`, and adds the profile to the
    recipe's name; `@ONE,OTHER` takes both, in that order.

    Raises:
      CourseError: the file is missing or is not YAML, or a key or a value is not in the schema.
    """
    file, _, chosen = str(path).partition(".yaml@")
    path = Path(f"{file}.yaml") if chosen else Path(path)
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        found = ", ".join(sorted(str(p) for p in Path("recipes").glob("*.yaml"))) or "none"
        raise CourseError(f"recipe {path} does not exist; recipes here: {found}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise CourseError(f"recipe {path} cannot be read as YAML: {_first_line(error)}") from None
    if not isinstance(data, dict):
        raise CourseError(f"recipe {path} must be a YAML mapping, with at least the keys name and model")
    _apply_profiles(data, [name for name in chosen.split(",") if name], path)
    for override in overrides:
        _apply_override(data, override)
    return parse_recipe(data, origin=str(path))


def profiles_of(path: str | Path) -> list[str]:
    """Names of the profiles in a recipe file; CourseError as for `load_recipe`."""
    load_recipe(path)
    return list(yaml.safe_load(Path(path).read_text(encoding="utf-8")).get("profiles") or {})


def parse_recipe(data: dict, origin: str = "recipe") -> Recipe:
    """Validate a mapping.  Raises CourseError with one sentence per field that is wrong."""
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise CourseError(f"{origin}: " + "; ".join(_explain(e) for e in error.errors())) from None


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML: every field, defaults included."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def plan_table(recipe: Recipe) -> list[str]:
    """The batch plan in lines, given and derived sizes side by side; or the line that says what it lacks."""
    try:
        lines = batch_plan.table(recipe.plan, recipe.batch_given)
    except CourseError as error:
        return [f"batch plan: {error}"]
    if not recipe.hardware.devices_known:
        lines.append("counted on one device: the recipe takes those that JAX finds")
    return lines


def differences(one: Recipe, other: Recipe) -> list[str]:
    """Fields on which two recipes disagree, as `section.key: a != b`."""
    a, b = _flatten(one.model_dump(mode="json")), _flatten(other.model_dump(mode="json"))
    return [f"{key}: {a.get(key)} != {b.get(key)}" for key in {**a, **b} if a.get(key) != b.get(key)]


def _flatten(data: dict, prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in data.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _apply_profiles(data: dict, chosen: list[str], path: Path) -> None:
    profiles = data.pop("profiles", None) or {}
    if not isinstance(profiles, dict) or not all(isinstance(changes, dict) for changes in profiles.values()):
        raise CourseError(f"{path}: profiles must be a mapping from names to changes")
    for name in chosen:
        if name not in profiles:
            known = ", ".join(profiles) or "none"
            raise CourseError(f"{path} has no profile {name}; profiles there: {known}")
        _merge(data, profiles[name])
        data["name"] = f"{data.get('name')}-{name}"


def _merge(data: dict, changes: dict) -> None:
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(data.get(key), dict):
            _merge(data[key], value)
        else:
            data[key] = value


def _shares(name: str, devices: int, tensor: int) -> int:
    """Copies of the model over so many devices."""
    if devices % tensor:
        raise ValueError(
            f"hardware.{name}={tensor} must divide its {devices} devices: "
            f"use {batch_plan.listed(batch_plan.divisors(devices))}"
        )
    return devices // tensor


def _micro_batch_remedy(prompts: Any, grpo: Any) -> str:
    """What replaces training.micro_batch, which counted prompts."""
    group = (grpo if isinstance(grpo, dict) else {}).get("group_size", GRPORecipe.model_fields["group_size"].default)
    said = f"training.micro_batch={prompts!r} counted prompts; a micro-batch is counted in completions now: "
    if isinstance(prompts, int) and isinstance(group, int):
        return f"{said}use training.micro_batch_size={prompts * group} ({prompts} prompts x grpo.group_size={group})"
    return f"{said}use training.micro_batch_size, prompts x grpo.group_size"


def _apply_override(data: dict, override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise CourseError(f"override {override!r} must read section.key=value, for example training.steps=2")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise CourseError(f"override {override!r}: the value is not YAML ({_first_line(error)})") from None
    if isinstance(value, str):
        value = _number_or_text(value)
    *sections, last = key.split(".")
    for name in sections:
        if not isinstance(data.setdefault(name, {}), dict):
            raise CourseError(f"override {override!r}: {name} is a value, not a section")
        data = data[name]
    data[last] = value


def _number_or_text(text: str) -> float | str:
    """YAML 1.1 reads `1e-4` as text, because it has no dot; people mean the number."""
    try:
        return float(text)
    except ValueError:
        return text


def _explain(error: dict) -> str:
    where = ".".join(str(part) for part in error["loc"] if part not in ("auto",))
    if error["type"] == "extra_forbidden":
        known = _known_keys(error["loc"][:-1])
        near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
        return f"unknown key {where}; {hint}"
    if error["type"] == "missing":
        return f"{where} is missing"
    message = error["msg"].removeprefix("Value error, ")
    if not where:
        return message  # of several sections at once: the sentence names the fields
    return f"{where}={error['input']!r}: {message}" if isinstance(error["input"], (str, int, float)) else (
        f"{where}: {message}")  # fmt: skip


def _known_keys(loc: tuple) -> list[str]:
    section: type[BaseModel] = Recipe
    for part in loc:
        section = section.model_fields[str(part)].annotation
    return list(section.model_fields)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
