"""`make class-check`: a machine as fast as the one of the committed notebooks will do; a slow one gets a remedy."""

import json

import class_check
import pytest


@pytest.mark.parametrize(("seconds", "ok"), [(0.5, True), (60, False)])
def test_a_step_gives_minutes_and_a_verdict(seconds, ok, capsys) -> None:
    status = class_check.main(["--json", "--step", str(seconds)])
    found = json.loads(capsys.readouterr().out)
    step = found["rows"][-1]
    assert (step["ok"], found["ok"]) == (ok, status == 0) and status == (not all(row["ok"] for row in found["rows"]))
    there, taken = class_check.reference()
    assert found["minutes"] == pytest.approx({name: each * seconds / there / 60 for name, each in taken.items()})
