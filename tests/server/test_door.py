"""What stands before every route: API keys, bounds, request ids, the access log."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.server.running import eventually, run, running

ROUTES = ["/", "/v1/models", "/metrics", "/version", "/load", "/openapi.json", "/page/page.js", "/nowhere"]


def test_keys_open_every_route_but_health() -> None:
    """Report X19, X21: without a key only the probes answer."""

    async def test() -> None:
        async with running(api_keys=("first", "zweiter-schlüssel")) as server:
            for path in ROUTES:
                response = await server.http.get(path)
                assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
            for path in ("/v1/completions", "/generate", "/tokenize", "/abort_request", "/reset_prefix_cache"):
                assert (await server.http.post(path, json={})).status_code == 401
            for path in ("/health", "/ready"):
                assert (await server.http.get(path)).status_code == 200
            for key in ("first", "zweiter-schlüssel"):
                headers = {"authorization": f"Bearer {key}".encode()}
                assert (await server.http.get("/v1/models", headers=headers)).status_code == 200

    run(test)


@pytest.mark.parametrize(
    "header",
    [b"Bearer firs", b"Bearer firstx", b"Bearer", b"first", b"Basic first", b"Bearer \xff\xfe", b"Bearer first first", b""],
)
def test_wrong_keys(header: bytes) -> None:
    """Report X04: wrong, longer, shorter and non-ASCII keys are refused alike (digests are compared in constant time)."""

    async def test() -> None:
        async with running(api_keys=("first",)) as server:
            assert (await server.http.get("/v1/models", headers={"authorization": header})).status_code == 401

    run(test)


def test_a_browser_may_send_the_key_as_basic_credentials() -> None:
    async def test() -> None:
        async with running(api_keys=("first",)) as server:
            refused = await server.http.get("/")
            assert "Basic" in refused.headers["www-authenticate"]
            assert (await server.http.get("/", auth=("any", "first"))).status_code == 200
            assert (await server.http.get("/", auth=("first", "any"))).status_code == 401

    run(test)


CHUNKED = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
ENDLESS = {
    "header": b"GET /version HTTP/1.1\r\nHost: x\r\nX-Large: ",
    "request line": b"GET /",
    "chunk extension": CHUNKED + b"5;name=",
    "trailer": CHUNKED + b"2\r\n{}\r\n0\r\nX-Large: ",
}


@pytest.mark.parametrize("beginning", ENDLESS.values(), ids=ENDLESS)
def test_header_bounds(beginning: bytes) -> None:
    """Report X03: headers of many megabytes end with an error after the limit, not after the memory. So does everything else
    in a request that is no body."""

    async def test() -> None:
        async with running(max_header_bytes=4096) as server:
            response = await server.http.get("/version", headers={"x-large": "a" * 5000})
            assert response.status_code == 431
            reader, writer = await asyncio.open_connection(*server.address)
            writer.write(beginning)
            sent = 0
            try:
                for _ in range(1000):
                    writer.write(b"a" * 65536)
                    sent += 65536
                    await asyncio.wait_for(writer.drain(), 5)
                    if reader.at_eof():
                        break
                answer = await asyncio.wait_for(reader.read(), 5)
                assert not answer or answer.startswith(b"HTTP/1.1 4")  # an answer has begun where the body has
            except ConnectionError:
                pass
            assert sent < 16 << 20  # the connection ended long before 64 MB
            assert (await server.http.get("/version")).status_code == 200

    run(test)


def test_a_body_may_come_in_many_small_chunks() -> None:
    """Each has a size line, which together are more than headers may have."""

    async def test() -> None:
        async with running(max_header_bytes=1024) as server:
            body = json.dumps({"prompt": "a " * 2000}).encode()

            async def pieces():
                for start in range(0, len(body), 4):
                    yield body[start : start + 4]

            headers = {"content-type": "application/json"}
            response = await server.http.post("/tokenize", content=pieces(), headers=headers)
            assert response.status_code in (200, 400) and "headers" not in response.text

    run(test)


def test_body_bounds() -> None:
    async def test() -> None:
        async with running(max_body_bytes=2048) as server:
            body = json.dumps({"prompt": "x" * 4000}).encode()
            headers = {"content-type": "application/json"}
            assert (await server.http.post("/v1/completions", content=body, headers=headers)).status_code == 413

            async def pieces():
                for start in range(0, len(body), 500):
                    yield body[start : start + 500]

            chunked = await server.http.post("/v1/completions", content=pieces(), headers=headers)
            assert chunked.status_code == 413 and chunked.json()["error"]["code"] == "body_too_large"

    run(test)


def test_a_page_of_another_site_gets_nowhere() -> None:
    """Only bodies declared as JSON are taken, which a foreign page cannot send without CORS, which is off."""

    async def test() -> None:
        async with running() as server:
            body = json.dumps({"prompt": "x"})
            for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
                response = await server.http.post("/v1/completions", content=body, headers={"content-type": kind})
                assert response.status_code == 415
            preflight = await server.http.options("/v1/completions", headers={"origin": "https://evil.example"})
            assert preflight.status_code == 405
            response = await server.http.get("/v1/models", headers={"origin": "https://evil.example"})
            assert not any(name.startswith("access-control") for name in response.headers)

    run(test)


def test_request_ids_and_the_log() -> None:
    """Report O11: one line per finished request, with its id, reason and time; polls leave none."""

    async def test() -> None:
        async with running() as server:
            response = await server.http.post(
                "/v1/completions", json={"prompt": "x", "max_tokens": 3}, headers={"x-request-id": "trace-1"}
            )
            assert response.headers["x-request-id"] == "trace-1"
            await server.http.get("/health")
            odd = await server.http.get("/version", headers={"x-request-id": b'a" b'})
            assert odd.headers["x-request-id"].isalnum()
            await eventually(lambda: len(server.log.lines) == 2)
            line = server.log.lines[0]
            assert (line["request_id"], line["status"], line["output_tokens"], line["finish"]) == ("trace-1", 200, 3, "length")

    run(test)
