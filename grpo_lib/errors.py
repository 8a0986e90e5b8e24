"""The one error that is meant for the reader of a message, not for a debugger."""


class CourseError(Exception):
    """Something the user can put right.

    The message is one line that names the field or the file, and the remedy. The command line prints it as
    "error: ..." without a traceback and exits with status 2.
    """
