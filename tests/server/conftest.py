"""Tests that are coroutines run in the server's own kind of event loop."""

from __future__ import annotations

import inspect

import pytest
import uvloop


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine; others are pytest's as ever."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    uvloop.run(test(**{name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}))
    return True
