"""The recipe schema: one model per section of the YAML file.

Unknown keys and wrong types are refused.  The defaults suit most runs; a recipe file states what it changes.
docs/recipes.md is generated from the descriptions (dev/tools/make_recipe_docs.py).
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

from grpo_lib.common import environment
from grpo_lib.common.errors import CourseError, first_line
from grpo_lib.prompts import QUESTION, REASONING_OPEN, USER_PROMPTS
from grpo_train.recipes import batch_plan
from grpo_train.recipes.batch_plan import BatchPlan
from grpo_train.recipes.slices import Slice, parse_slice

# Sizes that MaxText lets a config override.
ModelSize = Literal[
    "base_emb_dim", "base_mlp_dim", "base_num_decoder_layers", "base_num_query_heads", "base_num_kv_heads",
    "head_dim", "vocab_size", "logits_via_embedding",
]  # fmt: skip
Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
DType = Literal["float32", "bfloat16"]
Fraction = Annotated[float, Field(gt=0, lt=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), serialize_by_alias=True)


def _refuse_both_sizes(section: BaseModel, *names: str) -> None:
    """Raise ValueError where a section gives one of these sizes twice: of all devices, and per device."""
    for name in names:
        whole, per_device = getattr(section, name), getattr(section, f"{name}_per_device")
        if whole is not None and per_device is not None:
            raise ValueError(
                f"{name}={whole} and {name}_per_device={per_device} set the same size: give one, and set the other to "
                "null"
            )


class ModelRecipe(_Section):
    """The model's weights and its MaxText architecture."""

    path: str = Field(description="Hugging Face directory with weights and tokenizer, or a name on the hub")
    maxtext_name: str = Field(description="MaxText model_name of the same architecture; sizes come from config.json")
    sizes: dict[ModelSize, int | bool] = Field(default={}, description="MaxText sizes other than those of maxtext_name")
    dtype: DType = Field(default="float32", description="of computations, and of the sampler's and reference's weights")
    weight_dtype: DType | None = Field(default=None, description="of the trainer's weights; null: as dtype")
    remat: Literal["minimal", "full"] = Field(
        default="minimal", description="what the backward pass recomputes; full: all activations, for the least memory"
    )

    @property
    def trainer_dtype(self) -> DType:
        return self.weight_dtype or self.dtype


class LoRARecipe(_Section):
    """Low-rank adapters (arXiv:2106.09685): of each matrix W of attention and MLP only A and B of W + α/r·A·B."""

    rank: Positive | None = Field(default=None, description="r: rank of the adapters; null: all weights are trained")
    alpha: PositiveFloat = Field(default=32.0, description="α: the adapters' product is multiplied by α/r")


class HardwareRecipe(_Section):
    """The TPU slice, and which of its devices train and sample. A device is one chip (v4 and v5p: two cores as one)."""

    accelerator: str | None = Field(default=None, description="TPU slice, like v6e-8; null: the devices that JAX finds")
    trainer_devices: Positive | None = Field(default=None, description="devices that train; null: all")
    trainer_tensor: Positive = Field(
        default=1, description="tensor parallelism of the trainer: devices per replica; FSDP over the replicas"
    )
    sampler_devices: Positive | None = Field(
        default=None, description="devices that only sample; null: sample on the trainer's devices (colocated)"
    )
    sampler_tensor: Positive | None = Field(
        default=None, description="tensor parallelism of the sampler: devices per replica; null: all (vllm), 1 (tunix)"
    )
    processes: Positive | None = Field(
        default=None, description="processes of the run, one per host; null: the hosts of the accelerator, or 1"
    )

    @property
    def slice(self) -> Slice | None:
        return parse_slice(self.accelerator) if self.accelerator else None

    @property
    def colocated(self) -> bool:
        return self.sampler_devices is None

    def trainer_count(self, found: int | None = None) -> int:
        """Devices that train; `found`: devices that JAX finds, where the recipe names no accelerator."""
        return self.trainer_devices or (self.slice.devices if self.slice else found or 1)

    def sampler_count(self, found: int | None = None) -> int:
        return self.sampler_devices or self.trainer_count(found)

    def process_count(self) -> int:
        return self.processes or (self.slice.hosts if self.slice else 1)

    @model_validator(mode="after")
    def _devices_fit(self) -> Self:
        if self.slice and self.trainer_count() + (self.sampler_devices or 0) > self.slice.devices:
            raise ValueError(
                f"trainer_devices={self.trainer_devices} and sampler_devices={self.sampler_devices} do not fit the "
                f"{self.slice.devices} devices of {self.accelerator}: give both, {self.slice.devices} or fewer together"
            )
        return self


class ColumnsRecipe(_Section):
    """Names of the columns, for `source: file`; a.b is field b of column a."""

    question: str = Field(default="question", description="column with the question")
    answer: str = Field(
        default="answer", description="column with the gold answer; where it has ####, what follows the last of them"
    )
    solution: str | None = Field(default=None, description="column with a worked solution; null: there is none")


class ProblemsRecipe(_Section):
    """The problems. Counts are upper limits; null: all there are, or 20,000, 500 and 1,000 word problems."""

    source: Literal["words", "code", "gsm8k", "dapo-math", "math", "aime", "math500", "file"] = Field(
        default="words",
        description="words: generated word problems; code: generated functions to write in Python, whose code is run; "
        "file: a CSV, JSON-lines or Parquet file of yours (docs/own-data.md); "
        "dapo-math and math have no test split, aime and math500 have nothing else",
    )
    difficulty: Literal["standard", "hard"] = Field(default="standard", description="words: hard has larger numbers")
    path: str | None = Field(
        default=None,
        description="gsm8k: folder with train.jsonl and test.jsonl; dapo-math, math, aime, math500: a .parquet or "
        ".jsonl file, or a folder with some; file: a .csv, .jsonl or .parquet file, of which a tenth is held out to "
        "test, or a folder with train.… and test.…; null: load with tensorflow-datasets or from the Hugging Face hub",
    )
    columns: ColumnsRecipe = Field(
        default=ColumnsRecipe(), description="file: its columns, such as {question: prompt, answer: target}"
    )
    kind: Literal["tagged", "integer", "latex"] = Field(
        default="tagged",
        description="file: how its answers are graded; tagged: one number in <answer> tags; integer, latex: what the "
        "completion states last",
    )
    conflicts: Literal["refuse", "skip"] = Field(
        default="refuse",
        description="dapo-math, math, aime, math500, file, gsm8k with a path: problems with two different gold "
        "answers; refuse: stop with an error; skip: leave them out",
    )
    test_source: Literal["gsm8k", "aime", "math500"] | None = Field(
        default=None,
        description="dapo-math, math: where the test problems come from; needed to evaluate. file: in place of its own",
    )
    test_path: str | None = Field(
        default=None, description="path of test_source, with the meaning of path; file: without one, its test problems"
    )
    train: Positive | None = Field(default=None, description="training problems")
    validation: Positive | None = Field(default=None, description="validation problems, held out of training")
    test: Positive | None = Field(default=None, description="test problems")
    seed: Seed = Field(default=0, description="seed of the word-problem generator, not of the training order")

    @model_validator(mode="after")
    def _test_split_is_one(self) -> Self:
        if self.test_source and self.source not in ("dapo-math", "math", "file"):
            raise ValueError(
                f"test_source={self.test_source}: {self.source} has a test split of its own; set test_source to null"
            )
        if self.test_path and not self.test_source and self.source != "file":
            raise ValueError(f"test_path={self.test_path} needs test_source: set it, or test_path to null")
        return self

    @model_validator(mode="after")
    def _columns_are_of_a_file(self) -> Self:
        if self.source == "file":
            if not self.path:
                raise ValueError("source=file needs path: set it to your .csv, .jsonl or .parquet file")
            return self
        for key, default in (("columns", ColumnsRecipe()), ("kind", "tagged")):
            if getattr(self, key) != default:
                raise ValueError(f"{key} is for a file of yours: set source to file, and path to it")
        return self


TEXT_FILES = (".txt", ".md")


def _text_of_file(name: str) -> str:
    """The text of a file, relative to here or to the repository, without the line break at its end."""
    path = Path(name).expanduser()
    places = (path, environment.repo_root() / path)
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise ValueError("there is no such file; give one relative to here or to the repository")
    try:
        return file.read_text(encoding="utf-8-sig").removesuffix("\n")  # with or without a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the file cannot be read ({first_line(error)}); save it as UTF-8") from None


class PromptsRecipe(_Section):
    """The prompt template."""

    system: str = Field(
        default="default",
        description="system prompt; default: grpo_lib.prompts.SYSTEM_PROMPT; tunix: the words of Tunix's and "
        "MaxText's demos; empty: none; or a text of its own, or a .txt or .md file with it",
    )
    user: str = Field(
        default="question",
        description="user message; question: the question alone; dapo: in the words of DAPO-Math-17k, which ask for a "
        "last line `Answer: N`; boxed: with a request for \\boxed{}; or a text of its own, or a .txt or .md file with "
        "it; {question} in it is where the question stands",
    )
    thinking: bool = Field(
        default=False,
        description="whether a model such as Qwen3, whose chat template has the choice, thinks before it answers; its "
        "thoughts count in rollout.max_completion_length",
    )
    chat_template: bool = Field(
        default=True,
        description="whether the tokenizer's chat template is around the messages; false: bare text, the system prompt "
        "and, after an empty line, the user message",
    )
    completion_prefix: str = Field(
        default="",
        description="text that each prompt ends with, such as <reasoning>, and that counts as the beginning of the "
        "completion: rewards, graders and records have it in front of what the model wrote",
    )

    @field_validator("system", "user")
    @classmethod
    def _content_of_a_file(cls, text: str) -> str:
        """In place of the name of a file what it holds: so the run's own recipe has it."""
        return _text_of_file(text) if text.endswith(TEXT_FILES) and "\n" not in text else text

    @field_validator("user")
    @classmethod
    def _user_has_the_question(cls, user: str) -> str:
        count = user.count(QUESTION)
        if user not in USER_PROMPTS and count != 1:
            found = f"it has {QUESTION} {count} times; " if count else ""
            names = ", ".join(USER_PROMPTS)
            raise ValueError(
                f"{found}give {names}, or a text with {QUESTION} where the question stands, once, or a file with it"
            )
        return user

    @model_validator(mode="after")
    def _thinking_has_a_template(self) -> Self:
        if self.thinking and not self.chat_template:
            raise ValueError(
                "thinking=true asks a chat template, and chat_template=false sends none: set thinking to false, and "
                "completion_prefix to <think> where the model is to think"
            )
        return self


class TaskRecipe(ProblemsRecipe):
    """One of several tasks: `problems` is then a list of them, and a step has prompts of each."""

    name: Name = Field(default="", description="name of the task in metrics, records and report; not given: the source")
    weight: PositiveFloat = Field(default=1.0, description="its share of the training prompts, over the sum of weights")
    prompts: PromptsRecipe | None = Field(default=None, description="its prompt template; null: that of the recipe")

    @model_validator(mode="before")
    @classmethod
    def _default_name(cls, data: Any) -> Any:
        return {"name": data.get("source", "words")} | data if isinstance(data, dict) else data


# Of prompts, computed together.  vLLM 0.31's default on a TPU is 8,192; it compiles a program for each power of two.
MAX_BATCHED_TOKENS = 2048


class VllmRecipe(_Section):
    """Settings of vLLM, for `rollout.engine: vllm`. vLLM's own names are in brackets."""

    memory_fraction: Fraction = Field(
        default=0.2,
        description="fraction of device memory for the sampler's weights and KV cache (gpu_memory_utilization)",
    )
    options: dict[str, bool | int | float | str] = Field(
        default={},
        description="further arguments of vLLM's engine by vLLM's names, as {block_size: 32, max_num_seqs: 64}",
    )

    @property
    def max_sequences(self) -> int:
        """Sequences that a replica decodes at once."""
        return int(self.options.get("max_num_seqs", 128))

    @property
    def max_batched_tokens(self) -> int:
        """Tokens of prompts that a replica computes together."""
        return int(self.options.get("max_num_batched_tokens", MAX_BATCHED_TOKENS))


class TemperatureSchedule(_Section):
    """In place of a number: a temperature that changes linearly from step to step, and then stays."""

    first: PositiveFloat = Field(alias="from", description="of the first step")
    last: PositiveFloat = Field(alias="to", description="of the last of `steps`, and of all after it")
    steps: Annotated[int, Field(ge=2)] | None = Field(
        default=None, description="steps in which it changes, the first one included; null: training.steps"
    )


def _kind_of_temperature(value: Any) -> str:
    """Which of the two a value is meant to be, so that an error is about that one."""
    return "schedule" if isinstance(value, (dict, TemperatureSchedule)) else "number"


# pydantic wants a tag in each part of the union, and a function that chooses among the tags.
_Number = Annotated[PositiveFloat, Tag("number")]
_Schedule = Annotated[TemperatureSchedule, Tag("schedule")]
Temperature = Annotated[_Number | _Schedule, Discriminator(_kind_of_temperature)]


class RolloutRecipe(_Section):
    """How completions are sampled. Lengths are in tokens."""

    engine: Literal["tunix", "vllm"] = Field(
        default="tunix",
        description="tunix: Qwen2.5, Qwen3, Llama 3 and 3.1, any machine, several hosts; vllm: one TPU host",
    )
    vllm: VllmRecipe = VllmRecipe()
    max_mean_gap: PositiveFloat | None = Field(
        default=None,
        description="mean difference of sampler's and trainer's log-probabilities, in nats per token, up to which a "
        "run starts; null: 0.02 in float32, 0.1 in bfloat16",
    )
    micro_batch_size: Positive | None = Field(
        default=None, description="prompts sampled at once, over all processes; null: the whole step"
    )
    micro_batch_size_per_device: Positive | None = Field(
        default=None,
        description="in place of micro_batch_size: prompts sampled at once by each replica of the sampler (sampler "
        "devices / sampler_tensor)",
    )
    max_prompt_length: Positive | Literal["auto"] = Field(default="auto", description="auto: the longest of the run")
    overlong_prompts: Literal["error", "filter"] = Field(
        default="error", description="training problems with a longer prompt: stop with an error, or filter them out"
    )
    max_completion_length: Positive = Field(default=512, description="longest completion; longer ones are truncated")
    temperature: Temperature = Field(
        default=1.0,
        description="sampling temperature: a number, or a schedule such as {from: 0.9, to: 0.7}; log-probabilities are "
        "computed at it, too",
    )
    top_k: Positive | None = Field(
        default=None,
        description="sample from the k most likely tokens; null: from all. The loss is of the whole distribution, so "
        "that the run starts with a warning: the share of the probability that is left out",
    )
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0,
        description="of these, sample from the most likely that together have this probability; 1: from "
        "all. The loss: see top_k",
    )

    def temperature_of(self, step: int, steps: int) -> float:
        """The sampling temperature of a step, counted from 0, in a run of so many steps."""
        schedule = self.temperature
        if not isinstance(schedule, TemperatureSchedule):
            return schedule
        changes = (schedule.steps or steps) - 1
        done = min(step / changes, 1.0) if changes else 0.0
        return (1 - done) * schedule.first + done * schedule.last

    @property
    def has_schedule(self) -> bool:
        return isinstance(self.temperature, TemperatureSchedule)

    @property
    def first_temperature(self) -> float:
        """Of the first step."""
        return self.temperature_of(0, 1)

    @property
    def is_cut(self) -> bool:
        """Whether some tokens are never sampled."""
        return self.top_k is not None or self.top_p < 1

    @model_validator(mode="after")
    def _one_key_per_size(self) -> Self:
        _refuse_both_sizes(self, "micro_batch_size")
        return self


class GRPORecipe(_Section):
    """The algorithm, with the symbols of the GRPO paper (arXiv:2402.03300)."""

    group_size: Annotated[int, Field(ge=2)] = Field(default=8, description="G: completions per prompt")
    iterations: Positive = Field(default=1, description="μ: updates per batch of completions")
    beta: NonNegativeFloat = Field(default=0.0, description="β: weight of the KL penalty; 0: no reference model")
    kl: Literal["k1", "k2", "k3"] = Field(
        default="k3",
        description="estimator of the KL penalty (J. Schulman); the gradient of k1 has no reference in it",
    )
    target_kl: PositiveFloat | None = Field(
        default=None,
        description="KL from the reference, in nats per token, that beta is adapted to: times 1.5 after a step above "
        "it, divided by 1.5 after one below half of it, within a hundredth and 100 times the beta given; null: beta "
        "stays",
    )
    watch_kl: Positive | None = Field(
        default=None,
        description="where beta is 0: every how many steps, and in the first, the KL from the model that GRPO starts "
        "from is measured, on up to 32 completions; null: never; a beta above 0 has it in every step",
    )
    advantage: Literal["std", "mean", "leave-one-out", "maxrl"] = Field(
        default="std",
        description="reward minus the group's mean, over its standard deviation (std: GRPO) or not (mean: Dr. GRPO); "
        "leave-one-out: minus the mean of the others (RLOO); maxrl: over the group's mean, for rewards of at least 0",
    )
    aggregation: Literal["completion", "constant", "step"] = Field(
        default="completion",
        description="the loss of a completion's tokens is averaged over them (completion: GRPO), or divided by "
        "rollout.max_completion_length (constant: Dr. GRPO); step: all tokens of the step count the same (DAPO)",
    )
    epsilon: Fraction = Field(default=0.2, description="ε: clip range of the probability ratio")
    epsilon_high: PositiveFloat | None = Field(
        default=None, description="its upper side, where that is wider (clip-higher of DAPO); null: as epsilon"
    )
    ratio: Literal["token", "sequence"] = Field(
        default="token", description="the probability ratio of a token, or of the whole completion, per token (GSPO)"
    )
    overlong_buffer: Positive | None = Field(
        default=None,
        description="tokens before rollout.max_completion_length in which a penalty grows from 0 to overlong_penalty "
        "(DAPO); null: none",
    )
    overlong_penalty: PositiveFloat = Field(default=1.0, description="taken off the reward of the longest completions")
    mask_truncated: bool = Field(
        default=False,
        description="truncated completions are left out of the loss and of what it is divided by (overlong filtering, "
        "DAPO); their rewards still count in the advantages of their group",
    )
    dynamic_sampling: Positive | None = Field(
        default=None,
        description="times that a step samples at most, until every group has right and wrong completions (DAPO); "
        "groups without both get advantages of 0; 1: sample once, and do only that; null: off",
    )
    correction: Literal["none", "tis", "ratio"] = Field(
        default="none",
        description="for a sampler that computes other probabilities than the trainer, or has older weights; tis: each "
        "token's loss times π_old / π_sampler, at most 2; ratio: π_sampler takes the place of π_old",
    )

    @property
    def kl_is_watched(self) -> bool:
        """Whether the KL is measured now and then, because no penalty has it in every step."""
        return self.watch_kl is not None and self.beta == 0

    @model_validator(mode="after")
    def _target_kl_has_a_penalty(self) -> Self:
        if self.target_kl and not self.beta:
            raise ValueError(
                f"target_kl={self.target_kl} adapts beta, and from 0 it never rises: set beta above 0, like 0.04, or "
                "target_kl to null"
            )
        if self.target_kl and self.kl == "k1":
            raise ValueError(
                f"target_kl={self.target_kl} needs a penalty that lowers the KL, and as a loss k1 has no reference in "
                "its gradient: set kl to k2 or k3"
            )
        return self

    @model_validator(mode="after")
    def _clip_range(self) -> Self:
        if self.epsilon_high is not None and self.epsilon_high < self.epsilon:
            raise ValueError(
                f"epsilon_high={self.epsilon_high} is below epsilon={self.epsilon}; give the wider side, or null"
            )
        return self


class LossRecipe(_Section):
    """How the policy loss is computed. The value is the same; memory and time differ."""

    implementation: Literal["jax", "chunked", "pallas"] = Field(
        default="jax",
        description="jax: from all logits; chunked: a few tokens at a time; pallas: a TPU kernel",
    )


class TrainingRecipe(_Section):
    """Batch sizes, optimizer, checkpoints."""

    steps: Positive = Field(default=60, description="batches of completions, each used for grpo.iterations updates")
    cold_start: NonNegative = Field(
        default=0,
        description="problems whose worked solutions the base is fine-tuned on before step 1; 0: none",
    )
    cold_start_spaces: bool = Field(
        default=False,
        description="the cold start teaches calculations with spaces, 9 * 5 = 45 for 9*5=45: take the base's own "
        "spelling, since another one can cost it right results",
    )
    prompts_per_step: Positive | None = Field(
        default=batch_plan.PROMPTS_PER_STEP,
        description="prompts of a step, over all processes; null: prompts_per_step_per_device",
    )
    prompts_per_step_per_device: Positive | None = Field(
        default=None,
        description="in place of prompts_per_step: prompts of a step for each replica of the trainer (trainer devices "
        "/ trainer_tensor)",
    )
    micro_batch_size: Positive | None = Field(
        default=None, description="completions per gradient computation, over all processes, in whole groups; null: all"
    )
    micro_batch_size_per_device: Positive | None = Field(
        default=None,
        description="in place of micro_batch_size: completions per gradient computation in each replica of the trainer",
    )
    layout: Literal["auto", "padded", "packed", "groups"] = Field(
        default="auto",
        description="rows of the policy update: padded, one completion each; packed, several; groups, a prompt and its "
        "completions; auto: packed where hardware.accelerator is set, else groups",
    )
    optimizer: Literal["adamw", "lion"] = Field(
        default="adamw", description="lion moves each weight by the learning rate, and has one moment in place of two"
    )
    learning_rate: PositiveFloat = Field(default=1e-4, description="peak learning rate")
    warmup_steps: NonNegative = Field(default=5, description="steps of linear warm-up")
    schedule: Literal["constant", "cosine"] = Field(default="constant", description="after warm-up; cosine ends at 0")
    schedule_steps: Positive | None = Field(
        default=None,
        description="step at which the cosine would end, for a run that ends earlier; warm-up counts; null: "
        "training.steps",
    )
    b1: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.9, description="β1 of the optimizer")
    b2: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.99, description="β2 of the optimizer")
    weight_decay: NonNegativeFloat = Field(default=0.0, description="decoupled weight decay")
    rounding: Literal["nearest", "stochastic"] = Field(
        default="nearest",
        description="of steps to bfloat16 weights; nearest loses those much smaller than a weight; stochastic keeps "
        "them on average",
    )
    optimizer_dtype: DType = Field(
        default="float32",
        description="of the optimizer's moments and of the sum of a step's gradients; bfloat16, with bfloat16 weights, "
        "saves 6 bytes a weight",
    )
    max_grad_norm: PositiveFloat = Field(default=1.0, description="gradients are clipped to this global norm")
    checkpoint_every: Positive = Field(default=20, description="steps between checkpoints")
    max_to_keep: Annotated[int, Field(ge=2)] = Field(
        default=2, description="checkpoints to keep; the second is the fallback if the last one is damaged"
    )
    stop_after: Annotated[str, Field(pattern=r"^([0-9]+[hms])+$")] | None = Field(
        default=None,
        description="such as 8h30m: save and stop then, with exit code 75; the same command continues",
    )
    checkpoints: str | None = Field(
        default=None,
        description="folder or gs:// address for checkpoints; the run's name is added; null: the run directory",
    )
    validate_every: NonNegative = Field(default=20, description="steps between validations; 0: never")
    profile_steps: Annotated[list[Positive], Field(min_length=2, max_length=2)] | None = Field(
        default=None,
        description="first and last step that jax.profiler records, such as [3, 5]; the first step of a session "
        "compiles; null: none",
    )

    @model_validator(mode="before")
    @classmethod
    def _no_default_beside_a_size_per_device(cls, data: Any) -> Any:
        per_device = isinstance(data, dict) and data.get("prompts_per_step_per_device") is not None
        return {"prompts_per_step": None} | data if per_device else data

    @model_validator(mode="after")
    def _one_key_per_size(self) -> Self:
        _refuse_both_sizes(self, "prompts_per_step", "micro_batch_size")
        if self.prompts_per_step is None and self.prompts_per_step_per_device is None:
            raise ValueError("prompts_per_step=null needs prompts_per_step_per_device: give one of them")
        return self

    @model_validator(mode="after")
    def _schedule_outlives_the_run(self) -> Self:
        if self.schedule_steps is None:
            return self
        if self.schedule == "constant":
            raise ValueError(
                f"schedule_steps={self.schedule_steps} is for a cosine: set schedule to cosine, or this to null"
            )
        if self.schedule_steps < self.steps:
            raise ValueError(
                f"schedule_steps={self.schedule_steps} is below steps={self.steps}, and the rate of the last would be "
                "0: give as many or more, or null"
            )
        return self

    @property
    def cosine_steps(self) -> int:
        """Steps of the schedule, warm-up included, whether all of them are run or not."""
        return self.schedule_steps or self.steps

    @model_validator(mode="after")
    def _profile_is_of_the_run(self) -> Self:
        if self.profile_steps is None:
            return self
        first, last = self.profile_steps
        if not first <= last or first > self.steps:
            raise ValueError(
                f"profile_steps=[{first}, {last}] must be a first and a last step of the {self.steps} of the run, such "
                f"as [{min(3, self.steps)}, {min(5, self.steps)}]"
            )
        return self


# Of Tunix's examples of GRPO on GSM8K, where they are called so.
PRESETS: dict[str | None, dict[str, float]] = {
    "greedy": {"temperature": 1e-4, "top_k": 1, "top_p": 1.0},
    "standard": {"temperature": 0.7, "top_k": 50, "top_p": 0.95},
    "liberal": {"temperature": 0.85, "top_k": 2000, "top_p": 1.0},
}


class EvaluationRecipe(_Section):
    """Evaluation before and after training: greedy, and with `samples` also pass@k and maj@k."""

    batch_size: Positive = Field(default=250, description="problems per batch")
    samples: NonNegative = Field(
        default=0, description="sampled completions per test problem, in addition to the greedy one"
    )
    preset: Literal["greedy", "standard", "liberal"] | None = Field(
        default=None, description="temperature, top-k and top-p of these samples together; what is set beside it wins"
    )
    temperature: PositiveFloat | None = Field(default=None, description="of these samples; null: the rollout's first")
    top_k: Positive | None = Field(default=None, description="of these samples; null: all tokens")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(default=1.0, description="of these samples; 1: the preset's")


class TrackingRecipe(_Section):
    """Weights & Biases, in addition to metrics.jsonl and TensorBoard. The API key is read from WANDB_API_KEY, the
    project from WANDB_PROJECT; without one it is grpo-hands-on."""

    # YAML 1.1 reads `off` as false.
    wandb: Annotated[
        Literal["off", "offline", "online"], BeforeValidator(lambda value: "off" if value is False else value)
    ] = Field(default="off", description="whether and how W&B logs the run")


class Recipe(_Section):
    name: Name = Field(description="name of the run and its directory")
    seed: Seed = Field(default=0, description="seed of sampling and of the training order")
    model: ModelRecipe
    lora: LoRARecipe = LoRARecipe()
    hardware: HardwareRecipe = HardwareRecipe()
    problems: Annotated[
        Annotated[ProblemsRecipe, Tag("section")] | Annotated[list[TaskRecipe], Tag("list"), Field(min_length=1)],
        Discriminator(lambda value: "list" if isinstance(value, list) else "section"),
    ] = ProblemsRecipe()
    prompts: PromptsRecipe = PromptsRecipe()
    rollout: RolloutRecipe = RolloutRecipe()
    rewards: Annotated[list[str], Field(min_length=1)] = Field(
        default=["correct_answer", "tidy_format"],
        description="reward functions of grpo_lib.rewards, or of a file of yours as FILE.py:FUNCTION; their values are "
        "added",
    )
    grpo: GRPORecipe = GRPORecipe()
    loss: LossRecipe = LossRecipe()
    training: TrainingRecipe = TrainingRecipe()
    evaluation: EvaluationRecipe = EvaluationRecipe()
    tracking: TrackingRecipe = TrackingRecipe()

    @model_validator(mode="after")
    def _sections_fit_each_other(self) -> Self:
        self._refuse_a_batch_that_does_not_divide()
        buffer = self.grpo.overlong_buffer
        limit = self.rollout.max_completion_length
        if buffer and buffer >= limit:
            raise ValueError(
                f"grpo.overlong_buffer={buffer} must be shorter than rollout.max_completion_length={limit}: "
                "completions of any length would be penalised"
            )
        # vLLM's raw_logprobs are of the distribution before temperature.
        if self.grpo.correction != "none" and self.rollout.engine == "vllm" and self.rollout.temperature != 1:
            temperature = "a schedule" if self.rollout.has_schedule else self.rollout.temperature
            raise ValueError(
                f"grpo.correction={self.grpo.correction} needs the probabilities that were sampled from, and with "
                f"rollout.temperature={temperature} rollout.engine=vllm does not give them: set that to "
                "1, or correction to none"
            )
        if self.grpo.correction != "none" and self.rollout.is_cut:
            raise ValueError(
                f"grpo.correction={self.grpo.correction} needs the probabilities that were sampled from, and those of "
                "rollout.top_k and rollout.top_p are not computed: set these to null and 1, or correction to none"
            )
        if self.rollout.engine == "vllm" and (self.hardware.accelerator or "").startswith("v4-"):
            raise ValueError(
                f"rollout.engine=vllm has no attention kernel for hardware.accelerator={self.hardware.accelerator} "
                "(tpu-inference 0.31.0): set the engine to tunix, or take a v5e, v5p or v6e"
            )
        if self.training.optimizer_dtype == "bfloat16" and self.model.trainer_dtype == "float32":
            raise ValueError(
                "training.optimizer_dtype=bfloat16 is for bfloat16 weights: set model.weight_dtype=bfloat16, or "
                "optimizer_dtype to float32"
            )
        names = [task.name for task in self.tasks]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"problems: two tasks are called {twice}: give each a name of its own")
        return self

    @model_validator(mode="after")
    def _cold_start_teaches_the_prefix(self) -> Self:
        """A worked solution in tags begins with the first of them, or is taught without it."""
        prefixes = {part.completion_prefix for part in (self.prompts, *(task.prompts for task in self.tasks)) if part}
        others = sorted(prefix for prefix in prefixes if prefix.rstrip() not in ("", REASONING_OPEN))
        if self.training.cold_start and others:
            raise ValueError(
                f"training.cold_start={self.training.cold_start} teaches completions that begin with {REASONING_OPEN}, "
                f"and prompts.completion_prefix={others[0]!r} is another beginning: set one of them to its default"
            )
        return self

    def _refuse_a_batch_that_does_not_divide(self) -> None:
        try:
            self._make_plan()
        except ValueError as error:
            names_devices = self.hardware.accelerator or self.hardware.trainer_devices
            if names_devices or not any(key.endswith("_per_device") for key in self.batch_given):
                raise
            raise ValueError(
                f"{error} (counted on one device: name more by hardware.accelerator or hardware.trainer_devices)"
            ) from None

    @property
    def tasks(self) -> list[TaskRecipe]:
        """The tasks, where `problems` is a list of them."""
        return self.problems if isinstance(self.problems, list) else []

    @property
    def sources(self) -> list[ProblemsRecipe]:
        """The tasks, or the one section that `problems` is."""
        return list(self.problems) if isinstance(self.problems, list) else [self.problems]

    @property
    def plan(self) -> BatchPlan:
        """All sizes of a step, for one device and one process where the recipe names no devices."""
        return self._make_plan()

    def plan_on(self, devices: int, processes: int = 1) -> BatchPlan:
        """The plan on the devices and processes of the whole run, as JAX finds them.

        Raises CourseError where the batch does not divide there, or hardware.processes is another number.
        """
        if self.hardware.processes not in (None, processes):
            raise CourseError(
                f"hardware.processes={self.hardware.processes}, but the run has {processes}: start as many, or set null"
            )
        try:
            return self._make_plan(devices, processes)
        except ValueError as error:
            raise CourseError(str(error)) from None

    def sampler_tensor(self, found: int | None = None) -> int:
        """Devices per replica of the sampler; `found`: devices that JAX finds, where the recipe names none."""
        return self.hardware.sampler_tensor or (
            1 if self.rollout.engine == "tunix" else self.hardware.sampler_count(found)
        )

    @property
    def batch_given(self) -> dict[str, int]:
        """The sizes of a step that the recipe gives: section.key -> value."""
        values = {
            "hardware.processes": self.hardware.processes,
            "grpo.group_size": self.grpo.group_size,
            "grpo.iterations": self.grpo.iterations,
            "training.prompts_per_step": self.training.prompts_per_step,
            "training.prompts_per_step_per_device": self.training.prompts_per_step_per_device,
            "training.micro_batch_size": self.training.micro_batch_size,
            "training.micro_batch_size_per_device": self.training.micro_batch_size_per_device,
            "rollout.micro_batch_size": self.rollout.micro_batch_size,
            "rollout.micro_batch_size_per_device": self.rollout.micro_batch_size_per_device,
        }
        return {key: value for key, value in values.items() if value is not None}

    def _make_plan(self, found: int | None = None, processes: int | None = None) -> BatchPlan:
        """Args: the devices and processes that were found; None: those that the recipe names."""
        hardware, rollout = self.hardware, self.rollout
        trainer, sampler = hardware.trainer_count(found), hardware.sampler_count(found)
        trainer_replicas, sampler_replicas, devices = 1, 1, found
        if found or hardware.accelerator or hardware.trainer_devices:
            trainer_replicas = _replicas("trainer_tensor", trainer, hardware.trainer_tensor)
            sampler_replicas = _replicas("sampler_tensor", sampler, self.sampler_tensor(found))
            whole = trainer if hardware.colocated else trainer + sampler
            devices = hardware.slice.devices if hardware.slice else found or whole
        plan = batch_plan.make_plan(
            self.batch_given,
            group_size=self.grpo.group_size,
            processes=processes or hardware.process_count(),
            devices=devices,
            trainer_replicas=trainer_replicas,
            sampler_replicas=sampler_replicas,
            longest=None
            if rollout.max_prompt_length == "auto"
            else (rollout.max_prompt_length, rollout.max_completion_length),
            layout=self.training.layout,
            accelerator=bool(hardware.accelerator),
        )
        # Tunix's learner would grade several rollouts together, and the sampler knows its last one.
        changed = self.grpo.model_dump(exclude_defaults=True)
        of_last = ("dynamic_sampling", "mask_truncated", "correction", "overlong_buffer")
        asks = next((key for key in of_last if key in changed), None)
        if asks and plan.rollout_micro_batch_size % plan.micro_batch_prompts:
            raise ValueError(
                f"rollout.micro_batch_size={plan.rollout_micro_batch_size} must be a multiple of the "
                f"{plan.micro_batch_prompts} prompts of a training micro-batch, because of grpo.{asks}"
            )
        return plan

    @property
    def evaluation_sampling(self) -> dict[str, float]:
        """Temperature and top-p of the samples of an evaluation, and top-k where it is not all tokens."""
        own = self.evaluation
        default = {"temperature": self.rollout.first_temperature, "top_p": 1.0}
        given = {"temperature": own.temperature, "top_k": own.top_k, "top_p": own.top_p if own.top_p < 1 else None}
        return default | PRESETS.get(own.preset, {}) | {key: value for key, value in given.items() if value is not None}


def _replicas(key: str, devices: int, tensor: int) -> int:
    if devices % tensor:
        raise ValueError(
            f"hardware.{key}={tensor} must divide its {devices} devices: "
            f"use {batch_plan.listed(batch_plan.divisors(devices))}"
        )
    return devices // tensor
