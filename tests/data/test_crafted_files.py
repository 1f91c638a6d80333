"""Files and JSON of which one number is wrong, each refused for that number: what fuzzing hits too rarely."""

from pathlib import Path
from struct import pack

import pytest
import torch

from sar.adapters.dgl.load import load_dgl_partition_data
from sar.data.arrays import StoredArray
from sar.data.graph_files import COO_MARK, open_graph_file
from sar.data.partition_json import read_partition_json
from sar.data.regroup import WorkerShare
from sar.data.tensor_files import open_tensors
from sar.errors import PartitionError
from sar.partition.inspect.inspection import inspect_directory
from tests.adapters.dgl.directories import dgl, homogeneous_graph, save_tensors, write_directory

NODES, EDGES = 4, 6
HUGE = 2**40


def save_graph(path: Path, formats: str) -> None:
    """A small graph whose entries in CSC are not in the order of edge IDs."""
    graph = dgl.graph(([0, 1, 2, 2, 0, 1], [3, 1, 0, 1, 2, 0]), num_nodes=NODES)
    graph.ndata["x"] = torch.arange(NODES)
    dgl.save_graphs(str(path), [graph], formats=formats)


def patch(path: Path, at: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


def as_twice_as_many_int32(path: Path, stored: StoredArray) -> None:
    """Declare an array of int64 to be one of twice as many int32, in the same bytes."""
    patch(path, stored.offset - 19, b"\x20")
    patch(path, stored.offset - 16, pack("<q", 2 * stored.shape[0]))


@pytest.mark.parametrize(
    "formats, array, row, value, found",
    [
        ("coo", "columns", 2, NODES, "indices from 0 to 4 below 4"),
        ("coo", "columns", 0, 2**62, "below 4"),
        ("coo", "rows", EDGES - 1, -1, "indices from -1"),
        ("csr", "columns", 1, NODES, "indices from 0 to 4 below 4"),
        ("csc", "columns", 1, -5, "indices from -5"),
        ("csc", "rows", 0, 1, "offsets that do not ascend"),
        ("csc", "rows", NODES, EDGES - 1, "offsets that do not ascend"),
        ("csr", "rows", 2, 1, "offsets that do not ascend"),
        ("csr", "rows", 2, HUGE, "below 7"),
        ("csc", "edge_ids", 0, 0, "edge IDs that are not each there once"),
        ("csc", "edge_ids", 0, EDGES, "indices from .* below 6"),
    ],
)
def test_indices(tmp_path, formats, array, row, value, found):
    path = tmp_path / "graph.dgl"
    save_graph(path, formats)
    [relation] = open_graph_file(path).relations
    assert relation.edges.edge_ids.shape == ((0,) if formats == "coo" else (EDGES,))
    stored = getattr(relation.edges, array)
    assert int(stored.load()[row]) != value
    patch(path, stored.offset + 8 * row, pack("<q", value))
    with pytest.raises(PartitionError, match=f"{path} has .*{found}"):
        open_graph_file(path).relations[0].edges.ends()


@pytest.mark.parametrize("formats, array", [("coo", "rows"), ("csc", "rows"), ("csc", "edge_ids")])
def test_arrays_of_another_length(tmp_path, formats, array):
    path = tmp_path / "graph.dgl"
    save_graph(path, formats)
    as_twice_as_many_int32(path, getattr(open_graph_file(path).relations[0].edges, array))
    with pytest.raises(PartitionError, match=r"int32 of shape \(1\d,\) for \d indices"):
        open_graph_file(path).relations[0].edges.ends()


def test_fields_of_another_length(tmp_path):
    path = tmp_path / "graph.dgl"
    save_graph(path, "coo")
    as_twice_as_many_int32(path, open_graph_file(path).fields["_N"]["x"])
    with pytest.raises(PartitionError, match=r"a field 'x' of shape \(8,\) for 4 nodes or edges"):
        open_graph_file(path)


@pytest.mark.parametrize("count", [0, NODES + 1, 2**63])
def test_edges_between_other_numbers_of_nodes(tmp_path, count):
    path = tmp_path / "graph.dgl"
    save_graph(path, "coo")
    patch(path, path.read_bytes().index(pack("<Q", COO_MARK)) + 16, pack("<Q", count))
    with pytest.raises(PartitionError, match=rf"edges between \({count}, 4\) nodes"):
        open_graph_file(path)


def test_types_of_one_name(tmp_path):
    path = tmp_path / "graph.dgl"
    dgl.save_graphs(str(path), [dgl.heterograph({("aa", "r", "bb"): ([0], [0])})])
    patch(path, path.read_bytes().index(b"bb"), b"aa")
    with pytest.raises(PartitionError, match=r"lists of \(2, 2, 2, 2, 1, 2\) types of nodes"):
        open_graph_file(path)


def test_sizes_beside_zero(tmp_path):
    path = tmp_path / "features.dgl"
    save_tensors(str(path), {"x": torch.ones(6, 0, 3)})
    shape_at = path.stat().st_size - 32
    patch(path, shape_at, pack("<q", HUGE))
    [stored] = open_tensors(path).values()
    assert [len(rows) for _, rows in stored.slices()] == [HUGE]  # at once, as there is nothing to read
    patch(path, shape_at + 16, pack("<q", HUGE))
    with pytest.raises(PartitionError, match="an array of shape"):
        open_tensors(path)


@pytest.mark.parametrize("end", [HUGE, 2**62, 2**63 - 1, 2**63, 2**70])
@pytest.mark.parametrize("key", ["node_map", "edge_map"])
def test_ranges_beyond_the_files(tmp_path, key, end):
    directory = write_directory(tmp_path, homogeneous_graph(), 2)

    def extend(content):
        content.pop("num_nodes")
        content.pop("num_edges")
        [ranges] = content[key].values()
        ranges[:] = [[0, end], [end, end]]

    directory.edit(extend)
    with pytest.raises(PartitionError, match=r"expected (one for every|a range that)"):
        load_dgl_partition_data(directory.path, 0, "cpu")
    if end < 2**63 and key == "node_map":
        with pytest.raises(PartitionError, match="expected one for every"):
            WorkerShare.of(read_partition_json(directory.path), 0, 4, {})
    if end < 2**63:
        assert any("are missing" in problem for problem in inspect_directory(directory.path).problems)
