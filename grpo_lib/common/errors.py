"""The error type for what a user can fix, and what it quotes of other errors."""


class CourseError(Exception):
    """A user-facing error, fixable by the user.

    The message names the field or file and the fix.  Line breaks in it become spaces, because a command prints it
    as `error: <message>` and exits with code 2.
    """

    def __init__(self, message: str):
        super().__init__(" ".join(message.splitlines()))


def first_line(error: BaseException) -> str:
    """The first line of an error's message, of 200 characters at most; without a message the name of its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
