"""The public cases of an exercise, run on the student's notebook."""

import traceback

from grpo_lib.common.errors import CourseError, first_line
from grpo_teach.notebooks import Exercise

CELLS = "the cell of the function", "the public cases"


def check(exercise: Exercise) -> None:
    """Run the exercise's two cells, and nothing else of the notebook, as grading does.

    The code runs in this process, without limits: it is the student's own.

    Raises:
      CourseError: the first error, with the line that raised it.
    """
    space = {"__name__": "exercise"}
    for name, source in zip(CELLS, (exercise.code, exercise.public), strict=True):
        try:
            exec(compile(source, name, "exec"), space)
        except NotImplementedError:
            raise CourseError(f"exercise {exercise.number} is still to be written in {exercise.path}") from None
        except Exception as error:
            raise CourseError(f"exercise {exercise.number}: {_where(error, name, source)}") from error


def _where(error: Exception, name: str, source: str) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == name]
    number = frames[0].lineno if frames else getattr(error, "lineno", None)
    line = source.splitlines()[number - 1].strip() if number else ""
    said = first_line(error) if str(error) else ""
    return f"{type(error).__name__} in {name}, line {number}: {line}  {said}".rstrip()
