"""The one error type that is shown to a person without a traceback."""


class CourseError(Exception):
    """Something the reader can mend.

    The message names the field or file that is wrong and the remedy.  It is kept to one line, whatever came from
    outside into it, because a command prints it as `error: <message>` and leaves with exit code 2.
    """

    def __init__(self, message: str):
        super().__init__(" ".join(message.splitlines()))
