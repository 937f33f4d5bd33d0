"""Bad input is a 4xx in OpenAI's error shape or a sentence with the remedy; engines live on."""

import aiohttp
import pytest

import mlcrouter_nb
from mlcrouter_nb import MlcRouterError
from mlcrouter_nb.cluster import Cluster

pytestmark = pytest.mark.engine
GOOD = {"model": "smollm2-135m", "prompt": "Hi", "max_tokens": 2}


@pytest.mark.parametrize("policy", ["disagg", "round-robin"])
@pytest.mark.parametrize("path", ["v1/completions", "v1/chat/completions"])
@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"model": "nobody/knows-this"}, 404),
        ({"max_tokens": 0}, 400),
        ({"max_tokens": -3}, 400),
        ({"temperature": 9}, 400),
        ({"prompt": "word " * 20000, "messages": [{"role": "user", "content": "word " * 20000}]}, 400),
        ({"prompt": 7, "messages": 7}, 400),
        ({"prompt": [], "messages": []}, 400),
        ({"prompt": [10**9], "messages": [{"role": "nobody", "content": "Hi"}]}, 400),
    ],
)
async def test_a_bad_field_is_refused(
    cluster: Cluster, http: aiohttp.ClientSession, policy: str, path: str, change: dict, status: int
) -> None:
    cluster.use(policy)
    body = {**GOOD, "messages": [{"role": "user", "content": "Hi"}], **change}
    body.pop("messages" if path == "v1/completions" else "prompt")
    for stream in (False, True):
        async with http.post(path, json={**body, "stream": stream}) as answer:
            content = await answer.json()
            assert answer.status == status, content
            assert set(content["error"]) >= {"message", "type", "param", "code"}
            assert "Traceback" not in content["error"]["message"]
    async with http.post("v1/completions", json=GOOD) as answer:
        assert answer.status == 200, "the engines live on"


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"\xff\xfe"])
async def test_a_malformed_body_is_refused(
    cluster: Cluster, http: aiohttp.ClientSession, data: bytes
) -> None:
    async with http.post("v1/completions", data=data, headers={"Content-Type": "application/json"}) as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["message"]


@pytest.mark.parametrize("roles", ["0P1D", "1P0D", "0", "-1", "1P", "twelve", "", "1P2D3"])
async def test_bad_roles_are_named(roles: str) -> None:
    with pytest.raises(MlcRouterError, match="roles"):
        await mlcrouter_nb.up(roles=roles)


async def test_a_balance_beyond_the_range_is_named(cluster: Cluster) -> None:
    before = cluster.status().policy
    with pytest.raises(MlcRouterError, match=r"1\.2"):
        cluster.use("disagg", pd_balance_factor=1.2)
    assert cluster.status().policy.name == before.name
