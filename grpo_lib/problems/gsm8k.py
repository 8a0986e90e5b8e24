"""GSM8K (Cobbe et al., arXiv:2110.14168), 7,473 train and 1,319 test problems.

tensorflow-datasets and the original files give the same problems in the same order, that of the files:

    {"question": "Natalia sold ...", "answer": "She sold 48/2 = <<48/2=24>>24 clips.\\n...\\n#### 72"}

TensorFlow is not needed: tensorflow-datasets writes and reads array_record files without it.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_lib import answers
from grpo_lib.common import environment
from grpo_lib.common.errors import CourseError
from grpo_lib.common.files import has_half_a_character, parse_json_lines

from .reading import Found, Place, each_once, read_text
from .types import Problem

ANSWER_MARK = "####"
SET_PATH = "set problems.path=FOLDER to a folder with train.jsonl and test.jsonl"

# A calculator annotation, as in "48/2 = <<48/2=24>>24": input for a tool that the models here do not have.
_ANNOTATION = re.compile(r"<<[^<>]*>>")
_SECONDS_TO_ANSWER = 10


def from_tfds(split: str, data_dir: str | os.PathLike | None = None) -> list[Problem]:
    """The problems of a split, "train" or "test", through the `gsm8k` builder of tensorflow-datasets.

    The first call downloads 11 MB and prepares them in `data_dir`, which is by default $TFDS_DATA_DIR, or a folder in
    the repo's ignored .cache; later calls need no network.

    Raises:
      CourseError: nothing prepared and no network; the data cannot be prepared or read.
    """
    data_dir = data_dir or os.environ.get("TFDS_DATA_DIR") or environment.default_variables()["TFDS_DATA_DIR"]
    folder = Path(data_dir).expanduser().absolute()
    try:
        rows = _original_order(_read_tfds(split, folder), split)
    except CourseError:
        raise
    except Exception as error:  # the builder raises whatever its parts raise: HTTP, disk, file format
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        advice = f"delete {folder / 'gsm8k'} and try again, or {SET_PATH}"
        raise CourseError(f"GSM8K cannot be prepared in {folder} ({reason}); {advice}") from error
    texts = [{name: row[name].decode() for name in ("question", "answer")} for row in rows]
    return [_problem(text, split, n, f"{folder}: row {n} of {split}") for n, text in enumerate(texts)]


def from_folder(path: str | os.PathLike, split: str) -> list[Problem]:
    """The problems of a split, from `train.jsonl` or `test.jsonl` of the original data in folder `path`.

    Raises CourseError as `found_in_folder` does.
    """
    return list(found_in_folder(path, split).problems)


def found_in_folder(path: str | os.PathLike, split: str, conflicts: str = "refuse") -> Found:
    """The same, with what there is to say about the file, which may be a user's own; the original repeats no question.

    Args:
      conflicts: "refuse" is an error where a question has two answers; "skip" leaves such questions out.

    Raises:
      CourseError: no such folder or file; a line that is not a GSM8K problem (it is named).
    """
    file = _file(path, split)
    try:
        text, odd = read_text(file)
    except (OSError, CourseError) as error:
        raise CourseError(f"problems.path={path}: {file.name} cannot be read ({error}); {SET_PATH}") from None
    rows = enumerate(parse_json_lines(file, text))
    problems = [(_problem(row, split, number, where), Place(where, where)) for number, (where, row) in rows]
    if not problems:
        raise CourseError(f"{file} is empty; {SET_PATH}")
    return each_once(file, problems, conflicts, odd)


def has(path: str | os.PathLike, split: str) -> bool:
    """Whether folder `path` has the original file of a split."""
    return _file(path, split).is_file()


def _file(path: str | os.PathLike, split: str) -> Path:
    return Path(path).expanduser() / f"{split}.jsonl"


def _problem(row: Any, split: str, number: int, where: str) -> Problem:
    """One row of the original data.  `number` counts from 0, `where` names the row in an error."""
    fields = [row.get(name) for name in ("question", "answer")] if isinstance(row, dict) else []
    if not fields or not all(isinstance(text, str) and text.strip() for text in fields):
        raise CourseError(f"{where} must be an object with the texts question and answer; repair the line")
    question, worked = fields
    if has_half_a_character(f"{question}{worked}"):
        raise CourseError(f"{where} has half a character (\\ud800 to \\udfff); repair the line")
    solution, mark, gold = worked.rpartition(ANSWER_MARK)
    if not mark:
        raise CourseError(f"{where}: the answer has no {ANSWER_MARK}; add a line like {ANSWER_MARK} 72")
    answer = answers.canonical_answer(gold)
    if answer is None:
        gold = repr(gold.strip()[:80])
        raise CourseError(f"{where}: {gold} after {ANSWER_MARK} is not one number; repair the line")
    return Problem(
        id=f"gsm8k-{split}-{number:05d}",
        question=question.strip(),
        solution=_ANNOTATION.sub("", solution).strip(),
        answer=answer,
        source="gsm8k",
        steps=len(_ANNOTATION.findall(solution)) or None,  # 113 of the 8,792 solutions carry no annotation
    )


def _read_tfds(split: str, data_dir: Path) -> list[dict[str, Any]]:
    """Rows of a split as the builder stored them, texts as bytes.  Prepares the data if need be."""
    import tensorflow_datasets as tfds
    from absl import logging
    from tensorflow_datasets.text.gsm8k import gsm8k  # registers the builder; tfds.builder does not know it before

    logging.set_verbosity(logging.ERROR)  # it warns of a folder that is about to be filled
    # The default format, tfrecord, needs TensorFlow and cannot be read by index.
    builder: Any = tfds.builder("gsm8k", data_dir=data_dir, file_format="array_record")
    if not builder.is_prepared():
        urls = gsm8k._URLS.values()
        # Each finished download has an .INFO file next to it. With all of them in place no network is needed.
        if len(list((data_dir / "downloads" / builder.name).glob("*.INFO"))) < len(urls):
            _require_network(next(iter(urls)), data_dir)
        tfds.disable_progress_bar()
        builder.download_and_prepare()
    source = builder.as_data_source(split=split)
    return [source[index] for index in range(len(source))]


def _require_network(url: str, data_dir: Path) -> None:
    """Ask once before tensorflow-datasets does, which tries for minutes where there is no network."""
    import requests

    try:
        requests.head(url, timeout=_SECONDS_TO_ANSWER)
    except requests.RequestException as error:
        raise CourseError(
            f"GSM8K is not prepared in {data_dir} and its server cannot be reached ({type(error).__name__}); "
            f"{SET_PATH}, or run once with network"
        ) from None


def _original_order(rows: Sequence[dict[str, Any]], split: str) -> list[dict[str, Any]]:
    """Undo the order of tensorflow-datasets, which sorts rows by the salted hash of their number in the file.

    So a problem has the same id from both sources, and a seed gives the same training batches.
    """
    from tensorflow_datasets.core import hashing

    numbers = sorted(range(len(rows)), key=hashing.Hasher(split).hash_key)
    by_number = dict(zip(numbers, rows, strict=True))
    return [by_number[number] for number in range(len(rows))]
