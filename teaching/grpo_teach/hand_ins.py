"""What students hand in, as far as it may be read and shown: files, names, and the text of their errors.

A link could point to the solution or to another student's work, a FIFO would let the reader wait for ever, and a name
or an error may hold anything: control characters, which a terminal obeys, or a lone surrogate, which no file can hold.

A hand-in is a notebook, a folder, or a ZIP, which is read where it is and unpacked nowhere; or what Moodle, Canvas and
Blackboard make of them (`STUDENTS`).  Whatever else is in the teacher's folder is a hand-in without a notebook.
"""

import os
import re
import stat
import time
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath

LONGEST = 300  # characters of a student's text in a remark
LONGEST_NAME = 60  # and of a student's name, which becomes a folder
MOST = 3  # remarks on what is not taken of a hand-in
MOST_NOTEBOOKS = 50  # of a hand-in
LARGEST = 20 * 2**20  # bytes of a notebook
LARGEST_ZIP = 2**28  # bytes of a ZIP
RESERVED = ("", ".", "..", "grades.csv", "leaderboard.csv")  # names of nobody's folder of results
# What systems leave beside the work of students.
LEFT = (".DS_Store", ".ipynb_checkpoints", "__MACOSX", "Thumbs.db", "desktop.ini", "submission_metadata.yml")
NOTEBOOK = re.compile(r"(.+)\.ipynb(\.txt|\.json)?", re.IGNORECASE | re.DOTALL)  # browsers add the second suffix
# Names of files and folders as they come from a learning platform: each has the student's name, and a number or a date.
STUDENTS = (
    re.compile(r"(?P<name>.+?)_(?P<key>\d+)_assignsubmission_(?:file|onlinetext)_?.*", re.DOTALL),  # Moodle
    re.compile(r"(?P<name>[^_\W]+)(?:_late)?_(?P<key>\d{3,}_)\d{3,}_.+", re.IGNORECASE | re.DOTALL),  # Canvas
    re.compile(r".+_(?P<name>[^_]+)_attempt_(?P<key>)\d{4}(?:-\d\d){5}.*", re.DOTALL),  # Blackboard
)
ATTEMPT = re.compile(r"_attempt_(\d{4}(?:-\d\d){5})")
# What platforms write themselves beside a student's files: the text that was typed in, and Blackboard's receipt.
OF_PLATFORM = re.compile(r"_assignsubmission_onlinetext|_attempt_\d{4}(?:-\d\d){5}\.txt$")
COPY = re.compile(r"(?:\((\d+)\)|-(\d+)|-Copy(\d+))$")  # of a file's stem: what browsers, Canvas and Jupyter add


@dataclass(frozen=True)
class HandIn:
    """What one student handed in: entries of the teacher's folder; several where a platform puts files side by side.

    remark: what the teacher must know about the name.
    """

    name: str
    entries: Sequence[Path]
    remark: str = ""


@dataclass(frozen=True)
class Notebook:
    """A file of a hand-in.

    newest: grows with its date, then with the number of a copy, then with its name.
    place: its path in the hand-in.
    """

    name: str
    content: bytes
    newest: tuple[float, int, str]
    place: PurePath


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


def no_folder(path: Path) -> str:
    """Why a path is no entry of a leaderboard; "" for a folder."""
    return "" if path.is_dir() else f"{plain(path.name)} is no folder, and is not taken; unpack a ZIP"


# --- who handed in ---


def entries_of(folder: Path) -> list[Path]:
    """All that is in the teacher's folder, but for what systems leave there."""
    return sorted(path for path in folder.iterdir() if not _is_left(path.name))


def by_student(entries: Sequence[Path]) -> list[HandIn]:
    """The hand-ins in the order of the entries, each with a name of its own."""
    groups: dict[str, list[Path]] = {}
    short: dict[str, str] = {}
    for entry in entries:
        name, key = _student(entry)
        groups.setdefault(key, []).append(entry)
        short[key] = name
    often = Counter(_alike(stem(entry)) for entry in entries)
    firsts = [found[0] for found in groups.values()]
    chosen = names(firsts, list(short.values()))
    hand_ins = []
    for name, found in zip(chosen, groups.values(), strict=True):
        twice = len(found) == 1 and often[_alike(stem(found[0]))] > 1
        remark = "a notebook and a folder have this name, or two files; each is graded, choose one" if twice else ""
        own = [entry for entry in found if not OF_PLATFORM.search(entry.name)]
        hand_ins.append(HandIn(name, own, remark))
    return hand_ins


def stem(entry: Path) -> str:
    """The student's name as the hand-in has it: of a folder its name, of a file that without its suffix."""
    if entry.is_dir():
        return entry.name
    notebook = NOTEBOOK.fullmatch(entry.name)
    return notebook[1] if notebook else entry.stem


def names(entries: Sequence[Path], short: Sequence[str] = ()) -> list[str]:
    """A name for each hand-in: without what cannot be shown, and each name once, also where case does not count.

    Where several share a name, each is called as its file or folder.

    Args:
      short: the name of each; by default that of its file or folder, without the suffix.
    """
    short = [_shown(name) for name in short or map(stem, entries)]
    often = Counter(map(_alike, short))
    chosen: list[str] = []
    taken = {*RESERVED}
    for entry, name in zip(entries, short, strict=True):
        if often[_alike(name)] > 1 or _alike(name) in RESERVED:
            name = _shown(entry.name)
        first, number = name, 2
        while _alike(name) in taken:
            name = f"{first} ({number})"
            number += 1
        chosen.append(name)
        taken.add(_alike(name))
    return chosen


def _shown(name: str) -> str:
    return plain(unicodedata.normalize("NFC", name), LONGEST_NAME)


def _alike(name: str) -> str:
    """A name as file systems compare it that know no case."""
    return unicodedata.normalize("NFC", name).casefold()


def _student(entry: Path) -> tuple[str, str]:
    """A student's name, and what all hand-ins of this student have in common."""
    for pattern in STUDENTS:
        if match := pattern.fullmatch(entry.name):
            return match["name"], f"{pattern.pattern}:{match['name']}:{match['key']}"
    return stem(entry), f"{entry}"


def _is_left(name: str) -> bool:
    return name in LEFT or name.startswith("._")


# --- what was handed in ---


def notebooks_in(entry: Path) -> tuple[list[Notebook], list[str]]:
    """The notebooks of a hand-in, and remarks on what is not taken.

    Args:
      entry: a notebook, a ZIP, or a folder with both, also in folders of its own.
    """
    if reason := not_taken(entry):
        return [], [reason]
    notebooks: list[Notebook] = []
    remarks: list[str] = []
    seen = 0
    for path in [entry] if entry.is_file() else _files_in(entry):
        reason = not_taken(path)
        if reason or path.is_dir():
            remarks += [reason] if reason else []
        elif path.suffix.lower() == ".zip":
            found, more = _in_zip(path)
            notebooks += found
            remarks += more
        elif NOTEBOOK.fullmatch(path.name):
            if path.stat().st_size > LARGEST:
                remarks.append(_too_large(path.name))
            else:
                place = path.relative_to(entry.parent)
                notebooks.append(_notebook(place, path.read_bytes(), path.stat().st_mtime))
        else:
            seen += 1
    if not notebooks and not remarks:
        what = f"{plain(entry.name)} is no notebook" if entry.is_file() else f"no notebook among {seen} files"
        remarks.append(f"{what}; hand in .ipynb, or a folder or a ZIP with it" if seen else "no notebook")
    if len(remarks) > MOST:
        remarks[MOST:] = [f"{len(remarks) - MOST} more are not taken"]
    if len(notebooks) > MOST_NOTEBOOKS:
        remarks.append(f"of {len(notebooks)} notebooks the {MOST_NOTEBOOKS} newest are read")
    return sorted(notebooks, key=lambda one: one.newest)[-MOST_NOTEBOOKS:], remarks


def of_several(versions: Iterable[Sequence[PurePath]]) -> list[str]:
    """A remark where one hand-in seems to be that of several students, such as the ZIP of a whole class.

    Args:
      versions: of each exercise the places of the notebooks that have it.
    """
    named = [name for places in versions for name in _people(places)]
    return [
        f"{name} are taken as one student's; if they are several, unpack this first" for name in dict.fromkeys(named)
    ]


def _people(places: Sequence[PurePath]) -> list[str]:
    """Names that may be those of several students: of folders side by side, or of files as platforms name them."""
    beside: dict[PurePath, set[str]] = {}
    for place in places:
        if len(place.parts) > 2:  # in a folder of the hand-in
            beside.setdefault(place.parents[1], set()).add(place.parent.name)
        elif len(place.parts) == 2 and any(pattern.fullmatch(place.name) for pattern in STUDENTS):
            beside.setdefault(place.parent, set()).add(_student(Path(place.name))[0])
    return [plain(", ".join(sorted(names)), LONGEST_NAME) for names in beside.values() if len(names) > 1]


def _files_in(folder: Path) -> Iterator[Path]:
    """The files below a folder, and links to folders, in order."""
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not _is_left(name))
        links = [name for name in folders if (Path(place) / name).is_symlink()]
        for name in sorted([*files, *links]):
            if not _is_left(name):
                yield Path(place) / name


def _in_zip(path: Path) -> tuple[list[Notebook], list[str]]:
    """The notebooks in a ZIP, and remarks.  Nothing is unpacked to a disk, so no name in it leads anywhere."""
    notebooks: list[Notebook] = []
    remarks: list[str] = []
    try:
        if path.stat().st_size > LARGEST_ZIP:
            return [], [_too_large(path.name)]
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                place = PurePosixPath(member.filename)
                if member.is_dir() or any(map(_is_left, place.parts)):
                    continue
                if reason := _refused(member, place.name):
                    remarks.append(reason)
                elif NOTEBOOK.fullmatch(place.name) and len(notebooks) < MOST_NOTEBOOKS:
                    with archive.open(member) as file:
                        content = file.read(LARGEST)  # its size in the list is what somebody wrote there
                    when = time.mktime((*member.date_time, 0, 0, -1))
                    notebooks.append(_notebook(path.name / place, content, when))
    except Exception as error:  # the file may hold anything
        remarks.append(f"{plain(path.name)} cannot be read as a ZIP ({type(error).__name__})")
    if not notebooks and not remarks:
        remarks.append(f"no notebook in {plain(path.name)}")
    return notebooks, remarks


def _refused(member: zipfile.ZipInfo, name: str) -> str:
    """Why a file in a ZIP is not read; "" if it may be."""
    if stat.S_ISLNK(member.external_attr >> 16):
        return f"{plain(name)} is a symbolic link, which is not taken; hand in the file itself"
    if name.lower().endswith(".zip"):
        return f"{plain(name)} is a ZIP in a ZIP, and is not taken"
    if not NOTEBOOK.fullmatch(name):
        return ""
    if member.flag_bits & 1:
        return f"{plain(name)} has a password, and is not taken"
    return _too_large(name) if member.file_size > LARGEST else ""


def _too_large(name: str) -> str:
    return f"{plain(name)} is too large, and is not taken"


def _notebook(place: PurePath, content: bytes, when: float) -> Notebook:
    """Dates count in minutes: what was unpacked together has dates a little apart."""
    name = place.name
    if attempt := ATTEMPT.search(name):
        when = time.mktime(time.strptime(attempt[1], "%Y-%m-%d-%H-%M-%S"))
    match = NOTEBOOK.fullmatch(name)
    copy = COPY.search(match[1]) if match else None
    number = int(next(filter(None, copy.groups()))[:9]) if copy else 0
    return Notebook(plain(name), content, (when // 60, number, name), place)
