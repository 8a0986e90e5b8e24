"""Problems as a data set of tensorflow-datasets: files that are read row by row, in any order, without TensorFlow.

folder = write_tfds({"train": problems}, "somewhere")
rows = tfds.data_source("word_problems", split="train", data_dir="somewhere")
rows[3]                                                # {"question": b"…", "solution": b"…", "answer": b"…"}
"""

import contextlib
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .types import Problem

FIELDS = ("question", "solution", "answer")


def write_tfds(splits: Mapping[str, Sequence[Problem]], data_dir: str | os.PathLike) -> Path:
    """Write problems, by split, as the data set `word_problems` in array_record files; returns their folder.

    What was written there before is replaced.  tensorflow-datasets puts the rows of a split into an order of its own.
    """
    import tensorflow_datasets as tfds  # here, because it takes a second
    from absl import logging

    class WordProblems(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self) -> Any:
            texts = {name: tfds.features.Text() for name in FIELDS}
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(texts))

        def _split_generators(self, _: Any) -> dict[str, Any]:
            return {split: self._generate_examples(problems) for split, problems in splits.items()}

        def _generate_examples(self, problems: Sequence[Problem]) -> Any:
            for number, problem in enumerate(problems):
                yield number, {name: getattr(problem, name) for name in FIELDS}

    logging.set_verbosity(logging.ERROR)  # it warns of a folder that is about to be filled
    tfds.disable_progress_bar()
    # The default format, tfrecord, needs TensorFlow and cannot be read by index.
    builder: Any = WordProblems(data_dir=data_dir, file_format="array_record")
    # A name for "the data are there, and are to be made again".
    again = tfds.download.DownloadConfig(download_mode=tfds.GenerateMode.REUSE_CACHE_IF_EXISTS)
    with contextlib.redirect_stdout(io.StringIO()):  # it speaks of a download, and nothing is downloaded
        builder.download_and_prepare(download_config=again)
    return Path(builder.data_dir)
