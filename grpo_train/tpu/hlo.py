"""Optimised HLO, as libtpu writes it, read into plain data.

    module = parse(compiled.as_text())
    for instruction in module.entry.instructions: ...

Only what an estimate of time needs is read: names, shapes with their memory, operands, and the attributes as text.
The instructions of a computation stand in the order in which the chip runs them (`is_scheduled=true`).
"""

import functools
import math
import re
from dataclasses import dataclass

from grpo_lib.common.errors import CourseError

ITEMSIZE = {
    "pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "s32": 4, "u32": 4, "s64": 8, "u64": 8,
    "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "c64": 8, "f8e4m3fn": 1, "f8e5m2": 1,
}  # fmt: skip

# bf16[8,1024]{1,0:T(8,128)(2,1)S(1)}: type, dimensions, layout with the memory it lies in.
ARRAY = re.compile(r"\b([a-z]+\d*(?:e\dm\d\w*)?)\[([\d,<=]*)\](\{[^}]*\})?")
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$")
OPCODE = re.compile(r"([\w\-]+)\((.*)$", re.DOTALL)
# Attributes of Mosaic's kernels go over several lines, of which some begin with a brace, too.
END = re.compile(r"^\}(, execution_thread=\S+)?\s*$")

# Where an array lies, by the S(n) of its layout; none of it: the chip's memory (HBM).
VMEM, HOST = 1, 5


@dataclass(frozen=True)
class Array:
    dtype: str
    dims: tuple[int, ...]
    memory: int  # 0: HBM

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> float:
        return ITEMSIZE.get(self.dtype, 0) * self.elements

    @property
    def hbm_bytes(self) -> float:
        return 0 if self.memory else self.bytes


@dataclass(frozen=True)
class Instruction:
    name: str
    shape: tuple[Array, ...]  # of a tuple its parts, flat
    opcode: str
    operands: tuple[str, ...]
    arguments: str  # the text between the parentheses
    attributes: str  # the text behind them

    def attribute(self, pattern: str) -> str | None:
        """The first group of a pattern in the attributes."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else None

    @property
    def called(self) -> str | None:
        """The computation of a fusion, a call or an asynchronous start."""
        return self.attribute(r"(?:calls|to_apply)=%?([\w.\-]+)")

    @property
    def cycles(self) -> int | None:
        """What the compiler's cost model says; a time for products only, where its type is CLASSIC."""
        found = self.attribute(r'"estimated_cycles":"?(\d+)')
        return int(found) if found else None

    @property
    def trips(self) -> int | None:
        """How often a loop runs, where the compiler knows it.  A constant in its condition is only a limit."""
        found = self.attribute(r'"known_trip_count":\{"n":"(\d+)"')
        return int(found) if found else None

    @property
    def elements(self) -> int:
        return sum(array.elements for array in self.shape)

    @property
    def bytes(self) -> float:
        return sum(array.bytes for array in self.shape)

    @property
    def hbm_bytes(self) -> float:
        return sum(array.hbm_bytes for array in self.shape)


@dataclass(frozen=True)
class Computation:
    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        users: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for name in instruction.operands:
                users.setdefault(name, []).append(instruction)
        return users

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        return {int(one.arguments): one for one in self.instructions if one.opcode == "parameter"}

    @property
    def root(self) -> Instruction:
        return self.instructions[-1]  # also where the text does not say ROOT: the last one that runs

    def operand(self, instruction: Instruction, number: int) -> Instruction | None:
        """The instruction that makes an operand; None where it is not of this computation."""
        if number >= len(instruction.operands):
            return None
        return self.by_name.get(instruction.operands[number])


@dataclass(frozen=True)
class Module:
    name: str
    computations: dict[str, Computation]
    entry: Computation

    def called(self, instruction: Instruction) -> Computation:
        return self.computation(instruction.called, instruction)

    def computation(self, name: str | None, instruction: Instruction) -> Computation:
        """A computation that an instruction names.  Raises CourseError where the text does not have it."""
        if name is None or name not in self.computations:
            raise CourseError(f"the HLO has no computation {name} that its {instruction.name} calls: it is not whole")
        return self.computations[name]


def parse(text: str) -> Module:
    """Read a module.  Raises CourseError, in one line, for a text that is cut off or is not HLO of a TPU."""
    if not text.startswith("HloModule"):
        raise CourseError(f"not HLO: it begins with {text[:40]!r} where HloModule is expected")
    if "is_scheduled=true" not in text.partition("\n")[0]:
        raise CourseError("this HLO is not optimised: is_scheduled=true is missing in its first line")
    computations: dict[str, Computation] = {}
    entry = name = None
    lines: list[str] = []
    for line in text.splitlines():
        if name is None:
            if begin := COMPUTATION.match(line):
                name, lines = begin[2], []
                entry = name if begin[1] else entry
        elif END.match(line):
            computations[name] = Computation(name, tuple(_instructions(lines)))
            name = None
        else:
            lines.append(line)
    if name is not None:
        raise CourseError(f"the HLO is cut off: computation {name} has no end")
    if entry is None or not computations[entry].instructions:
        raise CourseError("the HLO is cut off: it has no entry computation")
    name = text.removeprefix("HloModule ").partition(",")[0]
    return Module(name, computations, computations[entry])


def _instructions(lines: list[str]) -> list[Instruction]:
    found = []
    for line in lines:
        begin = INSTRUCTION.match(line)
        if begin and (instruction := _instruction(begin[1], begin[2])):
            found.append(instruction)
    return found


def _instruction(name: str, text: str) -> Instruction | None:
    """`bf16[8]{0} fusion(%a, %b), kind=kLoop, …`; None for a line of a kernel's attributes, which is no instruction."""
    shape, rest = _split_shape(text)
    found = OPCODE.match(rest)
    if not found:
        return None
    opcode, rest = found.groups()
    end = _closing(rest)
    arguments, attributes = rest[:end], rest[end + 1 :]
    operands = tuple(re.findall(r"%([\w.\-]+)", arguments))
    return Instruction(name, arrays(shape), opcode, operands, arguments, attributes)


def _split_shape(text: str) -> tuple[str, str]:
    """(the shape, what follows it)"""
    if not text.startswith("("):
        shape, _, rest = text.partition(" ")
        return shape, rest
    end = _closing(text[1:]) + 2
    return text[:end], text[end + 1 :]


def _closing(text: str) -> int:
    """Where the parenthesis that was open before this text ends."""
    depth = 1
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return position
    return len(text)


def arrays(shape: str) -> tuple[Array, ...]:
    """The arrays of a shape's text."""
    found = []
    for dtype, dims, layout in ARRAY.findall(shape):
        if dtype not in ITEMSIZE:
            continue
        memory = re.search(r"S\((\d+)\)", layout)
        sizes = tuple(int(size.strip("<=")) for size in dims.split(",") if size.strip("<="))
        found.append(Array(dtype, sizes, int(memory[1]) if memory else 0))
    return tuple(found)
