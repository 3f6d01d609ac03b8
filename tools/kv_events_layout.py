"""vLLM's KV events as msgspec structs, in both layouts, written from the documented fields."""

from typing import Any, Optional, Union

import msgspec

Hash = Union[int, bytes]
MAP = dict(omit_defaults=True, tag=True, tag_field="type")
ARRAY = dict(omit_defaults=True, tag=True, array_like=True)


class Batch(msgspec.Struct, array_like=True):
    """A batch: an array in either layout."""

    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: Optional[int]


class MapStored(msgspec.Struct, **{**MAP, "tag": "BlockStored"}):
    block_hashes: list[Hash]
    parent_block_hash: Optional[Hash]
    token_ids: list[int]
    block_size: int
    lora_id: Optional[int]
    medium: Optional[str]
    lora_name: Optional[str]
    extra_keys: Optional[list[Optional[list[Any]]]] = None
    group_idx: Optional[int] = None
    kv_cache_spec_kind: Optional[str] = None
    kv_cache_spec_sliding_window: Optional[int] = None


class MapRemoved(msgspec.Struct, **{**MAP, "tag": "BlockRemoved"}):
    block_hashes: list[Hash]
    medium: Optional[str]
    group_idx: Optional[int] = None


class MapCleared(msgspec.Struct, **{**MAP, "tag": "AllBlocksCleared"}):
    pass


class ArrayStored(msgspec.Struct, **{**ARRAY, "tag": "BlockStored"}):
    block_hashes: list[Hash]
    parent_block_hash: Optional[Hash]
    token_ids: list[int]
    block_size: int
    lora_id: Optional[int]
    medium: Optional[str]
    lora_name: Optional[str]
    extra_keys: Optional[list[Optional[list[Any]]]] = None
    group_idx: Optional[int] = None
    kv_cache_spec_kind: Optional[str] = None
    kv_cache_spec_sliding_window: Optional[int] = None


class ArrayRemoved(msgspec.Struct, **{**ARRAY, "tag": "BlockRemoved"}):
    block_hashes: list[Hash]
    medium: Optional[str]
    group_idx: Optional[int] = None


class ArrayCleared(msgspec.Struct, **{**ARRAY, "tag": "AllBlocksCleared"}):
    pass


CLASSES = {
    "map": {"BlockStored": MapStored, "BlockRemoved": MapRemoved, "AllBlocksCleared": MapCleared},
    "array": {"BlockStored": ArrayStored, "BlockRemoved": ArrayRemoved, "AllBlocksCleared": ArrayCleared},
}
EVENT = {layout: Union[tuple(classes.values())] for layout, classes in CLASSES.items()}


def decode(payload, layout):
    """Time, events and engine of a batch. Fails if a field is missing or has another type."""
    batch = msgspec.msgpack.decode(payload, type=Batch)
    return batch.ts, [msgspec.msgpack.decode(event, type=EVENT[layout]) for event in batch.events], batch.data_parallel_rank
