#!/usr/bin/env python3
"""Writes pegainfer-server/tests/fixtures/kv-events.json: batches of KV events, encoded by msgspec.

    python3 -m venv /tmp/events && /tmp/events/bin/pip install msgspec
    /tmp/events/bin/python tools/kv-events-fixtures.py
"""

import json
from pathlib import Path

import msgspec
from kv_events_layout import CLASSES, decode

FIXTURES = Path(__file__).resolve().parent.parent / "pegainfer-server/tests/fixtures/kv-events.json"
# Hashes of two images.
PHOTO, CHART = "00ff" * 16, "7f80abcd" * 8
CLEARED = {"type": "AllBlocksCleared"}


def stored(hashes, parent, tokens, medium="GPU", lora_name=None, extra_keys=None):
    event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens,
            "block_size": len(tokens) // len(hashes), "lora_id": None, "medium": medium, "lora_name": lora_name}
    return event if extra_keys is None else {**event, "extra_keys": extra_keys}


def removed(hashes, medium="GPU"):
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}


# Numbers of each size that MessagePack has, and lists of more than 15 and 255 elements.
CASES = [
    (1750000000.25, 0, [CLEARED]),
    (0.0, 1, [stored([1], None, list(range(16)))]),
    (1.5, 300, [stored([2**64 - 1, 2**63, 2**32, 70000, 200, 127], 128, [0, 127, 128, 255, 256, 65535, 65536, 151935, 2**32 - 1, 3, 4, 5])]),
    (2.0, 0, [stored([7, 8], 6, [1, 2, 3, 4], "CPU", "sql"), stored([9], 8, [5, 6], "STORAGE", "a longer name of an adapter: ä")]),
    (3.0, 0, [removed([1, 2**40]), removed([3], "CPU"), removed([4], "STORAGE"), CLEARED]),
    (4.0, 0, [stored(list(range(1, 21)), None, [i % 200 for i in range(320)])]),
    (5.0, 65535, [removed([1000 + i for i in range(40)])]),
    (6.0, 0, [stored([1, 2, 3, 4], None, [7, 9, 9, 9, 9, 9, 9, 8], "GPU", None, [[[PHOTO, 1]], [[PHOTO, -1]], [[PHOTO, -3], [CHART, 1]], [[CHART, -1]]]),
              stored([5, 6], 4, [1, 2, 3, 9], "GPU", "sql", [None, [[PHOTO, 1]]])]),
    (7.0, 1, [stored(list(range(1, 301)), None, [9] * 300, "GPU", None, [[[CHART, -i]] for i in range(300)])]),
]


def encode(time, events, rank, layout):
    if layout == "map":
        events = [CLASSES["map"][event["type"]](**{k: v for k, v in event.items() if k != "type"}) for event in events]
    else:
        # Without the optional fields, which older publishers do not have either. msgspec's own encoder writes them as nulls.
        events = [list(event.values()) for event in events]
    return msgspec.msgpack.encode((time, events, rank)).hex()


def main():
    fixtures = [{"time": time, "rank": rank, "events": events, **{layout: encode(time, events, rank, layout) for layout in CLASSES}}
                for time, rank, events in CASES]
    for fixture in fixtures:
        for layout in CLASSES:
            time, events, rank = decode(bytes.fromhex(fixture[layout]), layout)
            assert (time, len(events), rank) == (fixture["time"], len(fixture["events"]), fixture["rank"])
    FIXTURES.write_text("[\n" + ",\n".join(json.dumps(fixture, ensure_ascii=False) for fixture in fixtures) + "\n]\n")


if __name__ == "__main__":
    main()
