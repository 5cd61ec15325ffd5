"""Tells an operator what the tiers have of a prompt, while nothing is held or loaded for it.

The server tokenizes the prompt. The disk is asked as for a request, and the report is made once it
has answered. Called by the engine's thread only.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from tieredkv.cache.operations import Operations
from tieredkv.engine.chains import Chains
from tieredkv.engine.engine_messages import EngineRequest, Tokenize, Tokenized
from tieredkv.engine.slices import Slices
from tieredkv.operate.calls import Inspect
from tieredkv.pieces import Pieces
from tieredkv.types import BlockHash

Tell = Callable[[dict[str, Any]], object]


class PromptInspections:
    """Makes the reports on prompts.

    Attributes:
        on_prompt: called with each prompt that the server has to tokenize; None without a server.
    """

    def __init__(self, operations: Operations, chains: Chains, slices: Slices) -> None:
        self.on_prompt: Callable[[Tokenize], object] | None = None
        self._ids = itertools.count(1)
        self._untokenized: dict[int, tuple[Mapping[BlockHash, bytes], Tell]] = {}
        self._operations, self._chains = operations, chains
        self._slices = slices

    def begin(self, call: Inspect, roots: Mapping[BlockHash, bytes], tell: Tell) -> object:
        """Have `tell` called with the report on a prompt, or with why there is none.

        Args:
            call: has the prompt.
            roots: of chains on disk, each with its namespace, in which the prompt may be found too.
            tell: called once, unless the server or the store's worker says nothing.
        """
        if self.on_prompt is None:
            return tell({})
        self._untokenized[id := next(self._ids)] = roots, tell
        return self.on_prompt(Tokenize(id, call))

    def go_on(self, tokenized: Tokenized) -> None:
        """Go on with a prompt that the server has tokenized, or could not tokenize."""
        roots, tell = self._untokenized.pop(tokenized.id)
        if tokenized.request is None:
            tell({"refused": tokenized.refused})
        else:
            self._slices.begin(self._look_up(tokenized.request, roots, tell))

    def _look_up(
        self, request: EngineRequest, roots: Mapping[BlockHash, bytes], tell: Tell
    ) -> Pieces[None]:
        """Ask the disk for the blocks of a prompt, and report once it has answered."""
        token_ids = request.prompt_token_ids
        chain = yield from self._chains.making(request, token_ids)
        all_roots = {**roots, **(yield from self._operations.roots())}
        others = yield from self._chains.elsewhere(chain, token_ids, all_roots)

        def report(on_disk: Mapping[bytes, bytes]) -> Pieces[None]:
            asked = chain, len(token_ids), others, on_disk
            tell(msgspec.to_builtins((yield from self._operations.inspect(*asked))))

        pages = [] if chain.tail is None else chain.tail.hashes
        self._operations.look_up(
            [*chain.hashes, *pages, *others], lambda found: self._slices.begin(report(found))
        )
