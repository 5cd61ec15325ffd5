"""How a request's prompt is found in the cache and kept there: namespace, block hashes, claims."""

import sys
from array import array
from collections.abc import Mapping, Sequence

from tieredkv.cache.chain import BlockClaim, Chain
from tieredkv.cache.state_tail import tails_of
from tieredkv.clock import Clock
from tieredkv.config import Settings
from tieredkv.engine.engine_messages import EngineRequest
from tieredkv.hashing import chain_hashes, model_root, namespace_digest
from tieredkv.pieces import PIECE_BLOCKS, SCANNED_BLOCKS, Pieces, cut, whole
from tieredkv.types import BlockHash, KVSpec


def namespace_of(asked: EngineRequest, settings: Settings) -> bytes:
    """Return the digest of the namespace within which a request may share blocks."""
    return namespace_digest(
        asked.tenant if settings.isolate_by != "none" else "",
        asked.cache_salt if settings.isolate_by in ("salt", "prompt_cache_key") else None,
        asked.prompt_cache_key if settings.isolate_by == "prompt_cache_key" else None,
        algo=settings.hash_algo,
    )


def max_cached_blocks(asked: EngineRequest, block_size: int) -> int:
    """Return how many blocks of a request may be looked up and kept, from the head on."""
    # Cached blocks have no logits, which the prompt's log-probabilities need.
    most_tokens = asked.cacheable_tokens if asked.prompt_logprobs is None else 0
    return (sys.maxsize if most_tokens is None else most_tokens) // block_size


class Chains:
    """Makes the chains of one model's requests.

    Args:
        settings: how to hash, what isolates requests, and the retention policies.
        spec: how the model's keys and values lie in blocks.
        fingerprint: of the model.
        clock: the time at which pins begin.
    """

    def __init__(self, settings: Settings, spec: KVSpec, fingerprint: bytes, clock: Clock) -> None:
        self._settings, self._spec = settings, spec
        self._fingerprint, self._clock = fingerprint, clock
        self._policies = settings.retention_policies()
        self._open_namespace = namespace_digest("", algo=settings.hash_algo)
        self._make_tail = tails_of(spec, settings.hash_algo)

    def make(self, asked: EngineRequest, token_ids: Sequence[int]) -> Chain:
        """Hash a prompt's full blocks that may be cached, in the tenant's own namespace."""
        return whole(self.making(asked, token_ids))

    def making(self, asked: EngineRequest, token_ids: Sequence[int]) -> Pieces[Chain]:
        """Make a chain as `make` does, in pieces."""
        settings, size, algo = self._settings, self._spec.block_size, self._settings.hash_algo
        max_blocks = max_cached_blocks(asked, size)
        namespace = namespace_of(asked, settings)
        root = model_root(self._fingerprint, self._spec, namespace, algo=algo)
        ends = asked.read_ends
        read_ends = None if ends is None else [end // size for end in ends]
        packed = token_ids if isinstance(token_ids, array) else array("I", token_ids)
        hashes, most = list[BlockHash](), min(len(packed), max_blocks * size) // size * size
        for start in range(0, most, SCANNED_BLOCKS * size):
            tokens = packed[start : min(most, start + SCANNED_BLOCKS * size)]
            hashes += chain_hashes(hashes[-1] if hashes else root, tokens, size, algo=algo)
            yield
        told = packed[: len(hashes) * size] if self._is_announced(asked, namespace) else None
        claims = self._claims(asked)
        chain = Chain(root, namespace, hashes, claims, max_blocks, told, read_ends)
        if self._make_tail is not None:
            tail = chain.tail = self._make_tail(chain)
            # Where the prompt ends, where the next turn may begin, and where a client has said.
            tail.keep_at(len(hashes), is_end=True)
            for num_tokens in asked.anchors:
                tail.keep_at(num_tokens // size, is_end=True)
            for claim in claims[:-1]:
                tail.keep_at(claim.end)
            tail.most_end = max(0, len(packed) - 1) // size
            if asked.params.stop:
                tail.expect_stop_strings()
        return chain

    def elsewhere(
        self, chain: Chain, token_ids: Sequence[int], roots: Mapping[BlockHash, bytes]
    ) -> Pieces[dict[BlockHash, str]]:
        """Find what a prompt's first block is called below other roots, and how they differ.

        Args:
            chain: of the prompt.
            token_ids: the prompt.
            roots: each with its namespace.

        Returns:
            For each hash `other_model`, or `other_namespace` if the model is the same one.
        """
        size, algo = self._spec.block_size, self._settings.hash_algo
        found = dict[BlockHash, str]()
        for some in cut(roots.items() if len(token_ids) >= size else (), PIECE_BLOCKS):
            for root, namespace in some:
                if root != chain.root:
                    [first] = chain_hashes(root, token_ids[:size], size, algo=algo)
                    own = model_root(self._fingerprint, self._spec, namespace, algo=algo)
                    found[first] = "other_namespace" if own == root else "other_model"
            yield
        return found

    def _is_announced(self, asked: EngineRequest, namespace: bytes) -> bool:
        """Return whether KV cache events may tell of a request's blocks and their tokens."""
        settings = self._settings
        if settings.kv_events == "off" or settings.kv_events_namespaces == "all":
            return settings.kv_events == "on"
        return not asked.tenant and asked.cache_salt is None and namespace == self._open_namespace

    def _claims(self, asked: EngineRequest) -> list[BlockClaim]:
        """Cut a request where its claims end; of overlapping claims the longest counts.

        A pin's time begins now.
        """
        now, size, made = self._clock.now(), self._spec.block_size, list[BlockClaim]()
        for end in sorted({claim.end_token // size for claim in asked.claims}):
            over = [claim for claim in asked.claims if claim.end_token // size >= end]
            names = frozenset(self._policy(claim.retention) for claim in over)
            pin_s = max(claim.pin_s for claim in over)
            made.append(BlockClaim(end, names, now + pin_s if pin_s else 0.0))
        rest = self._policy(asked.retention or self._settings.default_retention)
        return [*made, BlockClaim(sys.maxsize, frozenset({rest}))]

    def _policy(self, name: str) -> str:
        """Return the name of a policy that is given by its name or an alias."""
        return self._policies.get(name, is_any=True).name
