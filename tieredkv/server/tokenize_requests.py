"""Requests to tokenize and detokenize texts, in the form of vLLM; they need no engine."""

from typing import Annotated

from pydantic import FailFast, Field

from tieredkv.engine.engine_messages import EngineInfo
from tieredkv.engine.prompt import pack_prompt
from tieredkv.engine.sampling_params import TokenId
from tieredkv.errors import RequestError
from tieredkv.server.asked import WHOLE, Json, PlainRequest
from tieredkv.server.chat import Tokenization
from tieredkv.server.known_fields import TOKENIZE
from tieredkv.server.openai_api import check_continuing
from tieredkv.server.openai_messages import (
    Functions,
    Messages,
    Tools,
    for_template,
    ignored_messages,
    offered,
    whole_turns,
)
from tieredkv.server.template_arguments import TemplateArguments


class TokenizeRequest(PlainRequest):
    """The body of `POST /tokenize`, with a text or a conversation."""

    refused = TOKENIZE

    prompt: str | None = None
    messages: Messages = Field([])
    tools: Tools = Field([])
    functions: Functions = Field([])
    chat_template_kwargs: TemplateArguments = Field({})
    add_special_tokens: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    return_token_strs: bool = False

    @property
    def ignored(self) -> list[str]:
        """How an answer names the values of the request that this server does not know."""
        return ignored_messages(self.messages)

    def tell(self, tokenization: Tokenization, info: EngineInfo) -> Json:
        """Return the token ids and, if wanted, the tokens as the vocabulary spells them."""
        if (self.prompt is None) != bool(self.messages):
            text = "Either 'prompt' or 'messages' must be given, but not both."
            raise RequestError(text, param="prompt", code="invalid_value")
        if self.prompt is not None:
            how = {"add_special_tokens": self.add_special_tokens, "is_bounded": False}
            [token_ids] = tokenization.encode_prompts([self.prompt], **how)
        else:
            continues, adds_prompt = self.continue_final_message, self.add_generation_prompt
            check_continuing(self.messages, continues=continues, adds_prompt=adds_prompt)
            turns = whole_turns([("", message) for message in self.messages])
            messages = [message.for_template() for _, message in turns]
            how = {"add_generation_prompt": adds_prompt is not False}
            tools = for_template(offered(self.tools, self.functions)) or None
            arguments = {"tools": tools, **how}
            encoded = tokenization.encode_chat(
                messages,
                arguments,
                client_arguments=self.chat_template_kwargs,
                is_bounded=False,
                continues_last=continues,
            )
            token_ids = encoded.token_ids
        names = tokenization.tokenizer.convert_ids_to_tokens(token_ids)
        return {
            "count": len(token_ids),
            "max_model_len": info.max_model_len,
            "tokens": token_ids,
            "token_strs": names if self.return_token_strs else None,
        }


class DetokenizeRequest(PlainRequest):
    """The body of `POST /detokenize`."""

    tokens: Annotated[list[TokenId], FailFast()]

    def tell(self, tokenization: Tokenization, info: EngineInfo) -> Json:
        """Return the text of the tokens."""
        if self.tokens:
            # Ids outside of the vocabulary are refused.
            pack_prompt(self.tokens, WHOLE, info.vocab_size, field="tokens")
        return {"prompt": tokenization.decode(self.tokens)}
