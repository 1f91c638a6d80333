"""A trained model's outputs for the nodes of a partition directory: one forward pass over the whole graph.

Like a training script, each worker loads its share of the partitions, runs the model, and arranges the rows in input
order. Workers of one process take turns ([Note: workers of one process]), so only one share is in memory at a time.
"""

from collections.abc import Mapping
from contextlib import suppress
from math import prod
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

from sar.adapters.dgl.graphs import construct_full_graph
from sar.adapters.dgl.load import load_dgl_partition_data
from sar.comm import session
from sar.comm.allocator import set_allocator
from sar.comm.collectives import all_sum
from sar.common_tuples import GIVEN_ID, NTYPE, ORIG_ID, StrPath
from sar.core.graph.graph import GraphShardManager
from sar.data.arrays import Array
from sar.data.original_order import to_original_order
from sar.data.partition_json import read_partition_json
from sar.errors import ConfigError, GraphError, PartitionError
from sar.host.durable import put_in_place
from sar.outofcore.workers import run_in_turns
from sar.partition.inspect.inspection import largest_value
from sar.train.counted_graph import LABELS, GraphInfo
from sar.train.model_call import call_model, input_features
from sar.train.plan import MakeModel

_ROW_GROUP, _GROUP_BYTES = 2**16, 2**26  # rows, and bytes of outputs, to convert at a time for Parquet


def infer(
    directory: StrPath,
    make_model: MakeModel,
    weights: StrPath,
    nodes: Array | None = None,
    *,
    out: StrPath,
    ntype: str | None = None,
    num_classes: int | None = None,
    workers: int | None = None,
    spill: StrPath | None = None,
    memory: int | None = None,
) -> None:
    """Write a trained model's outputs for the nodes of a partition directory. All processes must call this together.

    Args:
        directory: a partition directory, or its JSON file. The graph may differ from the one used in training.
        make_model: function that returns the model, as for `sar plan`. The model is called as `model(graph, x)`, where
            x is the nodes' `feat` or `x`, (N, F), by node type if there are several; or with modules of PyTorch
            Geometric as `model(x, edge_index)` (`docs/howto/infer.md`). It returns rows, or a dictionary of rows by
            node type.
        weights: a state dict, as written by `sar.save_model`.
        nodes: (S,) IDs of the nodes to write, in this order: 0 to N - 1, or the IDs that `--ids map` has stored;
            integers, or strings, also of integers. Default None: all nodes, in input order.
        out: an `.npy` file, (S, ...), or a `.parquet` file with the columns `id` and `out_0`, `out_1`, .... bfloat16 is
            written as float32. All processes must share the file.
        ntype: node type; optional if there is only one.
        num_classes: for `make_model`. Default None: one more than the greatest `label`, else `y`, or 0 without both.
        workers: workers in each process. Default None: one worker per partition.
        spill: folder on disk for the tensors of waiting workers. Default None: they stay in memory.
        memory: bytes for all processes of this machine. Default None: all available memory.

    Raises:
        ConfigError: unknown nodes or types, weights that do not fit the model, or another suffix of `out`.
        GraphError: the model does not return one row per node.
        PartitionError: the directory is damaged or has no input features, or `out` cannot be written.
    """
    group, spec, out = session.current_group(), read_partition_json(directory), Path(out)
    kind = _number_of_type(spec.node_types, ntype)
    if out.suffix not in (".npy", ".parquet"):
        raise ConfigError(f"out is '{out}'; expected the name of an .npy or a .parquet file.")
    if not Path(weights).is_file():
        raise ConfigError(f"there is no file '{weights}'; expected a state dict, as sar.save_model writes it.")
    if nodes is not None and (nodes.ndim != 1 or nodes.dtype.kind not in "iuSU"):
        raise ConfigError(f"the nodes are {nodes.dtype} {nodes.shape}; expected (S,) IDs, integers or strings.")
    if num_classes is None:
        for name in reversed(LABELS):  # the first existing name decides
            with suppress(PartitionError):  # without these labels
                num_classes = int(largest_value(spec.path, name)) + 1
    num_nodes = dict(zip(spec.node_types, np.diff(spec.node_ranges).sum((0, 2)).tolist(), strict=True))
    as_table = out.suffix == ".parquet"
    rows_file, ids_file = Path(f"{out}.rows.npy") if as_table else out, Path(f"{out}.ids.npy")

    def work(_: int) -> None:
        """Write this worker's rows."""
        data = load_dgl_partition_data(spec.path, session.rank(), "cpu")
        graph, features = construct_full_graph(data), data.node_features
        widths = {of: rows.shape[-1] for of, rows in input_features(features, graph.ntypes).items()}
        info = GraphInfo(spec.node_types, graph.canonical_etypes, num_nodes, widths, num_classes or 0)
        rows = _run(_load(make_model, info, weights), graph, features, spec.node_types[kind])
        if ORIG_ID not in features:
            raise PartitionError(f"{spec.path.parent} has no original IDs; partition the graph again.")
        places = features[ORIG_ID][features[NTYPE] == kind] if NTYPE in features else features[ORIG_ID]
        ids = features.get(f"{spec.node_types[kind]}/{GIVEN_ID}", places)
        if nodes is not None:
            places, own = _find(nodes, ids)
            rows = rows[own]
        elif as_table:
            to_original_order(ids, places, out=ids_file)
        to_original_order(rows, places, out=rows_file)

    try:
        size = workers or -(-spec.num_parts // group.world_size)
        if size == 1:
            work(0)
        else:
            if spill is not None:
                set_allocator(spilled=True)
            threads = run_in_turns(size, work, None if spill is None else Path(spill), memory)
            if (failure := threads.first_failure()) is not None:
                raise failure[1]
        with group.guard():
            group.agree("all outputs are written")  # so no other process still opens the files
            if as_table and group.rank == 0:
                ids = np.load(ids_file, mmap_mode="r") if nodes is None else nodes
                _write_table(np.load(rows_file, mmap_mode="r"), ids, out)
    finally:
        for file in (rows_file, ids_file) if as_table and group.rank == 0 else ():
            file.unlink(missing_ok=True)


def _number_of_type(ntypes: list[str], ntype: str | None) -> int:
    if ntype is None and len(ntypes) == 1:
        return 0
    if ntype not in ntypes:
        named = "no node type is named" if ntype is None else f"there is no node type {ntype!r}"
        raise ConfigError(f"{named}; expected one of {', '.join(ntypes)}: ntype, or --ntype.")
    return ntypes.index(ntype)


def _load(make_model: MakeModel, info: GraphInfo, weights: StrPath) -> nn.Module:
    model = make_model(info)
    try:
        state = torch.load(weights, map_location="cpu", weights_only=True)
        dtypes = (x.dtype for x in state.values() if x.is_floating_point())
        model.to(next(dtypes, None)).eval().load_state_dict(state, assign=True)  # each tensor keeps its own dtype
    except Exception as error:  # torch.load raises many exceptions for invalid files
        raise ConfigError(
            f"'{weights}' cannot be loaded into the model: {error}. Expected a state dict of the same model, as "
            "sar.save_model writes it, not a checkpoint; without labels also num_classes (--classes)."
        ) from error
    return model


def _run(model: nn.Module, graph: GraphShardManager, features: Mapping[str, Tensor], ntype: str) -> Tensor:
    """Compute the outputs of this worker's nodes of a type. A collective call."""
    with torch.no_grad():
        rows = call_model(model, graph, features)
    session.current_group().check_model(model, "infer")  # rejects norms over the rows of one worker
    rows = rows.get(ntype) if isinstance(rows, Mapping) else rows
    if not isinstance(rows, Tensor) or rows.shape[:1] != (graph.num_nodes(ntype),):
        raise GraphError(
            f"The model returns {getattr(rows, 'shape', type(rows))}; expected {graph.num_nodes(ntype)} rows, one for "
            f"each node of type {ntype!r} here."
        )
    return rows.float() if rows.dtype == torch.bfloat16 else rows


def _find(nodes: Array, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of this worker's nodes in the list, and their rows. A collective call."""
    known, wanted = _as_ids(ids.numpy()), np.char.encode(nodes, "utf-8") if nodes.dtype.kind == "U" else nodes
    if wanted.dtype.kind == "S" and known.dtype.kind != "S":
        with suppress(ValueError):
            wanted = wanted.astype(np.int64)  # text files yield strings
    if (wanted.dtype.kind == "S") != (known.dtype.kind == "S"):
        raise ConfigError(f"the nodes are {wanted.dtype} {wanted.shape}; expected IDs like those there, {known.dtype}.")
    order = np.argsort(known)
    row = order[np.searchsorted(known, wanted, sorter=order).clip(max=len(known) - 1)] if len(known) else wanted[:0]
    places = np.flatnonzero(known[row] == wanted) if len(known) else np.empty(0, np.int64)
    found = all_sum(torch.zeros(len(wanted), dtype=torch.int32).index_fill_(0, torch.from_numpy(places), 1))
    if missing := (found == 0).nonzero().flatten().tolist():
        one = wanted[missing[0]]
        shown = one.decode() if isinstance(one, bytes) else one
        raise ConfigError(f"{len(missing)} of the nodes, such as {shown}, are not there; expected IDs of the input.")
    return torch.from_numpy(places), torch.from_numpy(row[places].astype(np.int64))


def _as_ids(ids: Array) -> Array:
    """Convert stored IDs to integers or UTF-8 strings, (n,)."""
    return np.ascontiguousarray(ids).view(f"S{ids.shape[1]}")[:, 0] if ids.ndim == 2 else ids


def _write_table(rows: Array, ids: Array, out: Path) -> None:
    draft, width = Path(f"{out}.unfinished"), prod(rows.shape[1:])
    step = min(_ROW_GROUP, max(1, _GROUP_BYTES // max(1, width * rows.dtype.itemsize)))

    def table(start: int) -> pyarrow.Table:
        some = slice(start, start + step)
        own = pyarrow.array(_as_ids(ids[some]))
        own = own.cast(pyarrow.string()) if pyarrow.types.is_binary(own.type) else own
        values = rows[some].reshape(len(own), width)
        return pyarrow.table({"id": own, **{f"out_{i}": values[:, i] for i in range(width)}})

    try:
        with pq.ParquetWriter(draft, table(0).schema, use_dictionary=False) as writer:  # values rarely repeat
            for start in range(0, len(rows), step):
                writer.write_table(table(start))
        put_in_place(draft, out)
    except OSError as error:
        raise PartitionError(f"'{out}' cannot be written ({error}); make room there, or name another place.") from error
    finally:
        draft.unlink(missing_ok=True)
