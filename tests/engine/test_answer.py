"""Answers: their text and log-probabilities agree token by token."""

import pytest
from transformers import PreTrainedTokenizerFast

from tieredkv.engine.answer import Answer
from tieredkv.engine.byte_tokenizer import BYTE_VOCAB_SIZE, byte_tokenizer
from tieredkv.engine.engine_messages import EngineRequest, TokenLogprob, TokenOutput
from tieredkv.engine.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer(BYTE_VOCAB_SIZE, 1024)


def answer_of(tokenizer: PreTrainedTokenizerFast, *stop: str) -> Answer:
    params = SamplingParams(max_tokens=64, stop=stop, logprobs=0)
    return Answer(EngineRequest(request_id="a", prompt_token_ids=[1], params=params), tokenizer)


def tell(answer: Answer, token_id: int, finish_reason: str | None = None) -> str:
    entry = TokenLogprob(token_id=token_id, logprob=-1.0)
    output = TokenOutput(
        request_id="a", token_ids=[token_id], logprobs=[entry], finish_reason=finish_reason
    )
    return answer.take(output)


def told(answer: Answer) -> list[int]:
    return [entry.token_id for entry in answer.logprobs]


def test_the_token_that_ends_an_answer_has_no_log_probability(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    answer, end = answer_of(tokenizer), int(tokenizer.eos_token_id or 0)
    for token_id in b"ab":
        tell(answer, token_id)
    tell(answer, end, "stop")
    assert (answer.text, told(answer)) == ("ab", list(b"ab"))
    assert answer.token_ids == [*b"ab", end]


def test_special_tokens_left_out_of_the_text_have_no_log_probability(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    answer, end = answer_of(tokenizer), int(tokenizer.eos_token_id or 0)
    for token_id in (97, end, 98):
        tell(answer, token_id)
    tell(answer, 99, "length")
    assert (answer.text, told(answer)) == ("abc", [97, 98, 99])


def test_tokens_of_a_stop_string_have_no_log_probability(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    answer = answer_of(tokenizer, "END")
    pieces = [(tell(answer, token_id), len(answer.logprobs)) for token_id in b"aExEND"]
    assert pieces == [("a", 1), ("", 1), ("Ex", 3), ("", 3), ("", 3), ("", 3)]
    assert (answer.text, answer.finish_reason, told(answer)) == ("aEx", "stop", list(b"aEx"))


def test_log_probabilities_of_bytes_come_with_their_character(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    answer = answer_of(tokenizer)
    *first, last = "é".encode()
    assert [(tell(answer, each), told(answer)) for each in first] == [("", [])]
    assert (tell(answer, last), told(answer)) == ("é", [*first, last])
    tell(answer, first[0], "length")
    assert (answer.text, told(answer)) == ("é\ufffd", [*first, last, first[0]])
