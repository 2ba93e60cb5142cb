"""Lines and folders of a run folder that the run did not write: named, or passed over."""

from pathlib import Path

import pytest

from posttrain.errors import RunError
from posttrain.runs.run_folder import RunFolder
from tests.support.refusals import refused


@pytest.mark.parametrize(("alarm", "says"), [("", "None"), (', "alarm": 7', "7")])
def test_a_line_of_alarms_that_names_none_is_told(tmp_path: Path, alarm: str, says: str) -> None:
    with RunFolder.create(tmp_path, "") as run:
        run.append_alarm(1, "length", "longer", "")
        assert run.raised() == {"length": 1}
        with (tmp_path / "alarms.jsonl").open("a") as file:
            file.write(f'{{"step": 2{alarm}}}\n')
        with refused(f"alarms.jsonl, line 2: alarm = {says} is not the name", "Restore", error=RunError):
            run.raised()


def test_folders_that_somebody_else_put_beside_rollouts_stay_too(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, "") as run:
        for name in (".tmp-x", "step-000001.parquet", "step-000077.parquet"):
            (tmp_path / "rollouts" / name).mkdir()
        run.cut_after(1)
        assert run.missing(1, {"rollouts": 1}) == {"rollouts": [1]}
    assert len([*(tmp_path / "rollouts").iterdir()]) == 3
