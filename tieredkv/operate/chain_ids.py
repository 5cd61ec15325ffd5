"""The ids of chains, and the digits of namespaces, as operators write them."""

from tieredkv.errors import ConfigError

_ID_DIGITS = 32
MIN_ID_DIGITS = 8
"""An id with fewer digits would name other chains, too, in a store of millions of blocks."""


ID_HINT = f"`ls` lists the ids, of which each part needs at least {MIN_ID_DIGITS} hex digits"


def chain_id(first: bytes, last: bytes) -> str:
    """Return the id of a chain from the hashes of its own first block and of its last one."""
    return f"{first.hex()[:_ID_DIGITS]}-{last.hex()[:_ID_DIGITS]}"


def short_id(chain_id: str, num_digits: int) -> str:
    """Shorten both hashes of a chain's id; the result is an id of the chain, too."""
    return "-".join(part[:num_digits] for part in chain_id.split("-"))


def named_blocks(chain_id: str) -> tuple[str, str] | None:
    """Return the digits of the first and of the last block in an id, "" if it names no last block.

    Returns None for a text that cannot be an id, as it has too few digits or other characters.
    """
    first, dash, last = chain_id.lower().partition("-")
    parts = (first, last) if dash else (first,)
    is_id = all(len(each) >= MIN_ID_DIGITS and not set(each) - _HEX for each in parts)
    return (first, last) if is_id else None


_HEX = frozenset("0123456789abcdef")


def namespace_prefix(text: str) -> str:
    """Return the first digits of a namespace in lower case.

    Raises:
        ConfigError: the text cannot be those.
    """
    if not text or set(text.lower()) - _HEX:
        what = "is not the beginning of a namespace, which has hexadecimal digits only"
        raise ConfigError(f"`{text}` {what}; `ls` lists the namespaces")
    return text.lower()
