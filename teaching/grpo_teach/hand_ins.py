"""What students hand in, as far as it may be read and shown: files, names, and the text of their errors.

A link could point to the solution or to another student's work, a FIFO would let the reader wait for ever, and a name
or an error may hold anything: control characters, which a terminal obeys, or a lone surrogate, which no file can hold.
"""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

LONGEST = 300  # characters of a student's text in a remark
MOST = 3  # remarks on what is not taken of a hand-in
RESERVED = ("", ".", "..", "grades.csv", "leaderboard.csv")  # names of nobody's folder of results


def plain(text: str, longest: int = LONGEST) -> str:
    """A student's text as one line that every file and terminal can take, of `longest` characters at most.

    What cannot be shown becomes "?"; white space, line breaks too, becomes one space.
    """
    words = " ".join(text.split())
    shown = "".join(character if character.isprintable() else "?" for character in words[:longest])
    return f"{shown}…" if len(words) > longest else shown


def not_taken(path: Path) -> str:
    """Why a path is not read: a link, or neither a file nor a folder; "" for those."""
    if path.is_symlink():
        return f"{plain(path.name)} is a symbolic link, which is not taken; hand in the file itself"
    if not path.is_file() and not path.is_dir():
        return f"{plain(path.name)} is neither a file nor a folder, and is not taken"
    return ""


def linked(folder: Path, part: str) -> str:
    """Why a part of a student's folder, such as a3, is not read; "" if no link is on the way to it."""
    between = [folder / parent for parent in reversed(Path(part).parents) if parent != Path()]
    for step in [folder, *between, folder / part]:
        if step.is_symlink():
            return not_taken(step)
    return ""


def files_in(entry: Path, suffix: str) -> tuple[list[Path], list[str]]:
    """The files of a hand-in whose names end in `suffix`, in order, and remarks on what is not taken.

    Args:
      entry: a file, or a folder with files, also in folders of its own.
    """
    if reason := not_taken(entry):
        return [], [reason]
    if entry.is_file():
        return [entry], []
    files: list[Path] = []
    links: list[Path] = []
    for folder, folders, names in os.walk(entry):
        files += [Path(folder) / name for name in names if name.endswith(suffix)]
        links += [Path(folder) / name for name in folders if (Path(folder) / name).is_symlink()]
    reasons = {path: not_taken(path) for path in sorted([*files, *links])}
    taken = [path for path, reason in reasons.items() if not reason]
    remarks = [reason for reason in reasons.values() if reason]
    if len(remarks) > MOST:
        remarks[MOST:] = [f"{len(remarks) - MOST} more are not taken"]
    return taken, remarks


def stem(entry: Path) -> str:
    """The student's name as the hand-in has it: of a folder its name, of a file that without its suffix."""
    return entry.name if entry.is_dir() else entry.stem


def names(entries: Sequence[Path]) -> list[str]:
    """A name for each hand-in, by its file or folder: without what cannot be shown, and each name once.

    Where a file and a folder share a name, the file keeps its suffix.
    """
    short = [plain(stem(entry)) for entry in entries]
    often = Counter(short)
    chosen: list[str] = []
    for entry, name in zip(entries, short, strict=True):
        if often[name] > 1 or name.casefold() in RESERVED:
            name = plain(entry.name)
        number = 2
        while name in chosen or name.casefold() in RESERVED:
            name = f"{plain(entry.name)} ({number})"
            number += 1
        chosen.append(name)
    return chosen
