"""How the tokens of a request are chosen; checked when it is made and never changed."""

from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from tieredkv.errors import RequestError
from tieredkv.fields import in_openai_words, out_of_bounds

MAX_LOGPROBS = 100
MAX_STOP_STRINGS = 16
MAX_TEMPERATURE = 100.0
MAX_LOGIT_BIASES = 1024


def several(value: Any) -> Any:
    """Return a text as a tuple of one, a list as a tuple, and None as an empty tuple."""
    if isinstance(value, str):
        return (value,)
    return tuple(value or ()) if isinstance(value, list | None) else value


TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Temperature = Annotated[float, Field(ge=0, le=MAX_TEMPERATURE, allow_inf_nan=False)]
TopP = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
TopK = Annotated[int, Field(ge=-1, le=2**31 - 1)]
MinP = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
RepetitionPenalty = Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)]
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
class TokenChoice:
    """How one token is chosen; the authors of a model may recommend other values than these.

    Attributes:
        temperature: 0 takes the most likely token.
        top_p: only the fewest most likely tokens count whose probabilities add up to this; 1 for
            all tokens.
        top_k: only this many most likely tokens count; 0 or -1 for all tokens.
        min_p: tokens count whose probability is at least this fraction of the largest one.
        repetition_penalty: divides a positive logit, and multiplies a negative one, of each token
            that is in the prompt or the output; 1 changes nothing.
    """

    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0

    def __post_init__(self) -> None:
        """Check every value against its range."""
        _bring_to_types(self, _CHOICE)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request, in OpenAI's terms; some ranges are wider than OpenAI's.

    Attributes:
        max_tokens: the largest number of output tokens; 0 only computes the prompt.
        temperature: see `TokenChoice`. If this or one of the next three or `repetition_penalty` is
            None, the model's generation_config.json decides, and else the default of `TokenChoice`.
        top_p: see `temperature`.
        top_k: see `temperature`.
        min_p: see `temperature`.
        seed: equal seeds give equal tokens, whatever else is in the batch; None draws a seed.
        stop: texts that end the output and are not part of it; one string or several.
        stop_token_ids: tokens that end the output, as the model's end token does.
        ignore_eos: the model's end token does not end the output.
        min_tokens: no end token, stop token or stop string ends the output before it has this many
            tokens.
        logprobs: the number of alternatives whose log probabilities are reported with that of each
            chosen token; None reports none.
        presence_penalty: subtracted from the logit of each token that is in the output.
        frequency_penalty: subtracted from a token's logit once for each occurrence in the output.
        repetition_penalty: see `temperature`.
        logit_bias: added to the logits of these token ids.
    """

    max_tokens: Annotated[int, Field(ge=0)] = 16
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    stop: StopStrings = ()
    stop_token_ids: Annotated[tuple[TokenId, ...], BeforeValidator(several)] = ()
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0)] = 0
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: Biases | None = None

    def __post_init__(self) -> None:
        """Check every value against its range and bring it to its field's type."""
        _bring_to_types(self, _PARAMS)
        if self.min_tokens > self.max_tokens:
            raise out_of_bounds("min_tokens", "le", self.max_tokens, self.min_tokens)

    def choice(self, defaults: TokenChoice) -> TokenChoice:
        """Return how this request's tokens are chosen, by the defaults where it does not say."""
        asked = {field.name: getattr(self, field.name) for field in fields(TokenChoice)}
        return replace(defaults, **{name: it for name, it in asked.items() if it is not None})

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


def _adapter(of: type) -> TypeAdapter[dict[str, Any]]:
    """Return what checks the fields of a class, all at once."""
    strict = with_config(strict=True)
    return TypeAdapter(strict(TypedDict("_Fields", of.__annotations__)))  # type: ignore


_CHOICE, _PARAMS = _adapter(TokenChoice), _adapter(SamplingParams)


def _bring_to_types(it: TokenChoice | SamplingParams, adapter: TypeAdapter[dict[str, Any]]) -> None:
    """Check every field of a new object and bring it to the field's type, in place.

    Raises:
        RequestError: a value is of another type or out of range.
    """
    try:
        checked = adapter.validate_python({name: getattr(it, name) for name in it.__slots__})
    except ValidationError as error:
        raise in_openai_words(error) from None
    for name, value in checked.items():
        object.__setattr__(it, name, value)
