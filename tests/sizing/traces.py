"""Small traces of Mooncake's format, as tests need them."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def line(at_s: float, ids: list[int], *, last: int = 512) -> Line:
    """Return a request whose last block has so many tokens."""
    length = 512 * (len(ids) - 1) + last if ids else 0
    return {
        "timestamp": round(1000 * at_s),
        "input_length": length,
        "output_length": 7,
        "hash_ids": ids,
    }


def write(path: Path, lines: list[Line]) -> Path:
    """Write a trace; gzipped if its name says so."""
    text = "".join(json.dumps(each) + "\n" for each in lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def random_lines(seed: int, *, sessions: int = 12, requests: int = 300) -> list[Line]:
    """Return conversations that grow and fork, each prompt with a partial block at its end."""
    generator, next_id, at_s = random.Random(seed), 0, 0.0
    chains = [list[int]() for _ in range(sessions)]
    lines = list[Line]()
    for _ in range(requests):
        at_s += generator.choice((0.0, 1.0, 3.0, 9.0))
        chain = generator.choice(chains)
        if len(chain) > 30 or generator.random() < 0.1:
            chain[:] = generator.choice(chains)[: generator.randrange(1, 5)]
        num_new = generator.randrange(1, 6)
        chain += range(next_id, next_id := next_id + num_new)
        last = generator.randrange(1, 513)
        lines.append(line(at_s, [*chain, next_id], last=last))
        next_id += 1
    return lines
