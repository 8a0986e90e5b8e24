"""The error type for what a user can fix, and what it quotes of other errors."""

NO_BREAK_SPACE = "\u00a0"


class CourseError(Exception):
    """A user-facing error, fixable by the user.

    The message names the field or file and the fix.  It becomes one line, because a command prints it as
    `error: <message>` and exits with code 2.
    """

    def __init__(self, message: str):
        super().__init__(one_line(message))


def one_line(text: str) -> str:
    """A text as one line for a terminal: line breaks are spaces, and what has no character of its own (an escape
    sequence, half a character) is written as in Python, \\x1b."""
    return "".join(map(_shown, " ".join(text.splitlines())))


def _shown(character: str) -> str:
    if character.isprintable() or character == NO_BREAK_SPACE:
        return character
    return character.encode("unicode_escape").decode()


def first_line(error: BaseException) -> str:
    """The first line of an error's message, of 200 characters at most; without a message the name of its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
