"""What stands before every route: API keys, bounds, request ids, the access log."""

from __future__ import annotations

import asyncio
import json

import pytest

from server.protocol import BoundedHttp
from tests.distributed.launched import posted
from tests.server.running import Running, eventually, running

ROUTES = ["/", "/v1/models", "/metrics", "/version", "/load", "/openapi.json", "/page/page.js", "/nowhere"]


async def test_keys_open_every_route_but_health() -> None:
    """Report X19, X21: without a key only the probes answer."""
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


@pytest.mark.parametrize(
    "header",
    [b"Bearer firs", b"Bearer firstx", b"Bearer", b"first", b"Basic first", b"Bearer \xff\xfe", b"Bearer first first", b""],
)
async def test_wrong_keys(header: bytes) -> None:
    """Report X04: wrong, longer, shorter and non-ASCII keys are refused alike (digests are compared in constant time)."""
    async with running(api_keys=("first",)) as server:
        assert (await server.http.get("/v1/models", headers={"authorization": header})).status_code == 401


async def test_a_browser_may_send_the_key_as_basic_credentials() -> None:
    async with running(api_keys=("first",)) as server:
        refused = await server.http.get("/")
        assert "Basic" in refused.headers["www-authenticate"]
        assert (await server.http.get("/", auth=("any", "first"))).status_code == 200
        assert (await server.http.get("/", auth=("first", "any"))).status_code == 401


CHUNKED = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
ENDLESS = {
    "header": b"GET /version HTTP/1.1\r\nHost: x\r\nX-Large: ",
    "request line": b"GET /",
    "chunk extension": CHUNKED + b"5;name=",
    "trailer": CHUNKED + b"2\r\n{}\r\n0\r\nX-Large: ",
}


@pytest.mark.parametrize("beginning", ENDLESS.values(), ids=ENDLESS)
async def test_header_bounds(beginning: bytes) -> None:
    """Report X03: headers of many megabytes end with an error after the limit, not after the memory. So does everything else
    in a request that is no body."""
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


async def test_a_body_may_come_in_many_small_chunks() -> None:
    """Each has a size line, which together are more than headers may have."""
    async with running(max_header_bytes=1024) as server:
        body = json.dumps({"prompt": "a " * 2000}).encode()

        async def pieces():
            for start in range(0, len(body), 4):
                yield body[start : start + 4]

        headers = {"content-type": "application/json"}
        response = await server.http.post("/tokenize", content=pieces(), headers=headers)
        assert response.status_code in (200, 400) and "headers" not in response.text


async def test_body_bounds() -> None:
    async with running(max_body_bytes=2048) as server:
        body = json.dumps({"prompt": "x" * 4000}).encode()
        headers = {"content-type": "application/json"}
        assert (await server.http.post("/v1/completions", content=body, headers=headers)).status_code == 413

        async def pieces():
            for start in range(0, len(body), 500):
                yield body[start : start + 500]

        chunked = await server.http.post("/v1/completions", content=pieces(), headers=headers)
        assert chunked.status_code == 413 and chunked.json()["error"]["code"] == "body_too_large"


async def test_a_page_of_another_site_gets_nowhere() -> None:
    """Only bodies declared as JSON are taken, which a foreign page cannot send without CORS, which is off."""
    async with running() as server:
        body = json.dumps({"prompt": "x"})
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            response = await server.http.post("/v1/completions", content=body, headers={"content-type": kind})
            assert response.status_code == 415
        preflight = await server.http.options("/v1/completions", headers={"origin": "https://evil.example"})
        assert preflight.status_code == 405
        response = await server.http.get("/v1/models", headers={"origin": "https://evil.example"})
        assert not any(name.startswith("access-control") for name in response.headers)


async def test_request_ids_and_the_log() -> None:
    """Report O11: one line per finished request, with its id, reason and time; polls leave none."""
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


async def _answer(server: Running, *sent: bytes) -> bytes:
    """All that comes back for pieces sent one after the other, the last of which ends the connection."""
    reader, writer = await asyncio.open_connection(*server.address)
    for piece in sent:
        writer.write(piece)
        await asyncio.sleep(0.05)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return answer


async def test_streams_over_http_1_0_have_no_chunks() -> None:
    """A client, or a proxy, of HTTP/1.0 knows no Transfer-Encoding: its stream ends with the connection."""
    async with running(script="one two three") as server:
        head, _, body = (await _answer(server, posted({"prompt": "x", "stream": True}, "1.0"))).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200") and b"transfer-encoding" not in head and b"connection: close" in head
        assert body.startswith(b"data: {") and body.endswith(b"data: [DONE]\n\n") and b"\r\n" not in body
        whole = await _answer(server, posted({"prompt": "x"}, "1.0"))
        assert b"content-length: " in whole and json.loads(whole.partition(b"\r\n\r\n")[2])["usage"]
        assert (await _answer(server, b"GET /nowhere HTTP/1.0\r\n\r\n")).startswith(b"HTTP/1.1 404")


@pytest.mark.parametrize("offer", ["h2c", "websocket", "TLS/1.0"])
async def test_an_offer_of_another_protocol_is_ignored(offer: str) -> None:
    """Java's client offers h2c with its first request; the parser would drop the body and take it for the next request."""
    async with running() as server:
        headers = f"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: {offer}\r\nHTTP2-Settings: AAEAAEAA\r\n"
        offered = posted({"prompt": "x", "max_tokens": 3}, headers=headers)
        last = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        cut = offered.index(b"\r\n\r\n") + 4
        for sent in ([offered + offered + last], [offered[:40], offered[40:cut], offered[cut:] + offered, last]):
            answer = await _answer(server, *sent)
            assert answer.count(b"HTTP/1.1 200 OK") == 3 and answer.count(b'"completion_tokens":3') == 2, answer
        chunked = offered.partition(b"Content-Length")[0] + b"Transfer-Encoding: chunked\r\n\r\n"
        body = offered[cut:]
        answer = await _answer(server, chunked, b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body), last)
        assert answer.count(b"HTTP/1.1 200 OK") == 2 and b'"completion_tokens":3' in answer, answer
        many = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n" * 50 + last
        assert (await _answer(server, many)).count(b"HTTP/1.1 200 OK") == 51
        for ends in (
            posted({"prompt": "x"}, "1.0", headers),
            posted({"prompt": "x"}, headers=headers + "Connection: close\r\n"),
        ):
            assert b'"completion_tokens":16' in await _answer(server, ends)
        assert (await _answer(server, b"CONNECT /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"))[9:10] == b"4"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("behind", [1, 3])
async def test_a_client_that_leaves_with_requests_behind_the_one_that_runs(
    stream: bool, behind: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Pipelined requests learn that nobody waits: the first is aborted and leaves no traceback, the others never start."""
    async with running(replicas={"step_s": 0.02}) as server:
        _, writer = await asyncio.open_connection(*server.address)
        writer.write(posted({"prompt": "x", "max_tokens": 400, "stream": stream}))
        await eventually(lambda: server.client.load()["num_open"] == 1)
        for _ in range(behind):
            writer.write(posted({"prompt": "y"}))
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.1)
        writer.transport.abort()
        await eventually(lambda: len(server.log.lines) == 1 and not server.client.load()["num_open"])
        assert server.log.lines[0]["finish"] == "abort"
    assert not caplog.records


async def test_a_flood_of_pipelined_requests_stays_in_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that waits holds a hundred times the bytes that it came in: a response that ends admits no further ones while
    many wait. All are answered in the end."""
    connections: list[BoundedHttp] = []
    made = BoundedHttp.connection_made
    monkeypatch.setattr(BoundedHttp, "connection_made", lambda http, t: (connections.append(http), made(http, t)))
    async with running() as server:
        reader, writer = await asyncio.open_connection(*server.address)
        one = b"GET /version HTTP/1.1\r\nHost: x\r\nX-Padding: %b\r\n\r\n" % (b"a" * 2900)
        writer.write(one * 600)
        most = 0
        for _ in range(600):
            await asyncio.wait_for(reader.readuntil(b"HTTP/1.1 200 OK"), 10)
            most = max(most, len(connections[0].pipeline))
        writer.close()
    assert 8 < most < 2 * 256 * 1024 // len(one), "more than two reads of the socket"


async def test_what_is_no_http_is_refused_in_json() -> None:
    """A client that shows `error.message` shows something for these answers too."""
    async with running(max_header_bytes=4096) as server:
        large = b"GET / HTTP/1.1\r\nX-Large: ", b"a" * 9000
        for sent, status in (((b"nonsense\r\n\r\n",), 400), (large, 431)):
            head, _, body = (await _answer(server, *sent)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 %d " % status) and b"content-type: application/json" in head
            assert b"content-length: %d" % len(body) in head and b"connection: close" in head
            assert json.loads(body)["error"]["type"] == "invalid_request_error"
