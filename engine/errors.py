"""Exceptions of the engine.

    EngineError(Exception)
      ConfigError                 before anything starts; the message names the field, the limit and the fix
      RequestRejected(code)       one request is refused; becomes RequestFailed, then an HTTP status
      WorkerFailed                a rank died, froze or hit a device error; the engine ends

Device errors are kernels.errors.KernelError. Whatever a worker's outermost loop catches ends the engine.
"""

from __future__ import annotations

EXIT_REFUSED = 2  # status of a process whose configuration cannot work, after it said why


class EngineError(Exception):
    """Root of the engine's own errors."""


class ConfigError(EngineError):
    """The configuration or the checkpoint cannot work; raised before anything heavy starts."""


class RequestRejected(EngineError):
    """One request cannot be served; others are untouched.

    code: short machine-readable reason, as "queue_full"; HTTP_STATUS (engine/openai_responses.py) holds those that are no 400
    param: the field that is wrong, if one is
    """

    def __init__(self, message: str, code: str = "invalid_request", param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class WorkerFailed(EngineError):
    """A worker cannot go on; every open request gets an error and the process tree ends."""
