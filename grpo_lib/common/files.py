"""Files that survive an interruption: whole or absent, never half written.

A run is often interrupted (a closed laptop, a preempted TPU VM). What it wrote must be readable afterwards, so whole
files are replaced atomically, and a log of JSON lines may lose at most the line that was being written.
"""

import gzip
import json
import os
import secrets
import shutil
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from grpo_lib.common.errors import CourseError, first_line


def write_text_atomic(path: str | os.PathLike, text: str) -> Path:
    """Write `text` to `path` as UTF-8, line breaks as they are; see `write_bytes_atomic`."""
    # Lone surrogates have no UTF-8 encoding; they are replaced by "?".
    return write_bytes_atomic(path, text.encode("utf-8", errors="replace"))


def write_bytes_atomic(path: str | os.PathLike, data: bytes) -> Path:
    """Write `data` to `path` so that a reader sees either the old file or the new one.

    The data go to a temporary file in the same folder (`os.replace` is atomic only within one file system),
    are flushed to disk, and are renamed to `path` at the end. Missing folders are created. The mode is that of
    any new file (`tempfile` would make one that only its owner may read).
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path


def write_json_atomic(path: str | os.PathLike, obj: Any) -> Path:
    """Write `obj` as indented JSON, atomically; see `write_text_atomic`.

    Raises:
      ValueError: NaN or infinity in `obj`, which JSON cannot represent.
    """
    return write_text_atomic(path, json.dumps(obj, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_jsonl_atomic(path: str | os.PathLike, rows: Iterable[dict[str, Any]]) -> Path:
    """Write `rows` as lines of JSON, atomically; see `write_text_atomic`."""
    return write_text_atomic(path, "".join(_line(row) for row in rows))


def append_jsonl(path: str | os.PathLike, row: dict[str, Any]) -> None:
    """Append `row` as one line of JSON and flush it to disk.

    If the file ends in a torn line (the writer was stopped in the middle of it), the torn line is removed
    first: otherwise the new row would be appended to it, and both would be lost.

    Raises CourseError where `read_jsonl` would, of a file that ends in a torn line.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        complete = file.read() in (b"", b"\n")  # the last byte
    if not complete:
        write_jsonl_atomic(path, read_jsonl(path))
    with open(path, "ab") as file:
        file.write(_line(row).encode("utf-8", errors="replace"))
        file.flush()
        os.fsync(file.fileno())


def require_space(needs: Iterable[tuple[Path, float]], remedy: str) -> str:
    """Raise CourseError where a disk has less free than is going to be written there; else say what was found.

    Args:
      needs: folders, which may not exist yet, and bytes; those of one disk are added up.
    """
    disks: dict[int, tuple[Path, float]] = {}
    for folder, size in needs:
        place = next(parent for parent in (folder.resolve(), *folder.resolve().parents) if parent.exists())
        first, before = disks.get(place.stat().st_dev, (place, 0.0))
        disks[place.stat().st_dev] = first, before + size
    text = "; ".join(
        f"{place} has {shutil.disk_usage(place).free / 1e9:.1f} GB free, and about {need / 1e9:.1f} are needed"
        for place, need in disks.values()
    )
    if any(shutil.disk_usage(place).free < need for place, need in disks.values()):
        raise CourseError(f"{text}; {remedy}")
    return text


def read_json(path: str | os.PathLike, remedy: str) -> dict[str, Any]:
    """Return the object in a JSON file.

    Args:
      remedy: what to do about a damaged one, for the error.

    Raises:
      CourseError: the file is not JSON, or holds something else than an object.
      FileNotFoundError: there is no such file.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CourseError(f"{path}: not JSON ({first_line(error)}); {remedy}") from None
    if not isinstance(content, dict):
        raise CourseError(f"{path}: a JSON object is expected, not a {type(content).__name__}; {remedy}")
    return content


def read_json_if_exists(path: str | os.PathLike) -> dict[str, Any]:
    """The object in a JSON file, such as summary.json; empty where there is no file. Raises CourseError."""
    try:
        return read_json(path, "remove the file")
    except FileNotFoundError:
        return {}


def read_jsonl(path: str | os.PathLike) -> list[dict[str, Any]]:
    """Return the rows of a JSON-lines file, without the last line if that one is torn; a name in .gz is compressed.

    Raises:
      CourseError: a line before the last is not JSON, or a line is not an object; names file and line.
      FileNotFoundError: there is no such file.
    """
    path = Path(path)
    # Split at "\n" alone: str.splitlines would also split at U+2028 inside a completion.
    lines = _content(path).decode("utf-8-sig", errors="replace").split("\n")  # with or without a byte order mark
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            # Only what follows the last line break can be torn: every complete row ends in one.
            if number == len(lines):
                break
            raise CourseError(f"{path}: line {number} is not JSON ({error.msg}); remove the line") from error
        except RecursionError:
            raise CourseError(f"{path}: line {number} has too many brackets in each other; remove the line") from None
        except ValueError:  # of Python's int
            raise CourseError(f"{path}: line {number} has a number with too many digits; remove the line") from None
        if not isinstance(row, dict):
            raise CourseError(f"{path}: line {number} is not a JSON object; remove the line")
        rows.append(row)
    return rows


def parse_json_lines(file: str | os.PathLike, text: str) -> Iterator[tuple[str, Any]]:
    """(where it stands, such as "train.jsonl, line 3", value) for each line of a user's file that is not empty.

    Raises CourseError for a line that is not JSON: nothing of what a user wrote is passed over.
    """
    # Not splitlines(): it would also break lines at characters that JSON allows inside a string.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        try:
            value = json.loads(line)
        except RecursionError:
            raise CourseError(f"{where} has too many brackets in each other; repair the line") from None
        except ValueError as error:  # also of a number with too many digits
            raise CourseError(f"{where} is not JSON ({first_line(error)}); repair the line") from None
        yield where, value


def has_half_a_character(text: str) -> bool:
    """Whether a text has a surrogate without its pair, which JSON can spell and no file in UTF-8 can hold."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def ends_torn(path: str | os.PathLike) -> bool:
    """Whether `read_jsonl` leaves out the last line of a file."""
    last = _content(Path(path)).rpartition(b"\n")[2]
    if not last.strip():
        return False
    try:
        json.loads(last.decode("utf-8", errors="replace"))
    except json.JSONDecodeError:
        return True
    except (ValueError, RecursionError):
        return False  # `read_jsonl` refuses it
    return False


def _content(path: Path) -> bytes:
    """What a file holds, decompressed where its name ends in .gz."""
    content = path.read_bytes()
    if path.suffix != ".gz":
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise CourseError(f"{path} cannot be decompressed ({error}); copy it again") from error


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"
