"""The HTTP surface, byte by byte where it matters."""

import asyncio
import json

import pytest

from mlcrouter_nb.protocol.errors import ArgumentError
from mlcrouter_nb.router import http_connection
from mlcrouter_nb.router.gateway import Gateway
from mlcrouter_nb.router.router import Router

BODY = {"prompt": "a b c", "max_tokens": 2}


async def raw(served, request: bytes) -> bytes:
    """What comes back for these bytes, until the server closes."""
    host, port = served.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), 3)
    writer.close()
    await writer.wait_closed()
    return answer


def post(body: dict, extra: str = "", version: str = "1.1", path: str = "/v1/completions") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/{version}\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n{extra}\r\n"
    return head.encode() + data


async def test_models_health_ready_and_metrics(serve):
    async with serve("1P1D") as served:
        async with served.http.get("/v1/models") as response:
            models = await response.json()
        assert models["object"] == "list"
        assert [(m["id"], m["object"]) for m in models["data"]] == [("m", "model")]
        async with served.http.get("/v1/models/m") as response:
            assert (await response.json())["id"] == "m"
        async with served.http.get("/v1/models/other") as response:
            assert response.status == 404
            assert (await response.json())["error"]["code"] == "model_not_found"
        for path in ("/health", "/ready"):
            async with served.http.get(path) as response:
                assert response.status == 200
        await served.texts(BODY)
        async with served.http.get("/metrics") as response:
            assert response.content_type == "text/plain"
            text = await response.text()
        assert 'mlcrouter_requests_total{outcome="finished",policy="disagg"} 1.0' in text
        assert 'mlcrouter_completion_tokens_total{policy="disagg"} 2.0' in text
        assert 'mlcrouter_endpoint_in_flight{endpoint="D1",role="decode"} 0.0' in text
        for endpoint in served.router.endpoints:
            endpoint.available = False
        async with served.http.get("/ready") as response:
            assert response.status == 503


async def test_models_of_attached_engines(serve):
    async with serve("2", kind="attach", model=None) as served:
        served.router.endpoints[1].available = False
        async with served.http.get("/v1/models") as response:
            assert [m["id"] for m in (await response.json())["data"]] == ["their-model"]


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/v1/completions", b"{", 400, "no JSON"),
        ("/v1/completions", b"[]", 400, "JSON object"),
        ("/v1/completions", b"{}", 400, "'prompt' is missing"),
        ("/v1/completions", b"\xff", 400, "no JSON"),
        ("/v1/chat/completions", b'{"prompt": "a"}', 400, "'messages' is missing"),
        ("/v1/chat/completions", b'{"messages": []}', 400, "'messages'"),
        ("/v1/completions", b'{"prompt": "a", "max_tokens": 0}', 400, "'max_tokens'"),
        ("/v1/completions", b'{"prompt": "a", "max_tokens": -1}', 400, "'max_tokens'"),
        ("/v1/completions", b'{"prompt": "a", "temperature": 9}', 400, "'temperature'"),
        (
            "/v1/completions",
            b'{"prompt": "a", "model": "gpt-4"}',
            404,
            "'gpt-4' is not served here; there is: m",
        ),
        ("/v1/completions", b'{"prompt": ""}', 400, "prompt is empty"),
        ("/v1/completions", b'{"prompt": "a a a a a a a a a a a"}', 400, "context is 10 tokens"),
        ("/v1/completions", b'{"prompt": ["a", "b"]}', 400, "one prompt per request"),
        ("/v1/nothing", b"{}", 404, "no /v1/nothing"),
        ("/v1/models", b"{}", 405, "takes GET"),
    ],
)
async def test_bad_input_is_a_4xx_in_openais_shape(serve, path, body, status, says):
    async with serve("1P1D", context_length=10) as served:
        async with served.http.post(path, data=body) as response:
            assert response.status == status
            error = (await response.json())["error"]
        assert says in error["message"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert all(engine.calls == [] for engine in served.engines.values())


async def test_the_usage_chunk_only_when_asked_for(serve):
    async with serve("1P1D") as served:
        for policy in ("disagg", "round-robin"):
            served.use(policy)
            for options, count in ((None, 0), ({"include_usage": False}, 0), ({"include_usage": True}, 1)):
                body = BODY | {"stream": True, "stream_options": options}
                async with served.http.post("/v1/completions", json=body) as response:
                    lines = (await response.text()).strip().split("\n\n")
                assert lines.pop() == "data: [DONE]"
                events = [json.loads(line.removeprefix("data: ")) for line in lines]
                assert [event["choices"] for event in events if event.get("usage")] == [[]] * count
                assert all(event["choices"] for event in events if not event.get("usage"))


async def test_numbers_and_truths_sent_as_text_are_what_they_say(serve):
    async with serve("1") as served:
        body = {"prompt": "a b c", "max_tokens": "2", "n": "1", "stream": "false", "min_p": "0.1"}
        async with served.http.post("/v1/completions", json=body) as response:
            assert (await response.json())["choices"][0]["text"] == "t3 t4 "
        told = served.engines["E0"].told("/v1/completions")[0]
        assert (told["max_tokens"], told["n"], told["min_p"]) == (2, 1, "0.1")


CORS = "access-control-allow-origin"


@pytest.mark.parametrize(
    "origin", ["http://localhost:8888", "http://127.0.0.1", "http://[::1]:3000", "http://a.localhost"]
)
async def test_pages_of_this_machine_may_use_it(serve, origin):
    async with serve("1", api_key="secret") as served:
        preflight = {
            "Origin": origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
            "Access-Control-Request-Private-Network": "true",
        }
        async with served.http.options("/v1/completions", headers=preflight) as response:
            assert response.status == 204
            assert response.headers[CORS] == origin
            assert "POST" in response.headers["access-control-allow-methods"]
            assert "x-stainless-os" in response.headers["access-control-allow-headers"]
            assert response.headers["access-control-allow-private-network"] == "true"
        for headers in ({"Authorization": "Bearer secret"}, {}):  # on errors too
            async with served.http.post(
                "/v1/completions", json=BODY | {"stream": True}, headers={"Origin": origin, **headers}
            ) as response:
                assert response.status == (200 if headers else 401)
                assert response.headers[CORS] == origin
                await response.read()


async def test_other_pages_may_not(serve):
    async with serve("1") as served:
        for origin in ("http://evil.example", "http://localhost.evil.example", "null", "http://[x"):
            async with served.http.post("/v1/completions", json=BODY, headers={"Origin": origin}) as response:
                assert response.status == 403
                assert CORS not in response.headers
        assert served.engines["E0"].calls == []


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("127.0.0.1:1234", 200),
        ("[::1]:80", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
    ],
)
async def test_the_host_header_is_checked_on_loopback(serve, host, status):
    async with serve("1") as served, served.http.get("/health", headers={"Host": host}) as response:
        assert response.status == status


async def test_the_key_is_asked_for_and_never_passed_on(serve):
    async with serve("1", api_key="secret") as served:
        for key in (None, "Bearer wrong", "Bearer ", "Basic secret", "Bearer sécret"):
            headers = {"Authorization": key} if key else {}
            for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/metrics")):
                async with served.http.request(method, path, json=BODY, headers=headers) as response:
                    assert response.status == 401
                    assert (await response.json())["error"]["code"] == "invalid_api_key"
        async with served.http.get("/health") as response:
            assert response.status == 200
        headers = {"Authorization": "Bearer secret", "X-Secret": "mine", "Cookie": "c=1"}
        async with served.http.post(
            "/v1/completions", json=BODY | {"user": "me"}, headers=headers
        ) as response:
            assert response.status == 200
        [told], [body] = served.engines["E0"].headers, served.engines["E0"].told("/v1/completions")
        assert not {"authorization", "x-secret", "cookie"} & told.keys()
        assert body["user"] not in ("me", None)
        served.use(
            "async def route(request, engines):\n"
            "    raise ValueError(f'{sorted(request.headers)} {request.session} {request.user}')\n"
        )
        headers["X-Session-Id"] = "s7"
        async with served.http.post(
            "/v1/completions", json=BODY | {"user": "me"}, headers=headers
        ) as response:
            message = (await response.json())["error"]["message"]
        assert "'x-secret'" in message
        assert message.splitlines()[0].endswith("s7 me")
        assert "authorization" not in message
        assert "cookie" not in message


async def test_pipelined_requests_are_answered_in_order(serve):
    async with serve("1") as served:
        served.engines["E0"].plan("/v1/completions", token_s=0.02)
        answer = await raw(
            served, post(BODY) + post(BODY | {"max_tokens": 3}) + post(BODY, "Connection: close\r\n")
        )
        texts = [
            json.loads(part.rpartition(b"\r\n\r\n")[2])["choices"][0]["text"]
            for part in answer.split(b"HTTP/1.1 200 OK")[1:]
        ]
        assert texts == ["t3 t4 ", "t3 t4 t5 ", "t3 t4 "]


async def test_http_1_0_gets_no_chunks(serve):
    async with serve("1") as served:
        answer = await raw(served, post(BODY | {"stream": True}, version="1.0"))
        assert b"Transfer-Encoding" not in answer
        assert b"Connection: close" in answer
        assert answer.endswith(b"\n\ndata: [DONE]\n\n")


async def test_continue_is_sent_where_it_is_waited_for(serve):
    async with serve("1") as served:
        answer = await raw(served, post(BODY, "Expect: 100-continue\r\nConnection: close\r\n"))
        assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")


async def test_bytes_that_are_no_request(serve):
    async with serve("1") as served:
        assert (await raw(served, b"hello\r\n\r\n")).startswith(b"HTTP/1.1 400 Bad Request")
        flood = b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: %b\r\n" % (b"y" * 70_000)
        assert (await raw(served, flood)).startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize("way", ["h2c", "websocket"])
async def test_an_upgrade_is_not_taken(serve, way):
    async with serve("1") as served:
        offer = f"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: {way}\r\nHTTP2-Settings: AAMAAABk\r\n"
        request = post(BODY, offer) + post(BODY, "Connection: close\r\n")
        assert (await raw(served, request)).count(b"t3 t4 ") == 2


@pytest.mark.parametrize("says_so", [True, False])
async def test_a_client_that_sends_too_much_hears_why(serve, monkeypatch, says_so):
    monkeypatch.setattr(http_connection, "MAX_BODY", 4 << 20)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    body = b"x" * (32 << 20)
    if says_so:
        request = head + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    else:
        request = head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(body) + body
    async with serve("1") as served:
        assert (await raw(served, request)).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    "body",
    [b"[" * 100_000, b'{"a":' * 100_000, b'{"prompt": "\\ud800"}', b'{"prompt": "a", "model": "\\ud800"}'],
)
async def test_json_that_nobody_can_read_or_send_on(serve, body):
    async with serve("1P1D") as served, served.http.post("/v1/completions", data=body) as response:
        assert response.status == 400
        assert "The body is no JSON" in (await response.json())["error"]["message"]


async def test_a_request_in_pieces(serve):
    async with serve("1") as served:
        host, port = served.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        for byte in post(BODY, "Connection: close\r\n"):
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        assert b"t3 t4 " in await asyncio.wait_for(reader.read(), 3)
        writer.close()
        await writer.wait_closed()


async def test_a_taken_port_is_an_argument_error(serve):
    async with serve("1") as served:
        port = int(served.url.rpartition(":")[2])
        with pytest.raises(ArgumentError, match=f"Port {port} is taken"):
            await Gateway(Router([])).start(port=port)


async def test_a_connection_is_used_again(serve):
    async with serve("1") as served:
        for _ in range(3):
            for stream in (True, False):
                async with served.http.post("/v1/completions", json=BODY | {"stream": stream}) as response:
                    await response.read()
        assert len(served.gateway._server.connections) == 1
