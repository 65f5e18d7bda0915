"""Where this process stands among the workers, as torchrun or the supervisor told it through the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from engine.errors import ConfigError

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
        """Raises ConfigError naming the variable that cannot be."""

        def number(name: str, default: int) -> int:
            text = environment.get(name, str(default))
            if not text.isdecimal():
                raise ConfigError(
                    f"{name}: must be a whole number, as torchrun sets it, got {text!r}; unset it or use torchrun"
                )
            return int(text)

        place = Place(
            rank=number("RANK", 0),
            world_size=number("WORLD_SIZE", 1),
            local_rank=number("LOCAL_RANK", 0),
            local_world_size=number("LOCAL_WORLD_SIZE", 1),
            run_folder=environment.get(RUN_FOLDER, ""),
        )
        if not 1 <= place.local_world_size <= place.world_size or place.rank >= place.world_size:
            raise ConfigError(
                f"RANK {place.rank}, WORLD_SIZE {place.world_size}, LOCAL_WORLD_SIZE {place.local_world_size}: "
                "these do not fit together; unset them or use torchrun"
            )
        if place.world_size > 1 and not place.run_folder and "MASTER_ADDR" not in environment:
            raise ConfigError("WORLD_SIZE is set but MASTER_ADDR is not, as torchrun would; unset it or use torchrun")
        return place

    @property
    def one_host(self) -> bool:
        return self.local_world_size == self.world_size

    def bind_address(self) -> str:
        """Where the front end listens for workers: loopback on one host, else the address other nodes know rank 0 by."""
        return "127.0.0.1" if self.one_host else os.environ["MASTER_ADDR"]
