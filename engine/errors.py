"""Exceptions of the engine.

    EngineError(Exception)
      ConfigError                 before anything starts; the message names the field, the limit and the fix
      RequestRejected(code)       one request is refused; becomes RequestFailed, then HTTP 400, 404, 413, 429 or 503
      WorkerFailed                a rank died, froze or hit a device error; the engine ends

Device errors are kernels.errors.KernelError; the worker's outermost loop turns them into WorkerFailed.
"""

from __future__ import annotations

EXIT_REFUSED = 2  # status of a process whose configuration cannot work, after it said why


class EngineError(Exception):
    """Root of the engine's own errors."""


class ConfigError(EngineError):
    """The configuration or the checkpoint cannot work; raised before anything heavy starts."""


class RequestRejected(EngineError):
    """One request cannot be served; others are untouched.

    code: short machine-readable reason: "invalid_request" (400), "context_length_exceeded" (400),
        "duplicate_request_id" (400), "never_fits" (400), "queue_full" (503), "shutting_down" (503).
    param: the field that is wrong, if one is.
    """

    def __init__(self, message: str, code: str = "invalid_request", param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class WorkerFailed(EngineError):
    """A worker cannot go on; every open request gets an error and the process tree ends."""
