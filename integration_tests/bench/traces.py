"""Request traces: a recorded one from a file, or a generated one with the same block-reuse statistics.

A trace is one JSON object a line with `timestamp` (milliseconds), `input_length` and `output_length` (tokens) and
`hash_ids`, one id per 512 tokens of the prompt: equal ids mean equal tokens and equal tokens before them. The Mooncake
traces (FAST'25) have this form.

The generator makes conversations that a user comes back to: all prompts begin with the same block, two in three are
new, the others go on from an earlier prompt, the end of which they replace. What it draws from are quantiles of the
first 3,000 requests of Mooncake's conversation trace; `statistics_of` compares the outcome.
"""

from __future__ import annotations

import itertools
import json
import os
import random
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

#: Tokens that one id stands for.
UNIT = 512
REQUESTS = 3000

Record = dict[str, Any]

#: Shares, and the quantiles at them from which a generated trace is drawn.
_SHARES = (0, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1)
_NEW_BLOCKS = (1, 1, 1, 3, 11, 27, 52, 82, 183, 240)
_OUTPUT = (1, 10, 25, 160, 361, 481, 606, 698, 1079, 2000)
_ADDED_BLOCKS = (0, 1, 1, 2, 2, 7, 20, 32, 59, 181)
_BACK = (5, 100, 150, 260, 440, 850, 1400, 1700, 2200, 2495)
_KEPT = (0.015, 0.12, 0.34, 0.75, 0.92, 0.97, 0.98, 0.99, 1, 1)
_CONTINUES = 0.37
#: Requests arrive in batches.
_BATCH_MS, _BATCH = 3000, 9.1


def add_options(parser: ArgumentParser) -> None:
    """`--trace` and `--requests`."""
    parser.add_argument("--trace", type=Path, default=os.environ.get("KVMEND_TRACE") or None, help="or KVMEND_TRACE")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="the first so many of the trace")


def load(path: Path | None, requests: int) -> tuple[list[Record], str]:
    """The first requests of a trace and a name for it; a generated one, with a line that says so, if there is none.

    Raises:
        SystemExit: The file is there and no trace.
    """
    if path is None or not Path(path).is_file():
        why = "no trace named (--trace FILE or KVMEND_TRACE)" if path is None else f"no file {path}"
        print(f"{why}: using a generated trace with the same block-reuse statistics", flush=True)
        return generate(requests), "generated trace"
    with Path(path).open(encoding="utf-8") as lines:
        try:
            records = [json.loads(line) for line in itertools.islice(lines, requests)]
            wanted = ("timestamp", "input_length", "output_length", "hash_ids")
            if not records or any(name not in record for record in records for name in wanted):
                raise ValueError(f"a line lacks one of {', '.join(wanted)}")
        except ValueError as error:
            raise SystemExit(f"{path} is no trace: {error}") from None
    return records, f"{Path(path).stem}, first {len(records):,} requests"


def generate(requests: int = REQUESTS, seed: int = 0) -> list[Record]:
    """A trace; the same for the same arguments."""
    chance = random.Random(seed)
    ids = itertools.count(1)
    records: list[Record] = []
    arrival = 0
    while len(records) < requests:
        for _ in range(min(max(1, round(chance.gauss(_BATCH, 3))), requests - len(records))):
            records.append({"timestamp": arrival, **_request(chance, records, ids)})
        arrival += _BATCH_MS
    return records


def _request(chance: random.Random, records: list[Record], ids: Any) -> Record:
    before = _before(chance, records) if chance.random() < _CONTINUES else []
    if before:
        kept = max(2, round(_draw(chance, _KEPT) * len(before)))
        blocks = [*before[: min(kept, len(before))], *itertools.islice(ids, round(_draw(chance, _ADDED_BLOCKS)))]
    else:
        blocks = [0, *itertools.islice(ids, round(_draw(chance, _NEW_BLOCKS)))]
    length = (len(blocks) - 1) * UNIT + chance.randint(1, UNIT)
    output = round(_draw(chance, _OUTPUT))
    return {"input_length": length, "output_length": output, "hash_ids": blocks}


def _before(chance: random.Random, records: list[Record]) -> list[int]:
    """The blocks of an earlier prompt to go on from; none if there is none long enough where it was looked for."""
    for _ in range(4):
        earlier = len(records) - round(_draw(chance, _BACK))
        if earlier >= 0 and len(records[earlier]["hash_ids"]) > 2:
            blocks: list[int] = records[earlier]["hash_ids"]
            return blocks
    return []


def _draw(chance: random.Random, quantiles: Sequence[float]) -> float:
    """A draw from a distribution that is known by its quantiles at `_SHARES`."""
    share = chance.random()
    upper = next(index for index, known in enumerate(_SHARES) if share < known)
    low, high = _SHARES[upper - 1], _SHARES[upper]
    part = (share - low) / (high - low)
    return quantiles[upper - 1] + part * (quantiles[upper] - quantiles[upper - 1])


def statistics_of(records: Sequence[Record]) -> dict[str, float]:
    """What matters for a prefix cache.

    Of the hits that a cache without limits has: their share of all blocks, the share of requests with more of them
    than the first block, their quantiles per request, and how many requests ago a block was used last. Of prompts:
    quantiles of their length in tokens, and how many blocks differ from all others.
    """
    last: dict[int, int] = {}
    depths, distances, blocks = [], [], 0
    for number, record in enumerate(records):
        ids = record["hash_ids"]
        depths.append(sum(1 for _ in itertools.takewhile(last.__contains__, ids)))
        distances += [number - last[one] for one in ids[1:] if one in last]
        last.update(dict.fromkeys(ids, number))
        blocks += len(ids)
    lengths = [record["input_length"] for record in records]
    return {
        "share of blocks that are hits": sum(depths) / blocks,
        "share of requests that hit more than the first block": sum(depth > 1 for depth in depths) / len(records),
        "hit blocks per request, 90th percentile": _quantile(depths, 0.9),
        "hit blocks per request, 99th percentile": _quantile(depths, 0.99),
        "requests since a block was used last, median": _quantile(distances, 0.5),
        "requests since a block was used last, 90th percentile": _quantile(distances, 0.9),
        "prompt tokens, median": _quantile(lengths, 0.5),
        "prompt tokens, 90th percentile": _quantile(lengths, 0.9),
        "prompt tokens, 99th percentile": _quantile(lengths, 0.99),
        "prompt tokens, mean": sum(lengths) / len(lengths),
        "different blocks per request": len(last) / len(records),
    }


def _quantile(figures: Sequence[float], share: float) -> float:
    return sorted(figures)[int(share * (len(figures) - 1))] if figures else 0.0


def tokens_of(record: Record) -> list[int]:
    """A prompt with the structure of the record: a fixed random run of 512 tokens for each id."""
    tokens: list[int] = []
    for block in record["hash_ids"]:
        tokens.extend(_run(block))
    return tokens[: record["input_length"]]


def _run(block: int) -> Any:
    return memoryview(random.Random(block).randbytes(2 * UNIT)).cast("H")


def labels_of(record: Record) -> list[int]:
    """Labels for the oracle: ids name the prompt so far, so id and offset do."""
    labels: list[int] = []
    for block in record["hash_ids"]:
        labels.extend(range(block * UNIT, block * UNIT + UNIT))
    return labels[: record["input_length"]]


def windows(width: float, until: float) -> Callable[[float], int]:
    """Numbers the windows of a clock: which one a time in seconds is in, the last one having no end."""
    count = max(1, int(until // width))
    return lambda when: min(int(when // width), count - 1)
