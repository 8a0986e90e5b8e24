"""The error type for what a user can fix."""


class CourseError(Exception):
    """A user-facing error, fixable by the user.

    The message names the field or file and the fix.  Line breaks in it become spaces, because a command prints it
    as `error: <message>` and exits with code 2.
    """

    def __init__(self, message: str):
        super().__init__(" ".join(message.splitlines()))
