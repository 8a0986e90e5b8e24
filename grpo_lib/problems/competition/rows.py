"""The rows of competition problems, as they are published: which columns, in which files, under which name on the hub.

Files and the hub are read by Hugging Face's datasets, in batches and without a copy on disk.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from grpo_lib.common.errors import CourseError
from grpo_lib.common.files import has_half_a_character, parse_json_lines

from ..reading import read_text, rows_as_python

# Name on the hub and its only split.
HUB = {
    "dapo-math": ("BytedTsinghua-SIA/DAPO-Math-17k", "train"),
    "aime": ("HuggingFaceH4/aime_2024", "train"),
    "math500": ("HuggingFaceH4/MATH-500", "test"),
    "math": ("nlile/hendrycks-MATH-benchmark", "train"),  # 12,000: all of MATH but MATH-500
}
BATCH_ROWS = 1 << 16  # rows in memory at once


class Layout(NamedTuple):
    """The columns of one way to publish problems; "a.b" is field b of column a."""

    problem: str
    gold: str
    id: str
    solution: str = ""  # may be missing in a file


LAYOUTS = {
    "dapo-math": Layout("prompt", "reward_model.ground_truth", "extra_info.index"),  # open-r1's processed copy, too
    "aime": Layout("problem", "answer", "id", "solution"),  # MathArena's: OTHER_IDS
    "math500": Layout("problem", "answer", "unique_id", "solution"),
    "math": Layout("problem", "answer", "unique_id", "solution"),
}


OTHER_IDS = {"id": "problem_idx"}  # in MathArena/aime_2025 and aime_2026


class Row(NamedTuple):
    """One row as it was read, its values not checked yet, or the first of several rows with one problem and gold."""

    where: str  # "FILE, row 0", counted from 0 as on the hub
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
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    files = [file for file in files if file.is_file() and file.suffix in (".parquet", ".jsonl")]
    if not files:
        raise CourseError(f"{key}={path} is no .parquet or .jsonl file, nor a folder with some; give one that exists")
    return tuple(File(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)


def read_rows(source: str, files: tuple[File, ...] | None, key: str) -> Iterator[Row]:
    """The rows of a source, from files or, where that is None, from the hub; most repeated rows are one already.

    Raises CourseError for a file that cannot be read, columns that are not known, or a hub that cannot be reached.
    """
    if files is None:
        name, split = HUB[source]
        remedy = f"set {key} to a .parquet or .jsonl file, or to a folder with some, or run once with network"
        yield from _rows(source, name, {"path": name, "split": split}, key, remedy)
    for file in files or ():
        if not file.size:
            raise CourseError(f"{file.path} is empty; put the original file in its place")
        kind = "json" if file.path.endswith(".jsonl") else "parquet"
        options = {"path": kind, "data_files": file.path, "split": "train", "streaming": True}
        yield from _rows(source, file.path, options, key, "put the original file in its place")


def _rows(source: str, name: str, options: dict[str, Any], key: str, remedy: str) -> Iterator[Row]:
    """The rows that datasets.load_dataset gives with these options."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs what it raises, too
    layout = LAYOUTS[source]
    start = 0
    try:
        for table in datasets.load_dataset(**options).with_format("arrow").iter(BATCH_ROWS):
            yield from _table_rows(table.flatten(), layout, source, name, key, start)
            start += table.num_rows
    except CourseError:
        raise
    except Exception as error:  # whatever its parts raise: HTTP, disk, file format
        _require_json_lines(name)
        cause = error.__cause__ or error
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        raise CourseError(f"{name} cannot be read ({reason}); {remedy}") from None
    if not start:
        raise CourseError(f"{name} is empty; {remedy}")


def _require_json_lines(name: str) -> None:
    """Raise CourseError for the first line of a .jsonl file that is not JSON, or has half a character.

    Arrow counts rows from the beginning of the block that it is reading.
    """
    file = Path(name)
    if file.suffix != ".jsonl" or not file.is_file():
        return
    for where, value in parse_json_lines(file, read_text(file)[0]):
        if has_half_a_character(json.dumps(value, ensure_ascii=False)):
            raise CourseError(f"{where} has half a character (\\ud800 to \\udfff); repair the line")


def _table_rows(table: Any, layout: Layout, source: str, name: str, key: str, start: int) -> Iterable[Row]:
    """The rows of an Arrow table whose structs are columns; those with the same problem and gold come as one."""
    if layout.id not in table.column_names and OTHER_IDS.get(layout.id) in table.column_names:
        layout = layout._replace(id=OTHER_IDS[layout.id])
    needed = (layout.problem, layout.gold, layout.id)
    if not {*needed} <= {*table.column_names}:
        raise CourseError(
            f"{name} has the columns {', '.join(sorted(table.column_names))}, but {source} needs {', '.join(needed)}; "
            f"set {key} to a copy of {source}, or rename the columns"
        )
    try:
        yield from _different_rows(table, layout, name, start)
    except UnicodeDecodeError:
        rows_as_python(name, table, start)  # raises, with the row
        raise


def _different_rows(table: Any, layout: Layout, name: str, start: int) -> list[Row]:
    keys = table.select([layout.problem, layout.gold]).to_pandas().astype(str)  # a chat is a list, which has no hash
    counts = keys.groupby(keys.columns.tolist(), sort=False, dropna=False)[layout.gold].transform("size")
    first = (~keys.duplicated()).to_numpy().nonzero()[0].tolist()
    rows = []
    for number, values in zip(first, table.take(first).to_pylist(), strict=True):
        row = (values.get(column) for column in layout)
        rows.append(Row(f"{name}, row {start + number}", layout, *row, count=int(counts[number])))
    return rows
