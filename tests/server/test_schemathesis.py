"""schemathesis over the OpenAPI description of a live server. Needs the `st` command, which is no dependency of ours."""

from __future__ import annotations

import asyncio
import shutil

import pytest

from tests.server.running import eventually, running

ST = shutil.which("st")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(ST is None, reason="schemathesis is not installed")
async def test_no_request_made_from_the_schema_breaks_the_server() -> None:
    """Report X14: valid and invalid bodies generated from the schema; no 5xx, every response of a declared kind."""
    async with running(replicas={"step_s": 0.0}, max_model_len=128) as server:
        url = f"http://{server.address[0]}:{server.address[1]}/openapi.json"
        checks = "not_a_server_error,status_code_conformance,content_type_conformance"
        assert ST is not None
        process = await asyncio.create_subprocess_exec(
            ST, "run", url, "--checks", checks, "--phases", "coverage,fuzzing", "--max-examples", "100",
            "--request-timeout", "30", "--suppress-health-check", "all",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        output, _ = await process.communicate()
        print(output.decode()[-6000:])
        assert process.returncode == 0, output.decode()[-6000:]
        await server.post("/v1/completions", prompt="x", max_tokens=2)
        await eventually(lambda: server.client.metrics.open_requests == 0)
