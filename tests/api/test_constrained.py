"""A model with random weights produces output of every requested format: a sample of `lab.constrained`."""

import json
from typing import Any

import pytest

from lab.attack.schemas import schemas
from lab.constrained import WAYS, ask, request, tiny_server
from redline.worker.config import DraftConfig, Suffix

pytestmark = pytest.mark.anyio
SAMPLE = 20
SUFFIX = Suffix(tokens=4, adaptive=False)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize("speculation", [None, SUFFIX], ids=["no drafts", "suffix"])
async def test_every_complete_answer_fits_its_schema(speculation: DraftConfig | None):
    valid = cut = refused = 0
    async with tiny_server(speculation) as client:
        for n, schema in enumerate(schemas(SAMPLE, seed=1)):
            outcome = await ask(client, schema, WAYS[n % len(WAYS)], n)
            assert outcome.wrong == ()
            valid, cut, refused = valid + outcome.valid, cut + outcome.cut, refused + (outcome.refused is not None)
    assert refused <= SAMPLE // 20
    assert valid > SAMPLE > 4 * cut


async def test_an_answer_that_is_cut_says_so_and_others_are_text_of_their_kind():
    async with tiny_server() as client:

        async def content(**fields: Any) -> dict[str, Any]:
            answer = await client.post("/v1/chat/completions", json={**request({}, "streamed", 3), **fields})
            return answer.json()["choices"][0]

        plain = {"response_format": None, "stream": False}
        long = {"type": "string", "minLength": 500}
        choice = await content(**plain, structured_outputs={"json": long}, max_tokens=20)
        assert choice["finish_reason"] == "length"
        choice = await content(**plain, structured_outputs={"choice": ['on "it"', "ö\n"]})
        assert (choice["message"]["content"], choice["finish_reason"]) in (('on "it"', "stop"), ("ö\n", "stop"))
        choice = await content(**plain, structured_outputs={"regex": r"[a-c]{3}/\d"}, max_tokens=9)
        assert choice["message"]["content"][:3].strip("abc") == ""
        assert choice["message"]["content"][3] == "/"
        choice = await content(**plain, structured_outputs={"grammar": 'root ::= "a" [0-9] | "b" root'})
        assert choice["message"]["content"].lstrip("b")[0] == "a"
        choice = await content(response_format={"type": "json_object"}, stream=False)
        assert choice["finish_reason"] == "length" or isinstance(json.loads(choice["message"]["content"]), dict)
        answer = await client.post(
            "/v1/completions",
            json={"prompt": "a", "max_tokens": 9, "structured_outputs": {"choice": ["yes", "no"]}},
        )
        assert answer.json()["choices"][0]["text"] in ("yes", "no")


async def test_a_call_is_refused_by_the_keyword_of_its_tool():
    async with tiny_server() as client:
        body = request({"type": "object", "properties": {"x": {"not": {}}}}, "required", 0)
        answer = await client.post("/v1/chat/completions", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "tools[0].function.parameters")
        assert "#/properties/x/not" in error["message"]
