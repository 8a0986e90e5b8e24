"""The layouts of a policy update: in which rows a micro-batch of completions is computed.

- padded: a row is one completion, its prompt padded to P tokens and itself to C.  Most of it is padding.
- packed: a row holds several completions, each behind its own prompt, and segment ids tell them apart.
- groups: a row holds one group: a prompt once, then its completions, each of which sees the prompt and itself.

XLA compiles a program for each shape, so there are few shapes: a micro-batch takes the smallest one that it fits, and
a shape is compiled when it is first needed.  Most runs need one or two.
"""

import itertools
import math
from typing import Literal

Layout = Literal["padded", "packed", "groups"]

# Widths, as fractions of what completions of full length would need.  GSM8K's need 0.2 to 0.35 of it.
FRACTIONS = (1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8)
# A width of rows of groups that the next one exceeds by no more than this is left out: a run that needs both compiles
# two programs.  recipes/tiny-cpu.yaml took 224 and 240 tokens, and compiling the second one cost as much as 15 steps.
NEAR = 1 / 8
# Rows of packed completions are at least so wide: short ones would leave much of a narrow row empty.
NARROWEST = 256


def choose_layout(wanted: str, *, accelerator: bool, groups: int, replicas: int) -> Layout:
    """The layout of a micro-batch of `groups` groups.

    Raises ValueError for rows of groups that cannot be shared out to the replicas.
    """
    if wanted == "groups" and groups % replicas:
        raise ValueError(
            f"training.layout=groups needs the same number of groups in each of the {replicas} trainer replicas, and a "
            f"micro-batch has {groups}: use training.layout=packed, or a larger training.micro_batch_size"
        )
    if wanted != "auto":
        return wanted  # pyright: ignore[reportReturnType]
    # seconds_update of recipes/tiny-cpu.yaml on two cores: groups 0.32, padded 0.51, packed 0.68 (the last ten of 100
    # steps, by `grpo compare`).  On a TPU rows of groups would need attention without its flash kernel; packed rows are
    # 0.4 of the padded update's FLOPs at 195 tokens a completion (dev/benchmarks/update_tokens.py --compile).
    return "packed" if accelerator or groups % replicas else "groups"


def row_shapes(
    layout: Layout, *, sequences: int, group_size: int, prompt_length: int, completion_length: int, replicas: int = 1
) -> list[tuple[int, int]]:
    """Shapes [rows, tokens] for a micro-batch of `sequences` completions, smallest first; the last one holds any."""
    longest = prompt_length + completion_length
    if layout == "padded":
        return [(sequences, longest)]
    multiple = 128 if longest > 512 else 16  # 128: the blocks of a TPU's attention kernels

    def rounded(tokens: float) -> int:
        return math.ceil(tokens / multiple) * multiple

    if layout == "groups":
        # Two groups in a row would leave less of it empty, and cost more: attention grows with the square of a row.
        widest = prompt_length - 1 + group_size * (1 + completion_length)
        widths = sorted({rounded(fraction * widest) for fraction in (*FRACTIONS, 1)})
        apart = [width for width, wider in itertools.pairwise(widths) if wider > (1 + NEAR) * width]
        return [(sequences // group_size, width) for width in (*apart, widths[-1])]
    shapes = set()
    one_each = (sequences, rounded(longest))
    for fraction in FRACTIONS:
        tokens = fraction * sequences * longest
        rows = max(int(tokens / max(longest, NARROWEST)) // replicas, 1) * replicas
        shapes.add((rows, rounded(tokens / rows)))
    return [*sorted((shape for shape in shapes if math.prod(shape) < math.prod(one_each)), key=math.prod), one_each]
