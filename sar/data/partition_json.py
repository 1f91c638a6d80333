"""Reads, checks, normalises and writes the JSON file that describes a partition directory.

`dgl.distributed.partition_graph` of DGL 1.x and 2.x writes it as `<graph name>.json`, DGL's dispatch pipeline as
`metadata.json`. sar writes the former. DGL's writer requires nodes and edges of every type in every part, which small
types may not have, so sar has its own.
"""

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from sar.common_tuples import CanonicalEtype, StrPath
from sar.data.arrays import open_file
from sar.errors import PartitionError

DISPATCH_JSON: Final = "metadata.json"
"""The name of the file in DGL's dispatch pipeline."""
GRAPH: Final = "graph.dgl"
NODE_FEATURES: Final = "node_feat.dgl"
EDGE_FEATURES: Final = "edge_feat.dgl"
ORIGINAL_NODES: Final = "orig_nids.dgl"
ORIGINAL_EDGES: Final = "orig_eids.dgl"
"""The files of a part that sar writes. The last two contain the original IDs of each part, as in DGL's dispatch
pipeline; the JSON file does not name them."""
PART_FILES: Final = {"node_feats": NODE_FEATURES, "edge_feats": EDGE_FEATURES, "part_graph": GRAPH}
"""By their keys in the JSON file."""
ORIG_ID_FILES: Final = {"nodes": ORIGINAL_NODES, "edges": ORIGINAL_EDGES}

REWRITE: Final = "Write the directory again with dgl.distributed.partition_graph."
_OLD = (
    "it was written by DGL 0.5 to 0.9, whose directories sar does not read. Write it again with "
    "dgl.distributed.partition_graph of DGL 1.x or 2.x, or with sar.partition_graph."
)
_REWRITE_WITH_HALO = (
    "The directory was written without halo (halo_hops is 0), which drops the edges between partitions: write it again "
    "with num_hops=1."
)
_EXPECTED = (
    "expected the JSON file that `sar partition`, sar.partition_graph or dgl.distributed.partition_graph writes beside "
    "the folders part0, part1, ... Check the path, or divide the graph first."
)

COUNTS: Final = "edges", "rows"
"""Keys of the counts in the JSON file."""

What = Literal["nodes", "edges"]
IdRanges = npt.NDArray[np.int64]
"""[start, end) of global IDs by partition and type, (num_parts, num_types, 2)."""


def part_folder(directory: Path, part: int) -> Path:
    """The folder of a partition's files that sar writes."""
    return directory / f"part{part}"


@dataclass(frozen=True)
class PartitionJson:
    """The content of the JSON file.

    files: by partition, the named files under `part_graph`, `node_feats` and `edge_feats`, and the files of original
        IDs under `nodes` and `edges`, which may not exist.
    bool_fields: names of bool features, which files store as uint8. sar adds them to the JSON file; DGL ignores them.
    counts: edges of each type into each partition from each partition, and the number of their distinct sources,
        (2, R, P, P). sar adds them for `sar plan`, to avoid reading the graphs; None if the file has none.
    """

    path: Path  # of the JSON file
    name: str  # name of the graph; empty if unknown
    method: str  # partition method; empty if unknown
    halo_hops: Any  # hops of the halo; None if unknown
    node_types: list[str]  # by type ID
    edge_types: list[CanonicalEtype]  # by type ID
    node_ranges: IdRanges  # contiguous, partition-major, then by type
    edge_ranges: IdRanges  # in the same order
    files: list[dict[str, Path]]
    bool_fields: Collection[str]
    counts: npt.NDArray[np.int64] | None
    digest: str = ""  # of the content without counts, independent of its order
    edge_fix: str = REWRITE  # how to repair a directory whose edges do not add up

    @property
    def num_parts(self) -> int:
        return len(self.node_ranges)

    @property
    def partition_ranges(self) -> list[tuple[int, int]]:
        """The range of global node IDs of every partition."""
        return [(int(types[0, 0]), int(types[-1, 1])) for types in self.node_ranges]

    @property
    def edge_type_names(self) -> list[str]:
        """The names in the file, `source:relation:destination`."""
        return [":".join(etype) for etype in self.edge_types]

    def types(self, what: What) -> tuple[list[str], IdRanges]:
        """The types of nodes, or of edges, and the ranges of their IDs."""
        return (self.node_types, self.node_ranges) if what == "nodes" else (self.edge_type_names, self.edge_ranges)

    def write(self) -> None:
        """Write the file under the name of the graph, with the files that sar writes as `files`."""
        content = {
            "graph_name": self.name,
            "num_nodes": int(self.node_ranges[-1, -1, 1]),
            "num_edges": int(self.edge_ranges[-1, -1, 1]),
            "part_method": self.method,
            "num_parts": self.num_parts,
            "halo_hops": self.halo_hops,
            "node_map": {name: self.node_ranges[:, i].tolist() for i, name in enumerate(self.node_types)},
            "edge_map": {name: self.edge_ranges[:, i].tolist() for i, name in enumerate(self.edge_type_names)},
            "ntypes": {name: i for i, name in enumerate(self.node_types)},
            "etypes": {name: i for i, name in enumerate(self.edge_type_names)},
            "bool_fields": list(self.bool_fields),
        }
        folder = self.path.parent
        for part, files in enumerate(self.files):
            content[f"part-{part}"] = {kind: files[kind].relative_to(folder).as_posix() for kind in PART_FILES}
        text = json.dumps(content, indent=1)
        if self.counts is not None:  # a line for each table
            lines = [f'  "{key}": {x.tolist()}' for key, x in zip(COUNTS, self.counts, strict=True)]
            text = text.removesuffix("\n}") + ',\n "counts": {\n' + ",\n".join(lines) + "\n }\n}"
        self.path.write_text(text)


def read_partition_json(partition_json_file: StrPath) -> PartitionJson:
    """Read and check the JSON file of a partition directory, from the path of either.

    `PartitionError` if the file is missing, not JSON, incomplete, inconsistent, from DGL before 1.0, or names a file
    outside its directory, also through a link.
    """
    path = Path(partition_json_file)
    if path.is_dir():
        found = [file for file in sorted(path.glob("*.json")) if _names_parts(file)]
        if len(found) != 1:
            names = ", ".join(file.name for file in found) or "none"
            raise PartitionError(
                f"{path} has {len(found)} JSON files of partitions ({names}); expected one. Name the file."
            )
        [path] = found
    content = _parse(path)
    keys = content if isinstance(content, dict) else {}
    if missing := [key for key in ("num_parts", "node_map", "edge_map") if key not in keys]:
        raise PartitionError(
            f"{path} has no {', '.join(missing)}; expected the JSON file of a partition directory, which names them. "
            "Check the path."
        )
    num_parts = content["num_parts"]
    if type(num_parts) is not int or num_parts < 1:
        raise PartitionError(f"{path}: num_parts is {num_parts!r}; expected a positive integer. {REWRITE}")
    edge_fix = _REWRITE_WITH_HALO if content.get("halo_hops") == 0 and num_parts > 1 else REWRITE
    node_types, edge_names = _type_names(path, "ntypes", content), _type_names(path, "etypes", content)
    edge_types = [etype for name in edge_names if (etype := parse_edge_type(name)) is not None]
    if len(edge_types) < len(edge_names):
        raise PartitionError(f"{path}: etypes is {edge_names}, without the types of their nodes: {_OLD}")
    ends = {end for src, _, dst in edge_types for end in (src, dst)}
    if len(set(edge_types)) < len(edge_types) or not ends <= {*node_types}:
        raise PartitionError(
            f"{path}: the edge types are {edge_types}; expected each once, between the node types {node_types}. "
            f"{REWRITE}"
        )
    node_ranges = _id_ranges(path, "node_map", content["node_map"], node_types, num_parts, REWRITE)
    edge_ranges = _id_ranges(path, "edge_map", content["edge_map"], edge_names, num_parts, edge_fix)
    for key, ranges, fix in (("nodes", node_ranges, REWRITE), ("edges", edge_ranges, edge_fix)):
        covered = int(ranges[-1, -1, 1])
        if content.get(f"num_{key}", covered) != covered:
            raise PartitionError(
                f"{path}: num_{key} is {content[f'num_{key}']}, but the ID ranges cover {covered} {key}. {fix}"
            )
    bool_fields = content.get("bool_fields", [])
    if not isinstance(bool_fields, list) or not all(isinstance(name, str) for name in bool_fields):
        raise PartitionError(f"{path}: bool_fields is {bool_fields!r}; expected a list of names. {REWRITE}")
    counts = content.pop("counts", None)
    return PartitionJson(
        path=path,
        name=str(content.get("graph_name", "")),
        method=str(content.get("part_method", "")),
        halo_hops=content.get("halo_hops"),
        node_types=node_types,
        edge_types=edge_types,
        node_ranges=node_ranges,
        edge_ranges=edge_ranges,
        files=_part_files(path, content, num_parts),
        bool_fields=frozenset(bool_fields),
        counts=None if counts is None else _counts(path, counts, (len(edge_types), num_parts, num_parts)),
        digest=hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=8).hexdigest(),
        edge_fix=edge_fix,
    )


def first_named(words: Iterable[str]) -> PartitionJson | None:
    """The first JSON file or partition directory among a command's arguments, also after "="."""
    for word in words:
        named = word.rpartition("=")[2]
        with suppress(PartitionError):
            if named.endswith(".json") or (named and os.path.isdir(named)):
                return read_partition_json(named)
    return None


def parse_edge_type(name: str) -> CanonicalEtype | None:
    """Split `src:rel:dst`; None for the plain name of an edge type."""
    parts = name.split(":")
    return (parts[0], parts[1], parts[2]) if len(parts) == 3 else None


def graph_path(spec: PartitionJson, part: int) -> Path:
    """The partition's `graph.dgl`."""
    files = spec.files[part]
    path = files.get("part_graph")
    if path is not None and os.path.exists(path):
        return path
    if "part_graph_graphbolt" in files or (
        path is not None and os.path.exists(path.parent / "fused_csc_sampling_graph.pt")
    ):
        raise PartitionError(
            f"Partition {part} of {spec.path} is there for GraphBolt only (fused_csc_sampling_graph.pt, converted by "
            "dgl.distributed.dgl_partition_to_graphbolt); expected graph.dgl. Put back the graph.dgl from before the "
            "conversion, or partition again with use_graphbolt=False."
        )
    raise PartitionError(
        f"Partition {part} of {spec.path} lacks its graph ({path or 'part_graph is not named'}). Copy the folder of "
        "this partition to this machine, or partition again."
    )


def owned_counts(ranges: IdRanges, part: int) -> list[int]:
    """The number of nodes or edges of each type that a partition owns."""
    return [int(end - start) for start, end in ranges[part]]


def _names_parts(file: Path) -> bool:
    """Whether a JSON file names the files of partitions, unlike reports in the same directory."""
    try:
        content = _parse(file)
    except PartitionError:
        return False
    return isinstance(content, dict) and "part-0" in content


def _parse(path: Path) -> Any:
    with open_file(path, _EXPECTED) as file:
        try:
            return json.load(file)
        except (ValueError, RecursionError) as error:
            raise PartitionError(f"{path} is not valid JSON: {error}. Copy it again, or write it again.") from error


def _type_names(path: Path, key: str, content: dict[str, Any]) -> list[str]:
    if key not in content:
        raise PartitionError(f"{path} has no {key}: {_OLD}")
    ids = content[key]
    names = {type_id: name for name, type_id in ids.items() if type(type_id) is int} if isinstance(ids, dict) else {}
    if not names or len(names) < len(ids) or names.keys() != set(range(len(names))):
        raise PartitionError(f"{path}: {key} is {ids!r}; expected type names with the IDs 0, 1, ... {REWRITE}")
    return [names[type_id] for type_id in range(len(names))]


def _id_ranges(path: Path, key: str, id_map: Any, types: list[str], num_parts: int, fix: str) -> IdRanges:
    """Convert a node or edge map to [start, end) by partition and type; an empty range may be two equal numbers."""
    if not isinstance(id_map, dict) or any(isinstance(ids, str) for ids in id_map.values()):
        raise PartitionError(f"{path}: {key} is {id_map!r}; expected ranges of IDs by type: {_OLD}")
    if id_map.keys() != set(types):
        raise PartitionError(f"{path}: {key} is for the types {sorted(id_map)}; expected {sorted(types)}. {REWRITE}")
    for name, ids in id_map.items():
        if not isinstance(ids, list) or len(ids) != num_parts:
            raise PartitionError(
                f"{path}: {key} of {name} is {ids!r}; expected one range for each of {num_parts} partitions. {REWRITE}"
            )
    ranges = np.empty((num_parts, len(types), 2), dtype=np.int64)
    reached = 0
    for part in range(num_parts):
        for type_id, name in enumerate(types):
            match id_map[name][part]:
                case [int(start), int(end)] if start == end:  # DGL 2.x writes [-1, -1]
                    start = end = reached
                case [int(start), int(end)]:
                    pass
                case _:
                    start = end = -1
            if start != reached or not start <= end < 2**63:
                raise PartitionError(
                    f"{path}: {key} of {name} in partition {part} is {id_map[name][part]}; expected a range that "
                    f"starts at {reached}, as global IDs run through partitions and, inside them, types. {fix}"
                )
            ranges[part, type_id] = start, end
            reached = end
    return ranges


def _counts(path: Path, counts: Any, shape: tuple[int, int, int]) -> npt.NDArray[np.int64]:
    with suppress(KeyError, TypeError, ValueError, OverflowError):
        found = np.array([counts[key] for key in COUNTS], np.int64)
        if found.shape == (2, *shape) and found.min() >= 0:
            return found
    raise PartitionError(
        f"{path}: the counts do not fit {shape[0]} types of edges between {shape[1]} partitions. Remove 'counts' from "
        "the file, and `sar plan` counts itself."
    )


def _part_files(path: Path, content: dict[str, Any], num_parts: int) -> list[dict[str, Path]]:
    entries = {k: named for k, named in content.items() if re.fullmatch(r"part-\d+", k) and isinstance(named, dict)}
    expected = [f"part-{part}" for part in range(num_parts)]
    if entries.keys() != set(expected):
        raise PartitionError(
            f"{path}: num_parts is {num_parts}, but there are files for {len(entries)} partitions "
            f"({', '.join(sorted(entries)) or 'none'}). {REWRITE}"
        )
    files = [{kind: path.parent / str(file) for kind, file in entries[key].items()} for key in expected]
    for named in files:
        if "part_graph" in named:
            named |= {kind: named["part_graph"].parent / file for kind, file in ORIG_ID_FILES.items()}
    folder = os.path.realpath(path.parent)
    for key, named in zip(expected, files, strict=True):
        for kind, file in named.items():
            check_inside(f"{path}: {kind} of {key}", file, folder)
    return files


def check_inside(what: str, file: Path, folder: str) -> None:
    """Reject paths outside the folder, because an untrusted directory could name any file of this machine.

    `what` describes the reference in errors; `folder` is an `os.path.realpath`.
    `PartitionError` if the file is not below it, also through a link.
    """
    try:
        real = os.path.realpath(file)
    except ValueError as error:  # an invalid file name
        raise PartitionError(f"{what} is {str(file)!r}, which is no file name: {error}. {REWRITE}") from error
    if os.path.commonpath([folder, real]) != folder:
        raise PartitionError(
            f"{what} is {real}; expected a file below {folder}, as DGL writes it. Copy the file there, and name it "
            "relative to the JSON file."
        )
