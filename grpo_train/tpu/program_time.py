"""The time of one run of a compiled program, from its optimised HLO: no TPU, no constant that was fitted.

    time = program_time(compiled.as_text(), "v6e", libtpu="0.0.44")

The schedule is followed as it stands.  Operations run one after the other; asynchronous copies and collectives run
beside them, and what is not over where the schedule waits for it is waited for.  Loops count with their trips.  What it
has been worth so far: docs/estimates.md.
"""

import re
from collections import Counter
from collections.abc import Mapping

from grpo_lib.common.errors import CourseError, first_line
from grpo_train.recipes.slices import CHIPS
from grpo_train.tpu import hlo, op_costs
from grpo_train.tpu.compile_jobs import ProgramTime
from grpo_train.tpu.hlo import Computation, Instruction, Module

# libtpu's simulation is no time beyond this multiple: once it had 1.97 s for a product of 1 ms.
BELIEVED = 2.0
COPY_STARTS = ("copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start", "async-start")


def program_time(
    text: str,
    generation: str,
    *,
    kernel_seconds: Mapping[str, float] | None = None,
    log: str = "",
    libtpu: str = "",
) -> ProgramTime:
    """Estimate one run of a program.

    Args:
      text: its optimised HLO, compiled with full effort.
      generation: of the chip: v4, v5e, v5p or v6e.
      kernel_seconds: of one call of a kernel, by a part of the instruction's or the operation's name; see
        kernel_bundles.
      log: what libtpu's scheduler wrote, if it did.

    Raises CourseError, in one line, for a text that is not whole, or not of a TPU.
    """
    try:
        walk = _Walk(hlo.parse(text), generation, kernel_seconds or {})
        seconds = walk.run(walk.module.entry, 1)
    except (ValueError, KeyError, IndexError) as error:
        raise CourseError(f"this HLO is not as libtpu 0.0.44 writes it: {first_line(error)}") from error
    name = f"{walk.module.entry.name}, module {walk.module.name}("
    simulated = simulated_seconds(log, name, op_costs.RATES[generation].clock)
    if simulated is not None and not seconds / BELIEVED <= simulated <= seconds * BELIEVED:
        simulated = None
    return ProgramTime(
        seconds=seconds,
        by_kind=dict(walk.by_kind),
        open_loops=tuple(walk.open_loops),
        untimed_kernels=walk.untimed_kernels,
        simulated=simulated,
        libtpu=libtpu,
    )


def simulated_seconds(log: str, wanted: str, clock: float) -> float | None:
    """What libtpu's latency hiding scheduler says that a computation takes; None where it says nothing.

    It writes "Total cycles" of each computation, before and after it has scheduled it, with
    TPU_VMODULE=latency_hiding_scheduler=1.  `wanted` is how it names the computation: another program's may be in the
    log, too.
    """
    cycles = None
    after = found_it = False
    for line in log.splitlines():
        if "Statistics before" in line or "Statistics after" in line:
            after = "Statistics after" in line
        elif "For computation: " in line:
            found_it = f"For computation: {wanted}" in line
        elif (found := re.search(r"\] Total cycles: ([\d.e+]+)", line)) and after and found_it:
            cycles = float(found[1])
    return None if cycles is None else cycles / clock


def kernel_bundles(listing: str) -> list[tuple[int, int]]:
    """(address of the loop's exit test, its limit) of a kernel's final bundles, with the last address at the end.

    libtpu writes them with LIBTPU_INIT_ARGS="--xla_jf_dump_to=FOLDER --xla_jf_dump_llo_text=true" as
    *-final_bundles.txt; a bundle takes a cycle.
    """
    address, found = 0, []
    for line in listing.splitlines():
        if begin := re.match(r"\s*(0x[0-9a-f]+)\s+[A-Z ]*:", line):
            address = int(begin[1], 16)
        if test := re.search(r"(\d+) /\* loop exit test \*/", line):
            found.append((address, int(test[1])))
    return [*found, (address, 1)]


def _counted_trips(module: Module, loop: Instruction) -> int | None:
    """How often a loop runs whose condition is `counter < constant` and nothing else, as of a scan over layers.

    A constant beside another condition is a limit only: decoding ends where all completions have.
    """
    condition = module.computation(loop.attribute(r"condition=%?([\w.\-]+)"), loop)
    test = condition.root
    counter, limit = (condition.operand(test, number) for number in (0, 1))
    if test.opcode != "compare" or "direction=LT" not in test.attributes or not counter or not limit:
        return None
    if counter.opcode != "get-tuple-element" or limit.opcode != "constant" or not limit.arguments.isdigit():
        return None
    return int(limit.arguments)


class _Walk:
    """Adds up a module's computations."""

    def __init__(self, module: Module, generation: str, kernel_seconds: Mapping[str, float]) -> None:
        self.module, self.generation, self.kernel_seconds = module, generation, kernel_seconds
        self.bandwidth = CHIPS[generation].bandwidth
        self.by_kind: Counter[str] = Counter()
        self.open_loops: list[float] = []
        self.untimed_kernels = 0

    def run(self, computation: Computation, times: float) -> float:
        """Seconds of one run of a computation that runs so many times."""
        line = _Timeline(self.bandwidth)
        for instruction in computation.instructions:
            self._step(computation, instruction, line, times)
        memory = line.traffic / self.bandwidth
        if memory > line.now:
            self.by_kind["waiting"] += (memory - line.now) * times
        self.by_kind["waiting"] += line.waited * times
        return max(line.now, memory)

    def _step(self, computation: Computation, instruction: Instruction, line: "_Timeline", times: float) -> None:
        opcode = instruction.opcode
        if opcode in op_costs.NO_TIME:
            return
        if opcode.endswith("-done"):
            line.wait(instruction)
        elif opcode.endswith("-update"):
            line.follow(instruction)
        elif opcode in ("while", "conditional", "call"):
            line.now += self._nested(instruction, times)
        elif collective := self._collective(computation, instruction):
            seconds = op_costs.collective_seconds(*collective, self.generation)
            line.send(instruction, seconds)
            if not opcode.endswith("-start"):
                self.by_kind["collective"] += seconds * times
        elif opcode in COPY_STARTS:
            copied, host = op_costs.copied_bytes(instruction)
            line.copy(instruction, 0 if host else copied)
        else:
            line.now += self._operation(computation, instruction, line, times)

    def _nested(self, instruction: Instruction, times: float) -> float:
        if instruction.opcode == "call":
            return self.run(self.module.called(instruction), times)
        if instruction.opcode == "conditional":
            return self._longest_branch(instruction, times)
        body = self.module.computation(instruction.attribute(r"body=%?([\w.\-]+)"), instruction)
        trips = instruction.trips or _counted_trips(self.module, instruction)
        if trips is None:
            self.open_loops.append(_Walk(self.module, self.generation, self.kernel_seconds).run(body, 1))
            return 0
        return trips * self.run(body, times * trips)

    def _longest_branch(self, instruction: Instruction, times: float) -> float:
        listed = instruction.attribute(r"branch_computations=\{([^}]*)\}")
        names = re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", instruction.attributes)
        if listed:
            names = re.findall(r"%?([\w.\-]+)", listed)
        branches = [self.module.computation(name, instruction) for name in names]
        seconds = [self.run(branch, 0) for branch in branches]
        self.by_kind["bytes"] += max(seconds, default=0) * times
        return max(seconds, default=0)

    def _collective(self, computation: Computation, instruction: Instruction) -> tuple[Computation, Instruction] | None:
        """The computation and the collective that an operation is, or starts."""
        if op_costs.is_collective(instruction.opcode):
            return computation, instruction
        if instruction.opcode != "async-start":
            return None
        inner = self.module.called(instruction)
        found = [one for one in inner.instructions if op_costs.is_collective(one.opcode)]
        return (inner, found[0]) if found else None

    def _operation(self, computation: Computation, instruction: Instruction, line: "_Timeline", times: float) -> float:
        done = op_costs.work(self.module, computation, instruction)
        if instruction.opcode == "custom-call":
            if not op_costs.is_kernel(instruction):
                return 0
            done = op_costs.Work(done.bytes, flops=op_costs.kernel_flops(instruction))
        seconds = op_costs.seconds(instruction, done, self.generation)
        kind = "product" if done.flops else "bytes"
        if kind == "bytes" and seconds > done.bytes / self.bandwidth:
            kind = "arithmetic"
        if instruction.opcode == "custom-call":
            kind = "kernel"
            seconds = self._kernel(instruction, seconds, times)
        line.traffic += done.bytes
        self.by_kind[kind] += seconds * times
        return seconds

    def _kernel(self, instruction: Instruction, least: float, times: float) -> float:
        # With attributes of several lines, which a kernel may have, op_name is not in the first.
        name = f"{instruction.name} {instruction.attribute(r'op_name="([^"]*)"') or ''}"
        for part, seconds in self.kernel_seconds.items():
            if part in name:
                return seconds
        self.untimed_kernels += int(times)
        return least


class _Timeline:
    """The schedule of one run of a computation: now, and when what runs beside it ends."""

    def __init__(self, bandwidth: float) -> None:
        self.bandwidth = bandwidth
        self.now = self.waited = self.traffic = 0.0
        self.links_free = self.copies_free = 0.0
        self.ends: dict[str, float] = {}

    def send(self, instruction: Instruction, seconds: float) -> None:
        """A collective; the links carry one after the other."""
        self.links_free = max(self.now, self.links_free) + seconds
        self.ends[instruction.name] = self.links_free
        if not instruction.opcode.endswith("-start"):
            self.now = self.links_free

    def copy(self, instruction: Instruction, size: float) -> None:
        """An asynchronous copy between the chip's memories."""
        self.traffic += size
        self.copies_free = max(self.now, self.copies_free) + size / self.bandwidth
        self.ends[instruction.name] = self.copies_free

    def follow(self, update: Instruction) -> None:
        for name in update.operands[:1]:
            self.ends[update.name] = self.ends.get(name, self.now)

    def wait(self, done: Instruction) -> None:
        for name in done.operands[:1]:
            end = self.ends.get(name, self.now)
            self.waited += max(0.0, end - self.now)
            self.now = max(self.now, end)
