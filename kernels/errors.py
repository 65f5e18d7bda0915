"""Exceptions of the kernels package.

KernelError(RuntimeError)          a device operation failed or does not exist here
  KernelContractError(ValueError)  an argument breaks the operation's contract: a bug in the caller
"""


class KernelError(RuntimeError):
    """A device operation could not run. The message starts with the operation's name."""

    def __init__(self, op: str, message: str) -> None:
        super().__init__(f"{op}: {message}")
        self.op = op


class KernelContractError(KernelError, ValueError):
    """An argument's dtype, shape, stride, device or range is wrong; the message names the argument."""
