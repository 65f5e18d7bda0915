"""Where this process stands among the workers, as torchrun or the supervisor told it through the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

RUN_FOLDER = "SNAPMLA_RUN_FOLDER"  # set by the supervisor for its workers: holds the rendezvous file
LIFELINE = "SNAPMLA_LIFELINE"  # set too: a pipe that closes when the supervisor dies


@dataclass(frozen=True)
class Place:
    """run_folder: empty unless a supervisor started this process."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    run_folder: str

    @staticmethod
    def read(environment: Mapping[str, str]) -> Place:
        return Place(
            rank=int(environment.get("RANK", 0)),
            world_size=int(environment.get("WORLD_SIZE", 1)),
            local_rank=int(environment.get("LOCAL_RANK", 0)),
            local_world_size=int(environment.get("LOCAL_WORLD_SIZE", 1)),
            run_folder=environment.get(RUN_FOLDER, ""),
        )

    @property
    def one_host(self) -> bool:
        return self.local_world_size == self.world_size

    def bind_address(self) -> str:
        """Where the front end listens for workers: loopback on one host, else the address other nodes know rank 0 by."""
        return "127.0.0.1" if self.one_host else os.environ["MASTER_ADDR"]
