"""The operator's verbs: what each is called and takes, and what it needs.

The command line, `/admin` and the engine all read this one table. A verb is added by a struct here,
a module beside this one that `operate.ask` names, a branch of `engine.verbs.Verbs` where it
concerns VRAM and host memory, and a command in `cli.store`.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal, get_args

import msgspec
from msgspec.structs import replace

from tieredkv.errors import ConfigError
from tieredkv.operate.chain_ids import ID_HINT, named_blocks, namespace_prefix
from tieredkv.operate.infos import ChainInfo
from tieredkv.types import Tier


class Verb(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A call of one verb.

    Unknown fields are refused, as they may be meant to spare blocks. Fields that have their default
    are not sent, so that workers and servers of older versions need not know them.

    Attributes:
        needs_disk: whether it says nothing of VRAM and host memory, so that it is of no use without
            a disk tier.
        listed_as: what the list is called that is its answer, and that may be too long for memory;
            empty for any other answer.
        is_local: whether only the machine's own user may call it, not `/admin`.
        changes: whether it may change the store; other verbs leave a stopped store as it is.
    """

    needs_disk: ClassVar[bool] = False
    listed_as: ClassVar[str] = ""
    is_local: ClassVar[bool] = False
    changes: ClassVar[bool] = False

    @property
    def verb(self) -> str:
        """What the verb is called."""
        return str(self.__struct_config__.tag)

    def check(self) -> None:
        """Refuse a call that says too little, or too much.

        Raises:
            ConfigError: names the field.
        """


class Df(Verb, frozen=True, kw_only=True, tag="df"):
    """How many blocks and bytes each tier holds.

    Attributes:
        verbose: tell what each model holds on disk in each namespace, too.
    """

    verbose: bool = False


class Ls(Verb, frozen=True, kw_only=True, tag="ls"):
    """The chains of all tiers, those whose last block was used last first.

    Attributes:
        filter: see `filters.ChainFilter`; "" for all chains.
        sort: see `filters.Order`; "" for the last used first.
        limit: how many chains to list at most; None for all.
    """

    listed_as: ClassVar[str] = "chains"

    filter: str = ""
    sort: str = ""
    limit: int | None = None

    def check(self) -> None:
        """Refuse an unknown field, and a limit below one."""
        from tieredkv.operate.filters import ChainFilter, Order  # loads NumPy

        ChainFilter(self.filter)
        if self.sort:
            Order(self.sort)
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"`limit` = {self.limit} must be at least 1")


class Inspect(Verb, frozen=True, kw_only=True, tag="inspect"):
    """One chain, block by block and in every tier; or what the tiers have of a prompt.

    Exactly one of `id`, `prompt` and `names` is given.

    Attributes:
        id: names the chain; see `ChainInfo`. It is shown from its first block to the last one that
            the id names. Where that has gone, what follows the first one is shown.
        following: show the blocks behind the named one too, with all branches. To find them on disk
            takes a look at every block.
        prompt: a text, a list of chat messages, or the body of a request to one of the APIs. Only a
            running server can tokenize it.
        tenant: of the prompt: the SHA-256 of its API key in hex; "" without keys.
        cache_salt, prompt_cache_key: of the prompt, where its body has none.
        names: what the store calls the blocks of a prompt that was tokenized elsewhere, the first
            one first (`storage.client.names`). Those on disk are listed. If the first is not there,
            the answer has all `roots` of the store, each with its namespace.
    """

    id: str = ""
    following: bool = False
    prompt: str | list[Any] | dict[str, Any] | None = None
    tenant: str = ""
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    names: list[bytes] = []

    @property
    def listed_as(self) -> str:  # type: ignore[override]
        """The list of blocks; a report on a prompt is none."""
        return "chain" if self.prompt is None else ""

    def check(self) -> None:
        """Refuse what cannot be an id, and a call that names several things or nothing."""
        if (bool(self.id), self.prompt is not None, bool(self.names)).count(True) != 1:
            raise ConfigError("give either `id` or `prompt`")
        if self.id and named_blocks(self.id) is None:
            raise ConfigError(f"`{self.id}` is no id: {ID_HINT}")


class EvictFilter(Verb, frozen=True, kw_only=True, tag="evict"):
    """The blocks that an operator wants to evict: those that match every given criterion.

    If no criterion is given, no block matches.

    Attributes:
        all: every block.
        older_than_s: blocks unused for at least this long.
        namespace_prefix: hex prefix of the namespace digest.
        ids: chains by the id that `ls` printed, or by the first digits of a block's hash; blocks
            that other chains share stay. See `ChainInfo`.
        filter: the chains that `ls` lists with this filter, as if they were named by their ids.
        model: those of the chains that are of this model, by its name; "" for every model.
        tiers: evict only the copies in these tiers; empty for every tier.
        to: `drop` makes copies unreachable. `host` and `disk` move blocks from the faster tiers to
            this one instead, where that has no copy yet; only blocks whose retention allows the
            disk go there.
        dry_run: count the blocks that would be evicted, and change nothing. Those in VRAM and host
            memory are counted if it is about certain chains, or not about the disk.
    """

    all: bool = False
    older_than_s: float | None = None
    namespace_prefix: str | None = None
    ids: tuple[str, ...] = ()
    filter: str = ""
    model: str = ""
    tiers: tuple[Tier, ...] = ()
    to: Literal["host", "disk", "drop"] = "drop"
    dry_run: bool = False

    @property
    def needs_disk(self) -> bool:  # type: ignore[override]
        """Whether it is about copies on disk only, or makes such copies."""
        return self.tiers == (Tier.DISK,) or self.to == "disk"

    @property
    def changes(self) -> bool:  # type: ignore[override]
        """Whether it is no dry run."""
        return not self.dry_run

    @property
    def is_of_blocks(self) -> bool:
        """Whether it is about certain chains or copies, and not about all that requests left."""
        return bool(self.ids or self.needs_list or self.tiers) or self.to != "drop"

    @property
    def needs_list(self) -> bool:
        """Whether it is about chains that have to be listed first; see `of_listed`."""
        return bool(self.filter or self.model)

    def of_listed(self, pages: Iterable[Sequence[ChainInfo]]) -> "EvictFilter":
        """Return the same with ids in place of `filter` and `model`.

        Args:
            pages: the chains that `ls` lists with `filter`.
        """
        chains = (chain for page in pages for chain in page)
        ids = tuple(each.id for each in chains if self.model in ("", each.model))
        return replace(self, filter="", model="", ids=ids)

    @property
    def is_empty(self) -> bool:
        """Whether no criterion is given."""
        return self == EvictFilter(to=self.to, dry_run=self.dry_run)

    def concerns(self, tier: Tier) -> bool:
        """Return whether copies in this tier are evicted."""
        if self.to != "drop":
            return tier is not Tier.DISK
        return not self.tiers or tier in self.tiers

    def check(self) -> None:
        """Refuse a filter that selects nothing, or that is none."""
        from tieredkv.operate.filters import ChainFilter  # loads NumPy

        if self.is_empty:
            criteria = "`ids`, `filter`, `model`, `tiers`, `namespace_prefix`, `older_than_s`"
            raise ConfigError(f"no criterion says which blocks to evict; give {criteria} or `all`")
        if self.tiers and self.to != "drop":
            raise ConfigError("`tiers` and `to` cannot be combined")
        if self.needs_list and self.ids:
            raise ConfigError("ids cannot be combined with `filter` or `model`")
        if self.older_than_s is not None and not self.older_than_s >= 0:
            raise ConfigError(f"`older_than_s` = {self.older_than_s} must be at least 0")
        if self.namespace_prefix is not None:
            namespace_prefix(self.namespace_prefix)
        ChainFilter(self.filter)

    def matches(self, namespace: bytes, last_used: float, now: float) -> bool:
        """Return whether the age and namespace of a block match; the caller looks up the ids."""
        if self.older_than_s is not None and now - last_used < self.older_than_s:
            return False
        return self.names(namespace)

    def names(self, namespace: bytes) -> bool:
        """Return whether a namespace matches."""
        return namespace.hex().startswith((self.namespace_prefix or "").lower())


class Prune(Verb, frozen=True, kw_only=True, tag="prune"):
    """Drop blocks on disk that nothing can use; see `operate.prune`.

    Attributes:
        model: the name of the model that is in use, so that all others' blocks are dropped; "" if
            every model is.
        dry_run: count the blocks, and change nothing.
    """

    needs_disk: ClassVar[bool] = True

    model: str = ""
    dry_run: bool = False

    @property
    def changes(self) -> bool:  # type: ignore[override]
        """Whether it is no dry run."""
        return not self.dry_run


class Verify(Verb, frozen=True, kw_only=True, tag="verify"):
    """Compare every block on disk with its checksums, or look for what should be erased.

    Attributes:
        repair: whether bad blocks are dropped.
        sample: the part of the blocks that is read, chosen by chance; 1.0 for all.
        erased_key: look for what is left of this payload key, which has 16 hexadecimal digits.
        erased_namespace: look for what is left of the namespaces whose digests begin so, in hex.
    """

    needs_disk: ClassVar[bool] = True

    repair: bool = True
    sample: float = 1.0
    erased_key: str = ""
    erased_namespace: str = ""

    @property
    def is_proof(self) -> bool:
        """Whether it looks for what should be erased."""
        return bool(self.erased_key or self.erased_namespace)

    @property
    def changes(self) -> bool:  # type: ignore[override]
        """Whether it drops bad blocks."""
        return self.repair and not self.is_proof

    def check(self) -> None:
        """Refuse a part that is none, two things to look for, and what is no id of a key."""
        if not 0 < self.sample <= 1:
            raise ConfigError(f"`sample` = {self.sample} must be above 0 and at most 1")
        if self.erased_key and self.erased_namespace:
            raise ConfigError("give either `erased_key` or `erased_namespace`")
        if self.erased_namespace:
            namespace_prefix(self.erased_namespace)
        if self.erased_key and not _KEY_ID.fullmatch(self.erased_key):
            what = f"`{self.erased_key}` is no id of a key, which has 16 hexadecimal digits"
            raise ConfigError(f"{what}; `evict` prints the ids")


_KEY_ID = re.compile(r"[0-9a-fA-F]{16}")


class Rotate(Verb, frozen=True, kw_only=True, tag="rotate"):
    """Replace the master key of an encrypted store.

    Attributes:
        master_key: path of a file with the new key, which is made if it does not exist.
        command: prints the new key. Without either, a new key takes the old one's place.
    """

    needs_disk: ClassVar[bool] = True
    is_local: ClassVar[bool] = True  # it reads files and runs a command
    changes: ClassVar[bool] = True

    master_key: str | None = None
    command: str | None = None

    def check(self) -> None:
        """Refuse two places."""
        if self.master_key is not None and self.command is not None:
            raise ConfigError("give either `master_key` or `command`")


class NamesKey(Verb, frozen=True, kw_only=True, tag="names_key"):
    """The key of the names by which the store knows blocks, empty if it is not encrypted."""

    needs_disk: ClassVar[bool] = True
    is_local: ClassVar[bool] = True


_OfOperators = Df | Ls | Inspect | EvictFilter | Prune | Verify | Rotate
VERBS = {str(kind.__struct_config__.tag): kind for kind in get_args(_OfOperators)}
Call = _OfOperators | NamesKey
_decoder = msgspec.msgpack.Decoder(Call)


def encoded(call: Call) -> bytes:
    """Return a call as a message has it."""
    return msgspec.msgpack.encode(call)


def decoded(data: bytes) -> Call:
    """Undo `encoded`."""
    call: Call = _decoder.decode(data)
    return call
