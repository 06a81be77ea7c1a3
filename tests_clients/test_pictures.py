"""Client libraries send a picture to a scripted server that reads images: `make test-clients`."""

import base64
import io
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image
from test_agents import KEY, MODEL, ROOMY, Desk, served

ASKED = "What is it?"
SEEN = "It has 64 tokens."


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    desk = Desk(tmp_path_factory.mktemp("pictures"), "none")
    desk.repository.mkdir()
    with served(desk, ROOMY, logs=0) as address:
        yield address


@pytest.fixture(scope="module")
def picture() -> str:
    """224 x 224 pixels as base64: 64 tokens."""
    file = io.BytesIO()
    Image.new("RGB", (224, 224), "blue").save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def parts(picture: str) -> list[dict[str, Any]]:
    link = {"url": f"data:image/png;base64,{picture}"}
    return [{"type": "text", "text": ASKED}, {"type": "image_url", "image_url": link}]


def test_openai_chat(url: str, picture: str) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY)
    answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": parts(picture)}])
    assert answer.choices[0].message.content == SEEN
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 64


def test_openai_responses(url: str, picture: str) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY)
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{picture}", "detail": "auto"}
    content = [{"type": "input_text", "text": ASKED}, image]
    answer = client.responses.create(model=MODEL, input=[{"role": "user", "content": content}])
    assert answer.output_text == SEEN


def test_anthropic(url: str, picture: str) -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=url, auth_token=KEY)
    source = {"type": "base64", "media_type": "image/png", "data": picture}
    content = [{"type": "image", "source": source}, {"type": "text", "text": ASKED}]
    answer = client.messages.create(model=MODEL, max_tokens=50, messages=[{"role": "user", "content": content}])
    assert answer.content[-1].text == SEEN


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_litellm(url: str, picture: str, provider: str) -> None:
    import litellm

    base = f"{url}/v1" if provider == "openai" else url
    messages = [{"role": "user", "content": parts(picture)}]
    answer = litellm.completion(model=f"{provider}/{MODEL}", api_base=base, api_key=KEY, messages=messages)
    assert answer.choices[0].message.content.endswith(SEEN)


def test_langchain(url: str, picture: str) -> None:
    from langchain_core.messages import HumanMessage
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key=KEY)
    assert model.invoke([HumanMessage(parts(picture))]).content == SEEN
