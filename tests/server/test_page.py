"""The try-out page in a real headless browser."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.server.browser import CHROMIUM, Browser
from tests.server.running import Running, eventually, running
from tests.server.test_api import END

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")


def use(browser: Browser, server: Running, picture: Path) -> None:
    """What a person does: generate, look at the figures, chat, stop, make a mistake."""
    url = f"http://{server.address[0]}:{server.address[1]}/"
    browser.open(url)
    browser.wait("document.querySelector('#model').textContent === 'demo'")
    browser.wait("document.querySelector('#state').classList.contains('good')")
    browser.run("document.querySelector('#prompt').value = 'In the beginning', document.querySelector('#send').click()")
    browser.wait("document.querySelector('#summary').textContent.includes('output tokens')")
    assert browser.run("document.querySelector('#output').textContent") == "In the beginning was the word."
    assert "stop" in browser.run("document.querySelector('#summary').textContent")
    browser.wait(
        "document.querySelector('#running').textContent === '0' && document.querySelector('#cache').textContent !== '–'"
    )
    browser.screenshot(picture)

    browser.run("document.querySelector('input[value=chat]').click(), document.querySelector('#send').click()")
    browser.wait("document.querySelector('#output').textContent === ' was the word.'")

    server.replicas[0].script, server.replicas[0].step_s = [], 0.05
    browser.run("document.querySelector('#max_tokens').value = 300, document.querySelector('#send').click()")
    browser.wait("document.querySelector('#running').textContent === '1'")
    browser.run("document.querySelector('#cancel').click()")
    browser.wait("document.querySelector('#summary').textContent.includes('stopped here')")

    browser.run("document.querySelector('#max_tokens').value = 100000, document.querySelector('#send').click()")
    browser.wait("document.querySelector('#output .error')?.textContent.includes('max_tokens')")
    hosts = {
        event["params"]["request"]["url"] for event in browser.events if event.get("method") == "Network.requestWillBeSent"
    }
    assert all(host.startswith((url, "data:")) for host in hosts), hosts
    problems = [event for event in browser.events if event.get("method") == "Runtime.exceptionThrown"]
    assert not problems, problems


async def test_generate_chat_stop_and_figures(tmp_path: Path) -> None:
    async with running(script=" was the word." + END) as server:
        with Browser() as browser:
            await asyncio.to_thread(use, browser, server, tmp_path / "page.png")
        await eventually(lambda: not server.replicas[0].live, limit_s=1.0)  # the stop button reached the engine
        assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
