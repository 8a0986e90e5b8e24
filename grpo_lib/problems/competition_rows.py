"""The rows of competition problems, as they are published: which columns, in which files, under which name on the hub.

The copies on the hub spell the same problems in different columns; `LAYOUTS` has those that are read here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from grpo_lib.common.errors import CourseError

# Name on the hub and its only split.
HUB = {
    "dapo-math": ("BytedTsinghua-SIA/DAPO-Math-17k", "train"),
    "aime": ("HuggingFaceH4/aime_2024", "train"),
    "math500": ("HuggingFaceH4/MATH-500", "test"),
}
BATCH_ROWS = 1 << 16  # rows of a parquet file in memory at once
_SECONDS_TO_ANSWER = 10


class Layout(NamedTuple):
    """The columns of one way to publish problems; "a.b" is field b of column a."""

    problem: str
    gold: str
    id: str
    solution: str = ""  # may be missing in a file
    boxed: bool = False  # the gold is the last \boxed{} of its column


_DAPO = Layout("prompt", "reward_model.ground_truth", "extra_info.index")  # also the processed copy of open-r1
LAYOUTS = {
    "dapo-math": [_DAPO],
    "aime": [
        Layout("problem", "answer", "id", "solution"),  # HuggingFaceH4/aime_2024, AI-MO/aimo-validation-aime
        Layout("Problem", "Answer", "ID", "Solution"),  # Maxwell-Jia/AIME_2024
        Layout("problem", "solution", "id", "solution", boxed=True),  # math-ai/aime24
        _DAPO,  # BytedTsinghua-SIA/AIME-2024, each problem 32 times
    ],
    "math500": [Layout("problem", "answer", "unique_id", "solution")],
}


class Row(NamedTuple):
    """One row as it was read, its values not checked yet, or the first of several rows with one problem and gold."""

    where: str  # "FILE, line 2" from 1 in a .jsonl file; "FILE, row 0" from 0 in a .parquet file, as on the hub
    layout: Layout
    problem: Any
    gold: Any
    id: Any
    solution: Any
    count: int


class File(NamedTuple):
    """A file as it is now: the same path, size and time mean the same rows."""

    path: str
    size: int  # bytes
    changed: int  # nanoseconds


def find_files(path: str, key: str) -> tuple[File, ...]:
    """The .parquet or .jsonl file, or those in the folder, sorted.  `key` is the recipe key of `path`.

    Raises CourseError where there is none.
    """
    place = Path(path).expanduser().absolute()
    advice = "give a .parquet or .jsonl file, or a folder with some"
    if not place.exists():
        raise CourseError(f"{key}={path} does not exist; {advice}")
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    files = [file for file in files if file.is_file() and file.suffix in (".parquet", ".jsonl")]
    if not files:
        raise CourseError(f"{key}={path} has no .parquet or .jsonl file; {advice}")
    return tuple(File(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)


def read_rows(source: str, files: tuple[File, ...] | None, key: str) -> Iterator[Row]:
    """The rows of a source, from files or, where that is None, from the hub; most repeated rows are one already.

    Raises CourseError for a file that cannot be read, columns that are not known, or a hub that cannot be reached.
    """
    if files is None:
        yield from _hub_rows(source, key)
    for file in files or ():
        yield from _file_rows(source, Path(file.path), key)


def _file_rows(source: str, file: Path, key: str) -> Iterator[Row]:
    import pyarrow as pa

    rows = _json_rows(source, file, key) if file.suffix == ".jsonl" else _parquet_rows(source, file, key)
    empty = True
    try:
        for row in rows:
            empty = False
            yield row
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise CourseError(f"{file} cannot be read ({error}); put the original file in its place") from None
    if empty:
        raise CourseError(f"{file} is empty; put the original file in its place")


def _json_rows(source: str, file: Path, key: str) -> Iterator[Row]:
    layout = None
    with file.open(encoding="utf-8", newline="\n") as lines:  # JSON allows other line breaks inside a string
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                reason = getattr(error, "msg", type(error).__name__)
                raise CourseError(f"{where} is not JSON ({reason}); put the original file in its place") from None
            if not isinstance(row, dict):
                raise CourseError(f"{where} must be an object with columns; repair the line")
            layout = layout or _layout(source, _names(row), str(file), key)
            yield _row(where, layout, row)


def _parquet_rows(source: str, file: Path, key: str) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(file) as parquet:
        names = _arrow_names(parquet.schema_arrow)
        layout = _layout(source, names, str(file), key)
        columns = sorted(names & {layout.problem, layout.gold, layout.id, layout.solution})
        batches = parquet.iter_batches(BATCH_ROWS, columns=columns)
        yield from _table_rows(map(pa.Table.from_batches, ([batch] for batch in batches)), layout, str(file))


def _hub_rows(source: str, key: str) -> Iterator[Row]:
    import datasets
    import requests
    from datasets import config

    name, split = HUB[source]
    offline = config.HF_HUB_OFFLINE
    datasets.disable_progress_bars()
    try:
        if not offline:
            try:
                requests.head(config.HF_ENDPOINT, timeout=_SECONDS_TO_ANSWER)
            except requests.RequestException:  # load_dataset would try for half a minute before it looks in its cache
                config.HF_HUB_OFFLINE = True
        dataset = datasets.load_dataset(name, split=split)
    except Exception as error:  # whatever its parts raise: HTTP, disk, file format
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if config.HF_HUB_OFFLINE and not offline:
            reason = "no network"
        raise CourseError(
            f"{name} cannot be loaded from the Hugging Face hub ({reason}); set {key} to a .parquet or .jsonl file, "
            "or to a folder with some, or run once with network"
        ) from None
    finally:
        config.HF_HUB_OFFLINE = offline
    layout = _layout(source, _arrow_names(dataset.features.arrow_schema), name, key)
    yield from _table_rows(dataset.with_format("arrow").iter(BATCH_ROWS), layout, name)


def _table_rows(tables: Iterable[Any], layout: Layout, name: str) -> Iterator[Row]:
    """The rows of Arrow tables; those of one table with the same problem and gold come as one."""
    start = 0
    for table in tables:
        numbers, counts = _first_rows(table, layout)
        for number, count, row in zip(numbers, counts, table.take(numbers).to_pylist(), strict=True):
            yield _row(f"{name}, row {start + number}", layout, row, count)
        start += table.num_rows


def _first_rows(table: Any, layout: Layout) -> tuple[list[int], list[int]]:
    """Number of the first row with each problem and gold, and how many rows have them.

    Hashing in Arrow takes a tenth of the time that Python objects for all rows take.
    """
    import pyarrow as pa

    numbers = list(range(table.num_rows))
    try:
        keys = {"gold": _arrow_column(table, layout.gold), **_texts(_arrow_column(table, layout.problem))}
        groups = pa.table({**keys, "number": numbers}).group_by(list(keys), use_threads=False)
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):  # types that no copy has: each row is checked, and named
        return numbers, [1] * len(numbers)
    first = groups.aggregate([("number", "min"), ("number", "count")]).sort_by("number_min")
    return first["number_min"].to_pylist(), first["number_count"].to_pylist()


def _texts(problems: Any) -> dict[str, Any]:
    """Columns that tell problems apart: the texts, or role and content of chats with one message.

    Raises ArrowInvalid where a chat has more messages or none.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_nested(problems.type):
        return {"problem": problems}
    lengths = pc.list_value_length(problems)  # pyright: ignore[reportAttributeAccessIssue]
    if lengths.null_count or lengths.unique().to_pylist() not in ([], [1]):
        raise pa.ArrowInvalid("not one message")
    messages = pc.list_flatten(problems)  # pyright: ignore[reportAttributeAccessIssue]
    return {name: pc.struct_field(messages, name) for name in ("role", "content")}  # pyright: ignore


def _arrow_column(table: Any, column: str) -> Any:
    import pyarrow.compute as pc

    top, _, field = column.partition(".")
    return pc.struct_field(table[top], field) if field else table[top]  # pyright: ignore[reportAttributeAccessIssue]


def _arrow_names(schema: Any) -> set[str]:
    """Columns of an Arrow schema, with the fields of those that have some: {"prompt", "extra_info.index", ...}."""
    import pyarrow as pa

    inner = {f"{f.name}.{field.name}" for f in schema if pa.types.is_struct(f.type) for field in f.type}
    return {*schema.names, *inner}


def _names(row: dict[str, Any]) -> set[str]:
    """The same of a row as JSON has it."""
    return {*row, *(f"{name}.{field}" for name, value in row.items() if isinstance(value, dict) for field in value)}


def _layout(source: str, names: set[str], file: str, key: str) -> Layout:
    """The layout whose columns a file has."""
    for layout in LAYOUTS[source]:
        if {layout.problem, layout.gold, layout.id} <= names:
            return layout
    known = " | ".join(", ".join((known.problem, known.gold, known.id)) for known in LAYOUTS[source])
    raise CourseError(
        f"{file} has the columns {', '.join(sorted(names))}, but {source} needs {known}; "
        f"set {key} to a copy of {source}, or rename the columns"
    )


def _row(where: str, layout: Layout, values: dict[str, Any], count: int = 1) -> Row:
    problem, gold, id, solution = (_value(values, column) for column in layout[:4])
    return Row(where, layout, problem, gold, id, solution, count)


def _value(row: dict[str, Any], column: str) -> Any:
    """What a row has in "a" or in "a.b"; None where it has nothing."""
    top, _, field = column.partition(".")
    value = row.get(top)
    if not field:
        return value
    return value.get(field) if isinstance(value, dict) else None
