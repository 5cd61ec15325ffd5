"""What a request may ask of the sampler, and the errors for values out of range."""

from typing import Any

import pytest

from tests.golden import refused
from tieredkv.engine.sampling_params import SamplingParams
from tieredkv.errors import RequestError


@pytest.mark.parametrize(
    ("param", "value", "message"),
    [
        ("temperature", 101.5, "Invalid 'temperature': decimal above maximum value. Expected a value <= 100, but got 101.5 instead."),  # noqa: E501
        ("temperature", -1, "Invalid 'temperature': decimal below minimum value. Expected a value >= 0, but got -1 instead."),  # noqa: E501
        ("temperature", float("nan"), "Invalid type for 'temperature': expected a finite decimal, but got a decimal instead."),  # noqa: E501
        ("temperature", "1", "Invalid type for 'temperature': expected a decimal, but got a string instead."),  # noqa: E501
        ("top_p", 0.0, "Invalid 'top_p': decimal below minimum value. Expected a value > 0, but got 0.0 instead."),  # noqa: E501
        ("top_p", 1.1, "Invalid 'top_p': decimal above maximum value. Expected a value <= 1, but got 1.1 instead."),  # noqa: E501
        ("top_k", -2, "Invalid 'top_k': integer below minimum value. Expected a value >= -1, but got -2 instead."),  # noqa: E501
        ("min_p", 1.5, "Invalid 'min_p': decimal above maximum value. Expected a value <= 1, but got 1.5 instead."),  # noqa: E501
        ("max_tokens", -1, "Invalid 'max_tokens': integer below minimum value. Expected a value >= 0, but got -1 instead."),  # noqa: E501
        ("max_tokens", True, "Invalid type for 'max_tokens': expected an integer, but got a boolean instead."),  # noqa: E501
        ("min_tokens", 17, "Invalid 'min_tokens': integer above maximum value. Expected a value <= 16, but got 17 instead."),  # noqa: E501
        ("logprobs", 101, "Invalid 'logprobs': integer above maximum value. Expected a value <= 100, but got 101 instead."),  # noqa: E501
        ("seed", 1.5, "Invalid type for 'seed': expected an integer, but got a decimal instead."),
        ("presence_penalty", 2.1, "Invalid 'presence_penalty': decimal above maximum value. Expected a value <= 2, but got 2.1 instead."),  # noqa: E501
        ("repetition_penalty", 0, "Invalid 'repetition_penalty': decimal below minimum value. Expected a value > 0, but got 0 instead."),  # noqa: E501
        ("stop", ("",), "Invalid 'stop[0]': empty string. Expected a string with minimum length 1, but got an empty string instead."),  # noqa: E501
        ("logit_bias", {"x": 1}, "Invalid key in 'logit_bias': 'x'. You should only be submitting non-negative integers."),  # noqa: E501
        ("logit_bias", {5: 101}, "Invalid 'logit_bias[5]': decimal above maximum value. Expected a value <= 100, but got 101 instead."),  # noqa: E501
        ("stop_token_ids", 5, "Invalid type for 'stop_token_ids': expected an array, but got an integer instead."),  # noqa: E501
        ("stop_token_ids", (-1,), "Invalid 'stop_token_ids[0]': integer below minimum value. Expected a value >= 0, but got -1 instead."),  # noqa: E501
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_named_with_its_range(
    param: str, value: object, message: str
) -> None:
    wrong: dict[str, Any] = {param: value}
    with pytest.raises(RequestError) as caught:
        SamplingParams(**wrong)
    assert str(caught.value) == message
    assert str(caught.value.param).startswith(param)
    assert caught.value.status == 400


def test_too_many_stop_strings_are_refused() -> None:
    with refused(RequestError, param="stop", code="array_above_max_length"):
        SamplingParams(stop=tuple("abcdefghijklmnopq"))


def test_one_stop_string_is_not_taken_for_its_letters() -> None:
    single: Any = "end"
    assert SamplingParams(stop=single).stop == ("end",)


def test_the_keys_of_a_bias_may_be_strings_as_json_has_them() -> None:
    bias: Any = {"7": 5, 8: -1.5}
    assert SamplingParams(logit_bias=bias).logit_bias == {7: 5.0, 8: -1.5}


def test_token_ids_beyond_the_vocabulary_are_refused() -> None:
    params = SamplingParams(logit_bias={300: 1.0})
    with refused(RequestError, param="logit_bias"):
        params.check_vocabulary(300)
    SamplingParams(logit_bias={299: 1.0}, stop_token_ids=(5,)).check_vocabulary(300)
