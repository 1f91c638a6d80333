"""Masks of nodes: from lists of nodes, drawn at random, and checked."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow

from sar.common_tuples import SPLIT
from sar.data.arrays import Array
from sar.errors import ConfigError, PartitionError
from sar.partition.graph_source import CHUNK_ROWS, Column, GraphSource, first_outside
from sar.partition.ingest.features import LABEL, ColumnView, without_nan
from sar.partition.ingest.sources import InputFiles
from sar.partition.ingest.tables import as_bytes, read_ids
from sar.tensors.id_arrays import pieces


def check_splits(graph: GraphSource) -> GraphSource:
    """Check masks and node labels in one pass, and return the graph with masks of one column.

    Raises `PartitionError` if a mask has several columns or values other than True and False, or 1 and 0, or a node
    label is NaN.
    """

    def checked(kind: str, fields: Mapping[str, Column]) -> dict[str, Column]:
        masks = {name: _mask(kind, name, fields[name]) for name in SPLIT if name in fields}
        return {**fields, **masks}

    node_data = {ntype: checked(ntype, fields) for ntype, fields in graph.node_data.items()}
    edge_data = {etype: checked(":".join(etype), fields) for etype, fields in graph.edge_data.items()}
    for ntype, fields in node_data.items():
        if LABEL in fields:
            label = without_nan(fields[LABEL], LABEL, f"'{ntype}/{LABEL}'", allow_nan=False)
            for rows in pieces(label.shape[0], CHUNK_ROWS) if label.dtype.kind == "f" else ():
                label[rows]
    return replace(graph, node_data=node_data, edge_data=edge_data)


def _mask(kind: str, name: str, column: Column) -> Column:
    """A mask of one column, (N,), checked in a pass; errors are those of `check_splits`."""
    if column.shape[1:] == (1,):
        column = ColumnView(column, column.shape[:1], lambda rows, _: np.ascontiguousarray(rows[:, 0]))
    if len(column.shape) != 1 or column.dtype.kind not in "biuf":
        raise PartitionError(
            f"'{kind}/{name}' holds {column.dtype} {column.shape}; expected a mask (N,): of several splits, mask[:, 0]."
        )
    for rows in pieces(column.shape[0], CHUNK_ROWS) if column.dtype.kind != "b" else ():
        values = column[rows]
        if (wrong := (values != 0) & (values != 1)).any():
            row, split = int(np.argmax(wrong)), name.removesuffix("_mask")
            raise PartitionError(
                f"'{kind}/{name}' has {values[row]} in row {rows.start + row} (from 0); expected a mask of True and "
                f"False, or 1 and 0. A list of the IDs of nodes is named with --{split}-nodes FILE."
            )
    return column


def with_masks(
    graph: GraphSource, lists: Iterable[tuple[str, Any]], mask_of: Callable[[str, Any, str], Array]
) -> GraphSource:
    """Add node masks to a graph; `lists` maps each name to a list of nodes, or to lists by node type.

    `mask_of` creates a mask, (N,) bool, from its name, a list and its node type. Raises `ConfigError` if lists must be
    by type, or the graph already has such a mask.
    """
    node_data = {ntype: dict(fields) for ntype, fields in graph.node_data.items()}
    for mask, nodes in lists:
        by_type = nodes if isinstance(nodes, Mapping) else dict.fromkeys(graph.num_nodes, nodes)
        if not by_type.keys() <= graph.num_nodes.keys() or (by_type is not nodes and len(by_type) > 1):
            raise ConfigError(f"the nodes of {mask} must be by type; expected some of {', '.join(graph.num_nodes)}.")
        for ntype, of_type in by_type.items():
            if mask in node_data.setdefault(ntype, {}):
                raise ConfigError(f"'{ntype}' already has {mask}; omit it or the list of nodes.")
            node_data[ntype][mask] = mask_of(mask, of_type, ntype)
    return replace(graph, node_data=node_data)


def mask_of_files(mask: str, source: InputFiles, num_nodes: int, given: Column | None) -> Array:
    """Create a mask, (N,) bool, from a list of nodes in files.

    `given` holds the IDs of nodes in the input; None: 0 to N - 1. `PartitionError` if the list is empty, or an ID is
    unknown or repeated.
    """
    found, count = [pyarrow.array([], pyarrow.string())], 0
    for column in read_ids(source):
        found.append(column.cast(pyarrow.string()))
        count += len(column)
        if count > 2 * num_nodes:  # not a list of nodes, and possibly endless
            raise PartitionError(
                f"{source.shown} has more than {count} rows for {num_nodes} nodes; expected each node once."
            )
    ids = pyarrow.concat_arrays(found)
    if not count:
        raise PartitionError(f"{source.shown} has no node for {mask}; expected IDs of nodes, or leave it out.")
    if given is not None and given.dtype.kind != "i":
        wanted = as_bytes(ids)
    else:
        try:
            wanted = ids.cast(pyarrow.int64()).to_numpy()
        except pyarrow.ArrowInvalid as error:
            raise PartitionError(
                f"{source.shown} has values that are not integers ({error}); expected IDs of nodes."
            ) from error
    if twice := [one["values"].as_py() for one in ids.value_counts() if one["counts"].as_py() > 1][:1]:
        raise PartitionError(
            f"{source.shown} has the node {twice[0]!r} more than once; expected a list of the IDs of nodes, each once. "
            "A mask is a node feature: --node-feature train_mask=FILE."
        )
    chosen = np.zeros(num_nodes, np.bool_)
    if given is None:
        unknown = first_outside(wanted, num_nodes)
        if unknown is None:
            chosen[wanted] = True
    else:
        known = np.zeros(len(wanted), np.bool_)
        for rows in pieces(num_nodes, CHUNK_ROWS):
            some = given[rows]
            some = some if some.ndim == 1 else some.view(f"S{some.shape[1]}")[:, 0]
            chosen[rows] = np.isin(some, wanted)
            known |= np.isin(wanted, some)
        unknown = None if known.all() else int(np.argmin(known))
    if unknown is not None:
        raise PartitionError(f"{source.shown} has the ID {ids[unknown].as_py()!r}, which no node has.")
    return chosen


def with_split(graph: GraphSource, shares: Sequence[float] = (0.6, 0.2, 0.2), seed: int = 0) -> GraphSource:
    """Add masks that split the labelled nodes of every type at random, in fractions with a sum of at most 1.

    A node is labelled if its `label` is a non-negative number, or several numbers. Without labels, a graph with one
    node type splits all nodes. `ConfigError` for invalid fractions, existing masks, or several node types without
    labels.
    """
    if len(shares) != len(SPLIT) or not min(shares) >= 0 or not 0 < sum(shares) < 1 + 1e-6:
        raise ConfigError(
            f"the split is {', '.join(map(str, shares))}; expected three shares of the nodes, to train, validate and "
            "test on, with a sum of at most 1, such as 0.6,0.2,0.2."
        )
    labelled = [ntype for ntype in graph.num_nodes if LABEL in graph.node_data.get(ntype, {})]
    if not labelled and len(graph.num_nodes) > 1:
        raise ConfigError(f"no node type among {', '.join(graph.num_nodes)} has a label, so there is nothing to split.")
    node_data = dict(graph.node_data)
    for ntype in labelled or graph.num_nodes:
        fields: Mapping[str, Column] = node_data.get(ntype, {})
        there = [name for name in SPLIT if name in fields]
        if there:
            raise ConfigError(f"'{ntype}' already has {', '.join(there)}; omit these or the split.")
        has_numbers = LABEL in fields and fields[LABEL].shape[1:] in ((), (1,))
        chosen = np.ones(graph.num_nodes[ntype], np.bool_)
        if has_numbers:
            chosen = fields[LABEL][:].reshape(-1) >= 0
        nodes = np.random.default_rng(seed).permutation(np.flatnonzero(chosen))
        ends = [int(end * len(nodes) + 1e-6) for end in np.cumsum(shares)]
        masks = {name: np.zeros(len(chosen), np.bool_) for name in SPLIT}
        for mask, part in zip(masks.values(), np.split(nodes, ends), strict=False):
            mask[part] = True
        node_data[ntype] = {**fields, **masks}
    return replace(graph, node_data=node_data)
