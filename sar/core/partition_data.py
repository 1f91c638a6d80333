"""From `PartitionData` as it is handed in to one relation's edges in the visible order; checks it on the way.

The visible edge order of a relation: source partition ascending, then destination, then edge ID.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sar.comm.group import Group
from sar.common_tuples import EID, ETYPE, NTYPE, PartitionData, ShardEdgesAndFeatures
from sar.errors import PartitionError
from sar.id_slices import is_sorted


class Shard(NamedTuple):
    """The edges of one relation from one partition, in visible order: global node IDs, and features by bare name."""

    src: Tensor  # (E_shard,) int64
    dst: Tensor  # (E_shard,) int64
    features: dict[str, Tensor]  # (E_shard, ...) each


def own_part(group: Group) -> int:
    """The partition that this worker owns."""
    return part_of(group.rank)


def part_of(rank: int) -> int:
    """The partition that a worker owns: worker r owns partition r. Nothing else takes a rank for a partition."""
    return rank


def check_partition(data: PartitionData, part: int, world_size: int) -> None:
    """Raise `PartitionError` where the data of this worker contradicts itself or the number of workers."""
    if not isinstance(data, PartitionData):
        raise PartitionError(
            f"The data of a partition is a {type(data).__name__}; expected what load_dgl_partition_data returns."
        )
    if len(data.node_ranges) != world_size or len(data.all_shard_edges) != world_size:
        raise PartitionError(
            f"The data has {len(data.node_ranges)} node ranges and {len(data.all_shard_edges)} shards for {world_size} "
            "workers; expected one each per worker. Start as many workers as there are partitions."
        )
    start, end = data.node_ranges[part]
    if NTYPE not in data.node_features and len(data.node_type_names) > 1:
        raise PartitionError(
            f"The graph has {len(data.node_type_names)} node types, but node_features lacks {NTYPE!r}."
        )
    kinds = data.node_features.get(NTYPE)
    if kinds is not None and len(kinds) != end - start:
        raise PartitionError(
            f"node_features[{NTYPE!r}] has {len(kinds)} rows for {end - start} nodes of partition {part}."
        )
    for p, shard in enumerate(data.all_shard_edges):
        src, dst = shard.edges
        if src.shape != dst.shape or src.dim() != 1:
            raise PartitionError(
                f"The shard from partition {p} has sources {tuple(src.shape)}, destinations {dst.shape}."
            )
        if ETYPE not in shard.edge_features and len(data.edge_type_names) > 1 and len(src):
            raise PartitionError(f"The graph has several edge types, but the shard from {p} lacks {ETYPE!r}.")
        _check_range(src, data.node_ranges[p], f"sources of the shard from partition {p}")
        _check_range(dst, (start, end), f"destinations of the shard from partition {p} into partition {part}")


def select_relation(shard: ShardEdgesAndFeatures, number: int, data: PartitionData) -> Shard:
    """The edges of edge type `number` in visible order; the shard's own tensors where there is nothing to select."""
    src, dst = shard.edges
    features = dict(shard.edge_features)
    rows, several = None, len(data.edge_type_names) > 1
    kinds = features.pop(ETYPE, None) if several else None  # with one type, the field is the user's
    if kinds is not None:
        rows = (kinds == number).nonzero().squeeze(1)
        src, dst = src[rows], dst[rows]
    prefix = ":".join(data.edge_type_names[number]) + "/"
    selected = {}
    for key, value in features.items():
        if key.startswith(prefix):
            selected[key.removeprefix(prefix)] = _checked_rows(key, value, len(src))
        elif "/" not in key or not several:
            value = _checked_rows(key, value, len(shard.edges[0]))
            selected[key] = value if rows is None else value[rows]
    return _in_visible_order(Shard(src, dst, selected))


def with_edge_ids(shards: list[Shard], first_id: int) -> list[Shard]:
    """The shards of a relation with edge IDs, which count from `first_id` where there are none."""
    if any(EID in shard.features for shard in shards):
        return shards
    numbered = []
    for src, dst, features in shards:
        ids = torch.arange(first_id, first_id + len(src), device=src.device)
        numbered.append(Shard(src, dst, {**features, EID: ids}))
        first_id += len(src)
    return numbered


def join_features(shards: list[Shard]) -> dict[str, Tensor]:
    """Edge features of a relation in the visible edge order."""
    names = dict.fromkeys(name for shard in shards for name in shard.features)
    joined = {}
    for name in names:
        pieces = []
        for p, shard in enumerate(shards):
            if name in shard.features:
                pieces.append(shard.features[name])
            elif len(shard.src):
                raise PartitionError(f"Edge feature {name!r} is missing on the shard from partition {p}.")
        joined[name] = _concatenated(name, pieces)
    return joined


def check_edge_ids(relations: list[list[Shard]], group: Group) -> None:
    """Check, together with all workers, that their edge IDs fit together: the last step of the construction.

    IDs as partitioners give them run on from one worker to the next. Where every worker has such a run, they must join,
    in any order; IDs of another kind are taken as they are.

    Raises:
        PartitionError: where the runs do not join, because the workers hold parts of different graphs.
    """
    ids = [s.features[EID] for shards in relations for s in shards if EID in s.features and len(s.src)]
    first, last = min((int(i.min()) for i in ids), default=0), max((int(i.max()) for i in ids), default=-1)
    count = sum(len(i) for i in ids)
    runs = torch.stack(group.all_gather(torch.tensor([first, last, count]), "checking edge IDs")).tolist()
    if any(last - first + 1 != count for first, last, count in runs):
        return
    expected = 0
    for (first, last, count), rank in sorted((run, rank) for rank, run in enumerate(runs)):
        if count and first != expected:
            raise PartitionError(
                f"The edges of worker {rank} have the IDs {first} to {last}; expected them to begin at {expected}, "
                "after those before. The workers hold parts of different graphs: load one partitioning."
            )
        expected += count


def _concatenated(name: str, pieces: list[Tensor]) -> Tensor:
    """The pieces one after the other; without a copy where they already lie so in memory, as the readers leave them."""
    if len({(piece.dtype, piece.shape[1:]) for piece in pieces}) > 1:
        raise PartitionError(f"Edge feature {name!r} has different dtypes or widths on different shards.")
    pieces = [piece for piece in pieces if len(piece)] or pieces[:1]  # empty ones have no address
    whole, end = pieces[0], pieces[0].data_ptr() + pieces[0].nbytes
    adjacent = all(piece.is_contiguous() for piece in pieces)
    for piece in pieces[1:]:
        adjacent = adjacent and piece.data_ptr() == end and _storage(piece) == _storage(whole)
        end += piece.nbytes
    if not adjacent:
        return torch.cat(pieces)
    rows = sum(len(piece) for piece in pieces)
    return whole.as_strided((rows, *whole.shape[1:]), whole.stride())


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _in_visible_order(shard: Shard) -> Shard:
    """Sort by destination, then edge ID (then as given), unless it is so already."""
    ids = shard.features.get(EID)
    if is_sorted(shard.dst, ids):
        return shard
    order = (
        torch.argsort(ids, stable=True) if ids is not None else torch.arange(len(shard.dst), device=shard.dst.device)
    )
    order = order[torch.argsort(shard.dst[order], stable=True)]
    return Shard(shard.src[order], shard.dst[order], {k: v[order] for k, v in shard.features.items()})


def _check_range(nodes: Tensor, node_range: tuple[int, int], what: str) -> None:
    start, end = node_range
    if len(nodes) and not (int(nodes.min()) >= start and int(nodes.max()) < end):
        raise PartitionError(
            f"The {what} reach from {int(nodes.min())} to {int(nodes.max())}; expected IDs in [{start}, {end}). "
            "Has this worker loaded another worker's partition?"
        )


def _checked_rows(key: str, value: Tensor, rows: int) -> Tensor:
    if value.dim() == 0 or len(value) != rows:
        raise PartitionError(f"Edge feature {key!r} has shape {tuple(value.shape)}; expected {rows} rows, one an edge.")
    return value
