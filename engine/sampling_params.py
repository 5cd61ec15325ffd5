"""How one request wants its tokens chosen; checked when it is made, never changed after."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tieredkv.errors import RequestError

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_LOGIT_BIASES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request, in OpenAI's terms and ranges.

    Attributes:
        max_tokens: at most so many output tokens.
        temperature: 0 takes the most likely token.
        top_p: the smallest set of tokens whose probabilities reach it; 1 takes all.
        top_k: the so many most likely tokens; 0 or -1 takes all.
        min_p: tokens at least so likely relative to the most likely one.
        seed: equal seeds give equal tokens, whatever else is in the batch; None draws one.
        stop: text that ends the output and is not part of it; a string or several.
        stop_token_ids: tokens that end the output, as the model's end token does.
        ignore_eos: go on after the model's end token.
        min_tokens: no end token, stop token or stop string before so many output tokens.
        logprobs: report the chosen token's log probability and so many alternatives.
        presence_penalty: subtracted from the logit of a token that is in the output.
        frequency_penalty: subtracted once per occurrence in the output.
        repetition_penalty: divides (multiplies, if negative) the logit of a token in the prompt or
            the output.
        logit_bias: added to the logits of these token ids.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None

    def __post_init__(self) -> None:
        """Check every value against its range and bring `stop` and `logit_bias` to one form."""
        stop = self.stop
        object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else tuple(stop or ()))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        _integer("max_tokens", self.max_tokens, 1)
        _number("temperature", self.temperature, 0.0, 2.0)
        _number("top_p", self.top_p, 0.0, 1.0, above=True)
        _integer("top_k", self.top_k, -1)
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, above=True)
        if len(self.stop) > MAX_STOP_STRINGS:
            what = f"array too long. Expected an array with maximum length {MAX_STOP_STRINGS}, but"
            raise _invalid("stop", f"{what} got an array with length {len(self.stop)} instead.")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise _invalid("stop", f"expected non-empty strings, but got {text!r} instead.")
        for token_id in self.stop_token_ids:
            _integer("stop_token_ids", token_id, 0, 2**31 - 1)
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids that the model does not have.

        Raises:
            RequestError: a biased or stop token is outside of the vocabulary.
        """
        of_fields = {"logit_bias": self.logit_bias or (), "stop_token_ids": self.stop_token_ids}
        for param, token_ids in of_fields.items():
            for token_id in token_ids:
                if token_id >= vocab_size:
                    where = f"is not in the model's vocabulary of {vocab_size} tokens."
                    text = f"Invalid value for '{param}': token id {token_id} {where}"
                    raise RequestError(text, param=param)


def _invalid(param: str, what: str) -> RequestError:
    return RequestError(f"Invalid '{param}': {what}", param=param)


def _wrong_type(param: str, expected: str, value: object) -> RequestError:
    text = f"Invalid type for '{param}': expected {expected}, but got {value!r} instead."
    return RequestError(text, param=param)


def _integer(param: str, value: object, minimum: int, maximum: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong_type(param, "an integer", value)
    _in_range(param, value, minimum, maximum, False)


def _number(
    param: str, value: object, minimum: float, maximum: float, *, above: bool = False
) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise _wrong_type(param, "a decimal", value)
    _in_range(param, value, minimum, maximum, above)


def _in_range(param: str, value: float, minimum: float, maximum: float | None, above: bool) -> None:
    kind = "decimal" if isinstance(value, float) else "integer"
    bound = ""
    if value < minimum or (above and value == minimum):
        bound = f"below minimum value. Expected a value {'>' if above else '>='} {minimum}"
    elif maximum is not None and value > maximum:
        bound = f"above maximum value. Expected a value <= {maximum}"
    if bound:
        raise _invalid(param, f"{kind} {bound}, but got {value} instead.")


def _checked_bias(bias: Mapping[int, float]) -> dict[int, float]:
    """Bring the keys to ints (JSON has strings) and check the values."""
    if len(bias) > MAX_LOGIT_BIASES:
        raise _invalid("logit_bias", f"at most {MAX_LOGIT_BIASES} tokens, but got {len(bias)}.")
    checked = {}
    for key, value in bias.items():
        try:
            token_id = int(key)
        except (TypeError, ValueError):
            rule = "You should only be submitting non-negative integers."
            text = f"Invalid key in 'logit_bias': {key!r}. {rule}"
            raise RequestError(text, param="logit_bias") from None
        _integer("logit_bias", token_id, 0, 2**31 - 1)
        _number("logit_bias", value, -100.0, 100.0)
        checked[token_id] = float(value)
    return checked
