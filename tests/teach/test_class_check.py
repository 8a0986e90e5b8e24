"""`make class-check`: a machine as fast as the one of the committed notebooks will do; a slow one gets a remedy."""

import json

import class_check
import pytest


@pytest.mark.parametrize(("seconds", "ok"), [(0.5, True), (60, False)])
def test_a_step_gives_minutes_and_a_verdict(seconds, ok, capsys) -> None:
    status = class_check.main(["--json", "--step", str(seconds)])
    shown = json.loads(capsys.readouterr().out)
    assert shown["rows"][-1]["ok"] == ok  # the step's
    assert shown["ok"] == (status == 0)
    assert status == (not all(row["ok"] for row in shown["rows"]))
    there, taken = class_check.reference()
    assert shown["minutes"] == pytest.approx({name: each * seconds / there / 60 for name, each in taken.items()})
