"""The worker's place in the environment: what torchrun sets is taken, what cannot be is named."""

from __future__ import annotations

import pytest

from engine.errors import ConfigError
from engine.place import RUN_FOLDER, Place

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}


def test_what_torchrun_and_the_supervisor_set() -> None:
    assert Place.read({}) == Place(0, 1, 0, 1, "")
    assert Place.read(TORCHRUN) == Place(3, 4, 1, 2, "")
    supervised = {name: value for name, value in TORCHRUN.items() if name != "MASTER_ADDR"} | {RUN_FOLDER: "/run"}
    assert Place.read(supervised).run_folder == "/run"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE: must be a whole number"),
        ({"RANK": "-1"}, "RANK: must be a whole number"),
        ({"RANK": "4"}, "do not fit together"),
        ({"LOCAL_WORLD_SIZE": "0"}, "do not fit together"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not"),
    ],
)
def test_what_cannot_be_is_named(changes: dict[str, str | None], message: str) -> None:
    environment = {name: value for name, value in (TORCHRUN | changes).items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        Place.read(environment)
