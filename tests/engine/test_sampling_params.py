"""What a request may ask of the sampler, and the errors for values out of range."""

from typing import Any

import pytest

from tests.golden import refused
from tieredkv.engine.sampling_params import SamplingParams
from tieredkv.errors import RequestError


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("temperature", 101.5),
        ("temperature", -1),
        ("temperature", float("nan")),
        ("temperature", "1"),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 1.5),
        ("max_tokens", -1),
        ("max_tokens", True),
        ("min_tokens", 17),
        ("logprobs", 101),
        ("seed", 1.5),
        ("presence_penalty", 2.1),
        ("repetition_penalty", 0),
        ("stop", ("",)),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {5: 101}),
        ("stop_token_ids", 5),
        ("stop_token_ids", (-1,)),
    ],
)
def test_a_value_out_of_range_is_named_with_its_range(param: str, value: object) -> None:
    wrong: dict[str, Any] = {param: value}
    with refused(RequestError, status=400) as caught:
        SamplingParams(**wrong)
    assert str(caught.value.param).startswith(param)


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
