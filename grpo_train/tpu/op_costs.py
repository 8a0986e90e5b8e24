"""What one operation of optimised HLO costs a chip: bytes, products, vector arithmetic, seconds.

The compiler's `estimated_cycles` are times for products only: without one they are several times what the bandwidth
allows (a bf16 add 4.2, a reduction 5.8, libtpu 0.0.44).  So a product takes its cycles, and at least its bytes; the
rest takes its bytes, or its vector arithmetic if that is more; a collective takes its bytes over the links.
"""

import math
import re
from dataclasses import dataclass

from grpo_train.recipes.slices import CHIPS
from grpo_train.tpu.hlo import HOST, Array, Computation, Instruction, Module

NO_TIME = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier", "optimization-barrier", "domain", "add-dependency",
}  # fmt: skip
MOVES = {
    "broadcast", "slice", "dynamic-slice", "dynamic-update-slice", "reshape", "copy", "transpose", "pad",
    "concatenate", "iota",
}  # fmt: skip
SLICES = ("dynamic-slice", "slice", "gather")
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
# Several vector operations each: exponentials and the like are polynomials.
SLOW = {"exponential", "log", "tanh", "logistic", "rsqrt", "power", "divide", "sqrt"}
SLOW_OPERATIONS = 8
NO_KERNEL = {
    "AllocateBuffer", "ConcatBitcast", "Sharding", "AssumeGatherIndicesInBound", "GatherScatterIndicesBitpacked",
}  # fmt: skip

# A ring of a small slice goes over two links of each chip, one way on each.
RING_LINKS = 2
HOP = 1e-6  # seconds; small arrays wait for the way, not for the bytes
NESTED = 4  # fusions in fusions that are looked into


@dataclass(frozen=True)
class Rates:
    """Rates of a chip that an estimate needs beside the peaks of its Chip."""

    clock: float  # cycles a second, as its peak and its matrix units imply
    vector: int  # operations of the vector units in a cycle: 8 x 128 lanes, four at once, of each core
    link: float  # bytes a second over one link between two chips, one way


# Links: v6e has 3,200 Gbit/s over 4 ports, v5e 1,600 over 4 (https://cloud.google.com/tpu/docs/v6e); these are the
# one-way rates of jax-ml/scaling-book, tpus.md at 04d8de5, which has those of v4 and v5p, too.
RATES = {
    "v4": Rates(1.05e9, 8192, 45e9),
    "v5e": Rates(1.5e9, 4096, 50e9),
    "v5p": Rates(1.75e9, 8192, 100e9),
    "v6e": Rates(1.75e9, 4096, 100e9),
}


@dataclass(frozen=True)
class Work:
    """Of one operation."""

    bytes: float = 0  # between the chip and its memory
    flops: float = 0  # of products
    vector: float = 0  # operations of the vector units

    def __add__(self, other: "Work") -> "Work":
        return Work(self.bytes + other.bytes, self.flops + other.flops, self.vector + other.vector)


def work(module: Module, computation: Computation, instruction: Instruction) -> Work:
    """The work of an operation that is no loop, no branch and no collective."""
    if instruction.opcode == "fusion":
        return _fusion(module, computation, instruction)
    read = sum(one.hbm_bytes for one in _operands(computation, instruction))
    moved = instruction.hbm_bytes + read
    if instruction.opcode in ("convolution", "dot"):
        return Work(moved, flops=_product_flops(computation, instruction))
    if instruction.opcode in ("broadcast", "iota"):
        return Work(instruction.hbm_bytes)
    if instruction.opcode in SLICES:
        return Work(2 * instruction.hbm_bytes)
    if instruction.opcode == "dynamic-update-slice":
        update = computation.operand(instruction, 1)
        return Work(2 * update.bytes if update and instruction.hbm_bytes else 0)
    return Work(moved, vector=_vector_operations(computation, instruction))


def seconds(instruction: Instruction, done: Work, generation: str) -> float:
    """The time of an operation that is done at these rates, and as many cycles as the compiler says of a product."""
    chip, rates = CHIPS[generation], RATES[generation]
    ideal = max(
        done.flops / chip.flops,
        done.bytes / chip.bandwidth,
        done.vector / rates.vector / rates.clock,
    )
    product = done.flops or "COST_MODEL_TYPE_CLASSIC" in instruction.attributes
    if product and instruction.cycles and instruction.opcode != "custom-call":
        return max(ideal, instruction.cycles / rates.clock)
    return ideal


def collective_seconds(computation: Computation, instruction: Instruction, generation: str) -> float:
    """A collective of k chips: a ring over the links, and the hops that it waits for."""
    link = RATES[generation].link
    opcode = instruction.opcode
    sent = sum(one.bytes for one in _operands(computation, instruction))
    if opcode.startswith("collective-permute"):
        return sent / link + HOP
    received = instruction.bytes
    if opcode.endswith("-start"):
        received -= sent  # its shape has what goes in, too
    chips = group_size(instruction)
    rounds = 2 if opcode.startswith("all-reduce") else 1
    share = rounds * (chips - 1) / chips
    if "all-to-all" in opcode:
        share /= 2  # what goes to a chip need not pass all others
    return max(sent, received) * share / (RING_LINKS * link) + rounds * (chips - 1) * HOP


def group_size(instruction: Instruction) -> int:
    """Chips that take part in a collective; 1 where the text does not say."""
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", instruction.attributes):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", mesh[2]) if axis in sizes)
    if size := instruction.attribute(r"replica_groups=\[\d+,(\d+)\]"):
        return int(size)
    group = instruction.attribute(r"replica_groups=\{\{([\d,]+)\}")
    return len(group.split(",")) if group else 1


def is_collective(opcode: str) -> bool:
    return opcode.startswith(COLLECTIVES)


def is_kernel(instruction: Instruction) -> bool:
    """Whether it is a kernel with instructions of its own, of which the HLO says nothing."""
    target = instruction.attribute(r'custom_call_target="([^"]*)"')
    return instruction.opcode == "custom-call" and target not in NO_KERNEL


def kernel_flops(instruction: Instruction) -> float:
    """What the author of a kernel says that it computes; 0 where nothing is said."""
    return float(instruction.attribute(r"cost_estimate\W+flops\W+(\d+)") or 0)


def _operands(computation: Computation, instruction: Instruction) -> list[Instruction]:
    found = (computation.by_name.get(name) for name in instruction.operands)
    return [one for one in found if one is not None]


def _fusion(module: Module, computation: Computation, fusion: Instruction) -> Work:
    """What it reads of each operand, and writes; with the arithmetic of what is fused."""
    inner = module.called(fusion)
    moved = 0.0
    for number, name in enumerate(fusion.operands):
        operand, parameter = computation.by_name.get(name), inner.parameters.get(number)
        if operand and parameter:
            moved += _read(module, inner, parameter.name, operand)
    moved += _written(module, inner, fusion)
    return Work(moved) + _arithmetic(module, inner)


def _read(module: Module, inner: Computation, name: str, whole: Instruction, depth: int = 0) -> float:
    """Bytes that are read of an array: of a stacked one often a slice only."""
    full = whole.hbm_bytes
    size = full / max(whole.elements, 1)
    total = 0.0
    for user in inner.users.get(name, []):
        if user.opcode in SLICES:
            total += size * user.elements
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == name:
            continue  # written where it is
        elif user.opcode == "bitcast" and depth < NESTED:
            total += _read(module, inner, user.name, whole, depth + 1)
        elif user.opcode == "fusion" and depth < NESTED:
            called = module.called(user)
            parameter = called.parameters[user.operands.index(name)]
            total += _read(module, called, parameter.name, whole, depth + 1)
        else:
            return full
    return min(total, full)


def _written(module: Module, inner: Computation, fusion: Instruction) -> float:
    """Bytes that a fusion writes; where it changes a slice of an array, those of the slice."""
    root = inner.root
    outputs = [root]
    if root.opcode == "tuple":
        outputs = [inner.by_name[name] for name in root.operands if name in inner.by_name]
    total = 0.0
    for array, output in zip(fusion.shape, outputs, strict=False):
        update = _update(module, inner, output)
        elements = update.elements if update else array.elements
        total += array.hbm_bytes / max(array.elements, 1) * elements
    return total


def _update(module: Module, inner: Computation, output: Instruction) -> Instruction | None:
    """The slice that an output differs in from an operand; None where all of it is written."""
    while output.opcode == "bitcast" and (before := inner.operand(output, 0)):
        output = before
    if output.opcode == "fusion":
        inner = module.called(output)
        output = inner.root
    return inner.operand(output, 1) if output.opcode == "dynamic-update-slice" else None


def _arithmetic(module: Module, inner: Computation) -> Work:
    total = Work()
    for instruction in inner.instructions:
        if instruction.opcode == "fusion":
            total += _arithmetic(module, module.called(instruction))
        elif instruction.opcode in ("convolution", "dot"):
            total += Work(flops=_product_flops(inner, instruction))
        else:
            total += Work(vector=_vector_operations(inner, instruction))
    return total


def _vector_operations(computation: Computation, instruction: Instruction) -> float:
    if instruction.opcode in NO_TIME | MOVES:
        return 0
    if instruction.opcode in SLOW:
        return SLOW_OPERATIONS * instruction.elements
    if instruction.opcode == "reduce":
        source = computation.operand(instruction, 0)
        return source.elements if source else instruction.elements
    return instruction.elements


def _product_flops(computation: Computation, product: Instruction) -> float:
    """Two for each multiplication.  On a TPU a product is a convolution, a batched one with a window over the batch."""
    left, right = (computation.operand(product, number) for number in (0, 1))
    if left is None or right is None:
        return 0
    if product.opcode == "dot":
        axes = product.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or ""
        contracted = math.prod(_only(left).dims[int(axis)] for axis in axes.split(",") if axis)
        return 2 * product.elements * contracted
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", product.attributes)
    if not labels:
        return 0
    weights = _only(right)
    flops = 2 * product.elements * weights.elements / weights.dims[labels[2].index("o")]
    window = re.search(r"window=\{size=([\dx]+)(.*?)\}", product.attributes)
    if window and "pad=" in window[2]:
        flops /= math.prod(int(size) for size in window[1].split("x"))  # an output sees one position of it
    return flops / int(product.attribute(r"batch_group_count=(\d+)") or 1)


def _only(instruction: Instruction) -> Array:
    return instruction.shape[0]


def copied_bytes(instruction: Instruction) -> tuple[float, bool]:
    """(bytes of an asynchronous copy, whether they come from the host or go there).

    Its shape has source, destination and a context; of a slice the source is a whole array.
    """
    sizes = [array.bytes for array in instruction.shape if array.dims]
    pick = max if instruction.opcode == "copy-start" else min
    host = any(array.memory == HOST for array in instruction.shape)
    return pick(sizes, default=0.0), host
