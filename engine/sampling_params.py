"""How one request wants its tokens chosen; checked when it is made, never changed after."""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from tieredkv.errors import RequestError
from tieredkv.fields import in_openai_words, out_of_bounds

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_LOGIT_BIASES = 1024


def several(value: Any) -> Any:
    """Return one text as several, and none at all for None; unchecked."""
    if isinstance(value, str):
        return (value,)
    return tuple(value or ()) if isinstance(value, list | None) else value


TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
StopStrings = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    Field(max_length=MAX_STOP_STRINGS),
    BeforeValidator(several),
]
Biases = Annotated[
    dict[
        Annotated[TokenId, Field(strict=False)],  # JSON has strings
        Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)],
    ],
    Field(max_length=MAX_LOGIT_BIASES),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request, in OpenAI's terms and ranges.

    Attributes:
        max_tokens: at most so many output tokens; 0 only computes the prompt.
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

    max_tokens: Annotated[int, Field(ge=0)] = 16
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] = 0
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    stop: StopStrings = ()
    stop_token_ids: Annotated[tuple[TokenId, ...], BeforeValidator(several)] = ()
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0)] = 0
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] = 1.0
    logit_bias: Biases | None = None

    def __post_init__(self) -> None:
        """Check every value against its range and bring it to its field's type."""
        try:
            checked = _FIELDS.validate_python(
                {name: getattr(self, name) for name in self.__slots__}
            )
        except ValidationError as error:
            raise in_openai_words(error) from None
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.min_tokens > self.max_tokens:
            raise out_of_bounds("min_tokens", "le", self.max_tokens, self.min_tokens)

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


_FIELDS = TypeAdapter[dict[str, Any]](
    with_config(strict=True)(TypedDict("_Fields", SamplingParams.__annotations__))  # type: ignore
)
