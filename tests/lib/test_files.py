"""Files are whole or absent, and a log survives a torn last line."""

import gzip
import os

import pytest

from grpo_lib.common import files
from grpo_lib.common.errors import CourseError


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("text", "stored"),
    [("eins\r\nzwei é\n", "eins\r\nzwei é\n".encode()), ("a\ud83d", b"a?"), ("", b"")],  # a lone surrogate
)
def test_text_is_written_whole_and_leaves_no_temporary_file(tmp_path, text, stored):
    path = tmp_path / "new" / "a.txt"
    for before in ("drei", text):
        files.write_text_atomic(path, before)
    assert path.read_bytes() == stored
    assert names(tmp_path / "new") == ["a.txt"]


def test_a_failure_keeps_the_old_file(tmp_path, monkeypatch):
    path = files.write_text_atomic(tmp_path / "a.txt", "old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        files.write_text_atomic(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_json_refuses_what_json_cannot_say(tmp_path):
    path = files.write_json_atomic(tmp_path / "a.json", {"é": [1, 0.5, None]})
    assert '"é"' in path.read_text(encoding="utf-8")
    with pytest.raises(ValueError):
        files.write_json_atomic(path, {"loss": float("nan")})
    assert "0.5" in path.read_text(encoding="utf-8")


def test_rows_come_back_as_they_were_appended(tmp_path):
    path = tmp_path / "logs" / "metrics.jsonl"
    rows = [{"step": 0, "text": "a\nb\u2028c\x85d\rz"}, {"step": 1, "text": "</script>é中"}]
    for row in rows:
        files.append_jsonl(path, row)
    assert files.read_jsonl(path) == rows
    assert path.read_bytes().count(b"\n") == 2


@pytest.mark.parametrize(
    ("end", "kept"),
    [
        ('{"step": 1, "text": "é'.encode()[:-1], []),  # stopped in the middle of a character: ignored, then cut off
        (b'{"step": 1}', [{"step": 1}]),  # a whole row without its line break
    ],
)
def test_a_last_line_without_its_line_break(tmp_path, end, kept):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n' + end)
    assert files.read_jsonl(path) == [{"step": 0}, *kept]
    files.append_jsonl(path, {"step": 2})
    assert files.read_jsonl(path) == [{"step": 0}, *kept, {"step": 2}]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('{"step": 0}\nnonsense\n{"step": 1}\n', 2),
        ('{"step": 0}\nnonsense\n', 2),  # it ends in a line break, so it was not torn
        ("[1, 2]\n", 1),
    ],
)
def test_a_broken_line_in_the_middle_is_named(tmp_path, text, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    with pytest.raises(CourseError, match=rf"metrics\.jsonl: line {line}\b"):
        files.read_jsonl(path)


def test_a_compressed_file_is_read_like_any_other_and_a_damaged_one_is_one_line(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    whole = gzip.compress(b'{"a": 1}\n{"a": 2}\n')
    path.write_bytes(whole)
    assert files.read_jsonl(path) == [{"a": 1}, {"a": 2}]
    assert not files.ends_torn(path)
    for damaged in (whole[:-4], whole[:12] + b"xx" + whole[14:], b'{"a": 1}\n', b"\x1f\x8b"):
        path.write_bytes(damaged)
        with pytest.raises(CourseError, match=r"a\.jsonl\.gz cannot be decompressed") as raised:
            files.read_jsonl(path)
        assert len(str(raised.value).splitlines()) == 1


def test_a_byte_order_mark_is_read_and_nested_brackets_are_one_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n{"a": 2}\r\n')
    assert files.read_jsonl(path) == [{"a": 1}, {"a": 2}]
    path.write_text(f'{{"a": 1}}\n{"[" * 100_000}\n', encoding="utf-8")
    assert not files.ends_torn(path)
    with pytest.raises(CourseError, match=r"line 2 has too many brackets"):
        files.read_jsonl(path)
