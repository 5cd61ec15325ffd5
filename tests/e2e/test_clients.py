"""Popular client libraries against a real server on the small model.

`make test-e2e` runs the clients of its own environment. `make test-clients` runs litellm,
langchain-openai and an older openai, which cannot be installed beside the newer one.
"""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests import golden
from tests.golden import refused
from tests.serving import Server, running
from tests.waiting import wait_until

MODEL = "tiny-random"
SHORT: dict[str, Any] = {"max_tokens": 4, "temperature": 0}
TEXT = "A long document that is asked about more than once. " * 6
KEEP = {"prompt_cache_retention": "24h"}
pytestmark = pytest.mark.filterwarnings("default")  # warnings of other packages


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a server with two tenants that writes `24h` blocks to disk at once."""
    keys = ("--api-key", "sk-a", "--api-key", "sk-b")
    flags = (*keys, "--default-retention", "in_memory", "--disk-write", "write_behind")
    with running(tmp_path_factory.mktemp("clients"), *flags) as server:
        yield server
        assert server.stop() == 0
        assert "Traceback" not in server.log, server.log


def full_blocks(num_tokens: int) -> int:
    """Return how many of a prompt's tokens are in full blocks."""
    return num_tokens // 16 * 16


def user(text: str) -> list[Any]:
    """Return a conversation of one message."""
    return [{"role": "user", "content": text}]


def check_reaches_the_disk(server: Server, num_tokens: int, num_before: int) -> None:
    """Wait until a prompt's blocks have been written; check that no others were."""
    expected = num_before + num_tokens // 16
    wait_until(lambda: disk_blocks(server) >= expected, "nothing is written")
    assert disk_blocks(server) == expected


def disk_blocks(server: Server) -> int:
    """Return how many blocks the disk holds."""
    blocks: int = server.df()["disk"]["blocks"]
    return blocks


# --- openai


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    """Return the first tenant's client."""
    with server.client("sk-a") as client:
        yield client


def test_openai_chats_and_is_told_what_was_cached(client: openai.OpenAI, server: Server) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": user(f"chats {TEXT}"), **SHORT}
    cold, warm = (client.chat.completions.create(**asked) for _ in range(2))
    assert cold.choices[0].message.content == warm.choices[0].message.content
    assert cold.usage is not None and warm.usage is not None
    told = [it.prompt_tokens_details for it in (cold.usage, warm.usage)]
    full = full_blocks(cold.usage.prompt_tokens)
    assert [it and it.cached_tokens for it in told] == [0, full]
    assert [it and it.to_dict()["cache_write_tokens"] for it in told] == [full, 0]
    receipt = {"device": full, "host": 0, "disk": 0, "recomputed": 0}
    assert warm.usage.to_dict()["tieredkv"] == receipt
    with server.client("sk-b") as other:
        stranger = other.chat.completions.create(**asked).usage
    assert stranger is not None and stranger.prompt_tokens_details is not None
    assert stranger.prompt_tokens_details.cached_tokens == 0


def test_openai_streams_the_same_words_and_the_same_usage(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": user(f"stream {TEXT}"), **SHORT}
    whole = client.chat.completions.create(**asked)
    told: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    chunks: list[Any] = list(client.chat.completions.create(**asked, **told))
    text = "".join(it.choices[0].delta.content or "" for it in chunks if it.choices)
    assert text == whole.choices[0].message.content
    assert whole.usage is not None and whole.usage.prompt_tokens == chunks[-1].usage.prompt_tokens
    cached = chunks[-1].usage.prompt_tokens_details.cached_tokens
    assert cached == full_blocks(whole.usage.prompt_tokens)


def test_openai_completes_texts_and_token_ids(client: openai.OpenAI) -> None:
    ids = list(TEXT.encode())
    whole = client.completions.create(model=MODEL, prompt=[TEXT, "b"], **SHORT)
    assert [it.index for it in whole.choices] == [0, 1]
    pieces: Any = client.completions.create(model=MODEL, prompt=ids, stream=True, **SHORT)
    assert "".join(it.choices[0].text for it in pieces) == whole.choices[0].text


def test_openai_responds(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_output_tokens": 4, "temperature": 0}
    whole = client.responses.create(**asked, input=f"respond {TEXT}")
    events: Any = client.responses.create(**asked, input=f"respond {TEXT}", stream=True)
    last = list(events)[-1]
    assert last.response.output_text == whole.output_text
    cached = last.response.usage.input_tokens_details.cached_tokens
    assert cached == full_blocks(last.response.usage.input_tokens)


def test_openai_keeps_what_it_asks_to_keep(client: openai.OpenAI, server: Server) -> None:
    before = disk_blocks(server)
    asked: dict[str, Any] = {"model": MODEL, **SHORT}
    client.chat.completions.create(
        **asked, messages=user(f"forget {TEXT}"), extra_body={"prompt_cache_retention": "in_memory"}
    )
    kept = client.chat.completions.create(
        **asked, messages=user(f"keep {TEXT}"), prompt_cache_retention="24h"
    )
    assert kept.usage is not None
    check_reaches_the_disk(server, kept.usage.prompt_tokens, before)


def test_openai_is_refused_by_the_class_of_error(client: openai.OpenAI, server: Server) -> None:
    ask: Any = client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as bad:
        ask(model=MODEL, messages=user("a"), prompt_cache_retention="7d")
    assert (bad.value.param, bad.value.code) == ("prompt_cache_retention", "invalid_value")
    body: Any = bad.value.body
    golden.told(body["message"])
    assert bad.value.request_id is not None
    with pytest.raises(openai.NotFoundError) as missing:
        ask(model="gpt-none", messages=user("a"))
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        ask(model=MODEL, messages=user("x" * 5000))
    assert long.value.code == "context_length_exceeded"
    with server.client("sk-wrong") as other, pytest.raises(openai.AuthenticationError):
        other.models.list()


def test_openai_asks_many_things_at_once(server: Server) -> None:
    async def ask_all() -> list[int]:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="sk-a") as client:
            asked = (
                client.completions.create(model=MODEL, prompt=f"{i} at once", **SHORT)
                for i in range(16)
            )
            answers = await asyncio.gather(*asked)
        return [it.usage.completion_tokens for it in answers if it.usage]

    assert asyncio.run(ask_all()) == [4] * 16


# --- anthropic


def test_anthropic_marks_a_prefix_that_openai_has_said(server: Server) -> None:
    anthropic = pytest.importorskip("anthropic")
    system = f"shared {TEXT}"
    messages = [{"role": "system", "content": system}, *user("And?")]
    with server.client("sk-a") as client:
        said = client.chat.completions.create(model=MODEL, messages=messages, **SHORT)
    marked = [{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}]
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 4, "messages": user("And?")}
    with anthropic.Anthropic(base_url=server.root, api_key="sk-a", max_retries=0) as client:
        usage = client.messages.create(**asked, system=marked).usage
        with client.messages.stream(**asked, system=marked) as stream:
            streamed = stream.get_final_message().usage
        with refused(anthropic.BadRequestError, status_code=400):
            client.messages.create(**asked, system=marked * 5)
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(**asked | {"model": "other"})
    assert said.usage is not None
    for each in (usage, streamed):
        assert each.cache_read_input_tokens == full_blocks(len(system) + len("<s>system\n") - 2)
        assert each.cache_creation_input_tokens == 0
        assert each.cache_read_input_tokens + each.input_tokens == said.usage.prompt_tokens
    with (
        anthropic.Anthropic(base_url=server.root, api_key="sk-none", max_retries=0) as client,
        pytest.raises(anthropic.AuthenticationError),
    ):
        client.messages.create(**asked)


# --- litellm


@pytest.fixture
def litellm(server: Server) -> Any:
    """Return the litellm package; skip the test if it is not installed."""
    return pytest.importorskip("litellm", reason="litellm needs openai 2: `make test-clients`")


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm_chats_streams_and_keeps(litellm: Any, server: Server, provider: str) -> None:
    before = disk_blocks(server)
    asked: dict[str, Any] = {"model": f"{provider}/{MODEL}", **SHORT}
    asked |= {"api_base": server.url, "api_key": "sk-a", "messages": user(f"{provider} {TEXT}")}
    cold = litellm.completion(**asked, extra_body=KEEP)
    warm = litellm.completion(**asked, extra_body=KEEP)
    assert cold.choices[0].message.content == warm.choices[0].message.content
    full = full_blocks(cold.usage.prompt_tokens)
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert warm.usage.prompt_tokens_details.cached_tokens == full
    check_reaches_the_disk(server, full, before)
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(it.choices[0].delta.content or "" for it in chunks if it.choices)
    assert text == cold.choices[0].message.content
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == full


def test_litellm_completes_texts(litellm: Any, server: Server) -> None:
    how = {"api_base": server.url, "api_key": "sk-a", **SHORT}
    answer = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt=TEXT, **how)
    assert len(answer.choices) == 1 and answer.usage.completion_tokens == 4


def test_litellm_speaks_anthropic(litellm: Any, server: Server) -> None:
    part = {"type": "text", "text": f"litellm {TEXT}", "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "system", "content": [part]}, *user("And?")]
    how = {"api_base": server.root, "api_key": "sk-a", "max_tokens": 4}
    usages = [
        litellm.completion(model=f"anthropic/{MODEL}", messages=messages, **how).usage
        for _ in range(2)
    ]
    assert usages[0].cache_creation_input_tokens == usages[1].cache_read_input_tokens > len(TEXT)
    assert usages[0].prompt_tokens == usages[1].prompt_tokens


def test_litellm_is_refused_by_the_class_of_error(litellm: Any, server: Server) -> None:
    how = {"api_base": server.url, "messages": user("a")}
    with pytest.raises(litellm.BadRequestError, match="'7d'"):
        extra = {"prompt_cache_retention": "7d"}
        litellm.completion(model=f"openai/{MODEL}", api_key="sk-a", extra_body=extra, **how)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(model="openai/none", api_key="sk-a", **how)
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(model=f"openai/{MODEL}", api_key="sk-no", **how)


# --- langchain


@pytest.fixture
def langchain(server: Server) -> Any:
    """Return a function that makes langchain's chat model of the server."""
    package = pytest.importorskip(
        "langchain_openai", reason="langchain-openai is not here: `make test-clients`"
    )

    def make(**more: Any) -> Any:
        how = {"base_url": server.url, "api_key": "sk-a", "max_retries": 0, **SHORT, **more}
        return package.ChatOpenAI(model=how.pop("model", MODEL), **how)

    return make


def test_langchain_chats_streams_and_keeps(langchain: Any, server: Server) -> None:
    before = disk_blocks(server)
    model = langchain(extra_body=KEEP, stream_usage=True)
    talk = [("system", f"langchain {TEXT}"), ("user", "And?")]
    cold, warm = model.invoke(talk), model.invoke(talk)
    assert cold.content == warm.content
    full = full_blocks(cold.usage_metadata["input_tokens"])
    assert cold.usage_metadata["input_token_details"]["cache_read"] == 0
    assert warm.usage_metadata["input_token_details"]["cache_read"] == full
    check_reaches_the_disk(server, full, before)
    whole: Any = None
    for chunk in model.stream(talk):
        whole = chunk if whole is None else whole + chunk
    assert whole.content == cold.content
    assert whole.usage_metadata["input_token_details"]["cache_read"] == full


def test_langchain_speaks_the_responses_api(langchain: Any) -> None:
    model = langchain(use_responses_api=True)
    cold, warm = model.invoke(f"responses {TEXT}"), model.invoke(f"responses {TEXT}")
    assert cold.text == warm.text
    read = warm.usage_metadata["input_token_details"]["cache_read"]
    assert read == full_blocks(warm.usage_metadata["input_tokens"])


def test_langchain_is_refused_by_the_class_of_error(langchain: Any) -> None:
    with pytest.raises(openai.NotFoundError):
        langchain(model="none").invoke("a")
    with pytest.raises(openai.BadRequestError) as bad:
        langchain(extra_body={"prompt_cache_retention": "7d"}).invoke("a")
    assert (bad.value.param, bad.value.code) == ("prompt_cache_retention", "invalid_value")
    with pytest.raises(openai.AuthenticationError):
        langchain(api_key="sk-no").invoke("a")
