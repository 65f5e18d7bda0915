"""The tokens of a request's choices between their arrival from the engine and the response that sends them."""

from __future__ import annotations

import asyncio

from engine.errors import EngineError
from engine.messages import TokenOutput


class Generation:
    """The tokens of one request (one choice) as they arrive. Single consumer."""

    __slots__ = (
        "_items", "_waiter", "arrival", "arrived_at", "cost", "dp_rank", "failure", "first_choice", "first_token", "group", "last_token",
        "request_id", "shown", "stopped_at", "terminal",
    )  # fmt: skip

    def __init__(self, request_id: str, group: str, dp_rank: int, cost: int, arrival: float, first_choice: bool) -> None:
        self.request_id = request_id
        self.group = group  # the id the client knows; its choices share it
        self.first_choice = first_choice  # of its prompt: the one that counts the prompt's tokens
        self.dp_rank = dp_rank
        self.cost = cost
        self.arrival = arrival
        self.arrived_at = 0.0  # time.time() at which the oldest undelivered output came
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.shown = False  # its first token is on the way to the client
        self.stopped_at: int | None = None  # tokens up to a stop string that the front end found
        self.terminal = False
        self.failure: EngineError | None = None
        self._items: list[TokenOutput] = []
        self._waiter: asyncio.Future[None] | None = None

    async def outputs(self) -> list[TokenOutput]:
        """All outputs that have arrived, waiting for at least one. The last one ever has a finish_reason.

        Raises RequestRejected if the replica refused the request, WorkerFailed if the engine died or broke on it.
        """
        if not self._items and self.failure is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._items:
            items, self._items = self._items, []
            return items
        assert self.failure is not None
        raise self.failure

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def push(self, output: TokenOutput, now: float) -> None:
        if not self._items:
            self.arrived_at = now
        self._items.append(output)
        self._wake()

    def fail(self, failure: EngineError) -> None:
        self.failure = failure
        self.terminal = True
        self._wake()
