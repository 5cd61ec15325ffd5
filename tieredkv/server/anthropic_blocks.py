"""The turns and blocks of conversations of Anthropic's Messages, and their texts in a prompt."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, FailFast, Field, ValidationInfo, model_validator

from tieredkv.fields import PARTS, names_of
from tieredkv.server import hosted
from tieredkv.server.anthropic_tools import Known, Marked
from tieredkv.server.asked import DOCUMENT_NOTE, ERROR_NOTE, IMAGE_NOTE, Json, Text
from tieredkv.server.ignored import unknown
from tieredkv.server.known_fields import BLOCK, TOOL_RESULT_PART
from tieredkv.server.openai_messages import Arguments

_SOURCES = ("text", "content", "base64", "url", "file")
_BlockType = Literal[
    "text", "image", "tool_use", "tool_result", "document", "thinking", "redacted_thinking"
]


def _read_part(value: Any, info: ValidationInfo) -> Any:
    """Return a part as a `NoteBlock` if it is none of the client's own types."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind in _BLOCK_TYPES or not kind:
        return value
    told = {"type": kind, "text": hosted.block_note(value)}
    told["cache_control"] = value.get("cache_control")
    return NoteBlock.model_validate(told, context=info.context)


_BLOCK_TYPES = get_args(_BlockType)


_AS_PART = BeforeValidator(_read_part, json_schema_input_type=Json)


class Source(Known):
    """Where an image or a document comes from; only the text of a document is read."""

    known_besides = Known.known_besides | names_of("media_type url file_id")
    needed = ("text.data", "content.content")

    type: Text
    data: str = ""
    content: Annotated[list[Annotated["ResultPart", _AS_PART]], FailFast(), PARTS] = Field(
        default_factory=list
    )


class ResultPart(Marked):
    """A part of a tool result or a document; a breakpoint on it counts as one of the whole.

    As in Anthropic's API, a strict server refuses such a breakpoint.
    """

    needed: ClassVar[tuple[str, ...]] = ("text.text", "document.source")
    refused = TOOL_RESULT_PART

    type: Literal["text", "image", "document"]
    text: str = ""
    source: Source | None = None
    title: str = ""
    context: str = ""

    @property
    def inner(self) -> "Sequence[ResultPart]":
        """The parts that it is made of."""
        return self.source.content if self.source else ()

    @property
    def ttl(self) -> str:
        """How long the prompt up to here is kept; empty without a breakpoint."""
        return super().ttl or next(filter(None, (part.ttl for part in reversed(self.inner))), "")

    @property
    def is_picture(self) -> bool:
        """Whether it is an image, or a document that is no text."""
        return self.type == "image" or (
            self.source is not None and self.source.type not in ("text", "content")
        )

    def ignored(self, path: str) -> list[str]:
        """Return how an answer names what of the part is not known.

        Args:
            path: of the part in the body.
        """
        source = self.source.type if self.source else None
        told = unknown(f"{path}.source.type", source, _SOURCES)
        inner = self.source.content if self.source else ()
        return told + ignored_in(f"{path}.source.content", inner)

    def __str__(self) -> str:
        if self.type == "image":
            return IMAGE_NOTE
        if self.source is None:
            return self.text
        parts = [DOCUMENT_NOTE] if self.is_picture else [self.source.data, *self.source.content]
        return "\n".join(filter(None, (self.title, self.context, *map(str, parts))))


def ignored_in(path: str, parts: Sequence[ResultPart]) -> list[str]:
    """Return how an answer names what of the parts at a path is not known."""
    return [told for i, part in enumerate(parts) for told in part.ignored(f"{path}[{i}]")]


class Block(ResultPart):
    """A part of a turn; its type decides which fields are required."""

    needed: ClassVar[tuple[str, ...]] = (
        *("text.text", "tool_use.id", "tool_use.name", "tool_result.tool_use_id"),
        "document.source",
    )
    refused = BLOCK

    type: _BlockType  # type: ignore[assignment]
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: Arguments = Field(default_factory=dict)
    tool_use_id: str = ""
    is_error: bool = False
    content: Annotated[list[Annotated[ResultPart, _AS_PART]], FailFast(), PARTS] = Field(
        default_factory=list
    )

    @property
    def inner(self) -> Sequence[ResultPart]:
        """The parts that it is made of."""
        return [*super().inner, *self.content]

    @property
    def is_text(self) -> bool:
        """Whether it is a text, or a text stands for it."""
        return self.type == "text"

    def ignored(self, path: str) -> list[str]:
        """Return how an answer names what of the block is not known.

        Args:
            path: of the block in the body.
        """
        return super().ignored(path) + ignored_in(f"{path}.content", self.content)

    @property
    def texts(self) -> list[str]:
        """The texts of the block in the prompt; thoughts are left out."""
        if self.type in ("text", "image", "document"):
            return [str(self)]
        note = [ERROR_NOTE] if self.type == "tool_result" and self.is_error else []
        return [*note, *map(str, self.content)]

    @property
    def has_picture(self) -> bool:
        """Whether the block or a part of it is an image, or a document that is no text."""
        return any(part.is_picture for part in (self, *self.content))


class TextBlock(Block):
    """A block that must be a text."""

    type: Literal["text"]


class NoteBlock(TextBlock):
    """A block for which a text stands: of Anthropic's own servers, or of an unknown type."""

    needed = ()

    type: Text  # type: ignore[assignment]

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, describe: Any) -> Any:
        """Describe a block of any type; only its breakpoint has a fixed form."""
        described = super().__get_pydantic_json_schema__(schema, describe)
        own = describe.resolve_ref_schema(described)
        own["properties"] = {name: own["properties"][name] for name in ("type", "cache_control")}
        return described

    @property
    def is_text(self) -> bool:
        """Whether it is a text, or a text stands for it."""
        return True

    @property
    def texts(self) -> list[str]:
        """The texts of the block in the prompt."""
        return [str(self)]

    def ignored(self, path: str) -> list[str]:
        """Return how an answer names what of the block is not known."""
        return unknown(f"{path}.type", self.type, hosted.BLOCK_TYPES)

    def __str__(self) -> str:
        return hosted.Note(self.text)


_AnyBlock = Annotated[Block, BeforeValidator(_read_part, json_schema_input_type=Block | NoteBlock)]
_AnyText = Annotated[
    TextBlock, BeforeValidator(_read_part, json_schema_input_type=TextBlock | NoteBlock)
]
Blocks = Annotated[list[_AnyBlock], FailFast(), Field(min_length=1), PARTS]
Texts = Annotated[list[_AnyText], FailFast(), PARTS]


_ROLES = ("user", "assistant", "system")


class Turn(Known):
    """One turn of a conversation: the blocks of one role.

    A `system` turn may be empty. Clients send such a turn with an `output_config` for later turns.
    So may one of the assistant, since a model may answer nothing.
    """

    needed = ("user.content", "assistant.content")

    role: Text
    content: Blocks = Field(default_factory=list)

    @property
    def template_role(self) -> str:
        """The role that the chat template is told; that of the user for an unknown one."""
        return self.role if self.role in _ROLES else "user"

    def ignored(self, path: str) -> list[str]:
        """Return how an answer names what of the turn is not known.

        Args:
            path: of the turn in the body.
        """
        told = unknown(f"{path}.role", self.role, _ROLES)
        return told + ignored_in(f"{path}.content", self.content)

    @model_validator(mode="before")
    @classmethod
    def _drop_no_content(cls, value: Any) -> Any:
        if not isinstance(value, dict) or value.get("content") != []:
            return value
        if value.get("role") == "system":
            return {name: each for name, each in value.items() if name != "content"}
        return {**value, "content": ""} if value.get("role") == "assistant" else value
