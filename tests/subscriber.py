"""A subscriber to KV cache events, which knows vLLM's wire format and no code of ours."""

from typing import Any

import msgspec
import zmq

Batch = tuple[bytes, int, list[Any]]
"""The topic, the number and the decoded payload."""


class Subscriber:
    """Reads batches from an address, and asks another one for those that it missed."""

    def __init__(self, endpoint: str, replay: str | None = None, topic: bytes = b"") -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.connect(endpoint)
        self._sub.setsockopt(zmq.SUBSCRIBE, topic)
        self._dealer = self._context.socket(zmq.DEALER)
        if replay is not None:
            self._dealer.connect(replay)

    def read(self, timeout_s: float = 20.0) -> Batch | None:
        """Return the next batch; None if none comes in time."""
        if not self._sub.poll(int(1000 * timeout_s)):
            return None
        topic, seq, payload = self._sub.recv_multipart()
        return topic, int.from_bytes(seq, "big"), msgspec.msgpack.decode(payload)

    def replay(self, first: int) -> list[tuple[int, list[Any]]]:
        """Return all batches that are kept from a number on."""
        self._dealer.send_multipart([b"", first.to_bytes(8, "big")])
        batches: list[tuple[int, list[Any]]] = []
        while self._dealer.poll(20_000):
            _, _, seq, payload = self._dealer.recv_multipart()
            if seq == b"\xff" * 8:
                return batches
            batches.append((int.from_bytes(seq, "big"), msgspec.msgpack.decode(payload)))
        raise AssertionError("a replay does not end")

    def close(self) -> None:
        self._context.destroy(linger=0)


class Picture:
    """What a subscriber knows.

    Attributes:
        media: the blocks of each medium.
        contents: the parent and the tokens of each block that was ever announced.
    """

    def __init__(self, block_size: int = 16) -> None:
        self.block_size = block_size
        self.media: dict[str, set[bytes]] = {"GPU": set(), "CPU": set(), "STORAGE": set()}
        self.contents: dict[bytes, tuple[bytes | None, list[int]]] = {}

    def clear(self) -> None:
        """Forget which blocks there are."""
        for blocks in self.media.values():
            blocks.clear()

    def follow(self, events: list[dict[str, Any]]) -> None:
        """Take in the events of a batch, which must be possible in their order."""
        for event in events:
            match event["type"]:
                case "AllBlocksCleared":
                    self.clear()
                case "BlockRemoved":
                    for block_hash in event["block_hashes"]:
                        self.media[event["medium"]].remove(block_hash)
                case "BlockStored":
                    parent, tokens = event["parent_block_hash"], event["token_ids"]
                    assert len(tokens) == self.block_size * len(event["block_hashes"])
                    for index, block_hash in enumerate(event["block_hashes"]):
                        own = tokens[self.block_size * index : self.block_size * (index + 1)]
                        assert block_hash not in self.media[event["medium"]]
                        assert self.contents.setdefault(block_hash, (parent, own)) == (parent, own)
                        self.media[event["medium"]].add(block_hash)
                        parent = block_hash

    def tokens_before(self, block_hash: bytes) -> list[int]:
        """Return the tokens from the start of a prompt to the end of a block."""
        parent, tokens = self.contents[block_hash]
        return [*(self.tokens_before(parent) if parent is not None else []), *tokens]
