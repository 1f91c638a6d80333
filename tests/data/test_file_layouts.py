"""Files laid out in advance and filled piece by piece, against those that DGL writes at once."""

from pathlib import Path

import numpy as np
import pytest
import torch

from sar.data.graph_files import graph_file_layout
from sar.data.tensor_files import ArraySpec, stored_dtype, tensor_file_layout
from sar.errors import ConfigError
from tests.adapters.dgl.directories import dgl, save_graphs, save_tensors

_HEADER = slice(32, 4096)
"""Of a graph file: DGL leaves there what was in memory."""


@pytest.mark.parametrize("num_edges", [0, 7])
def test_a_graph_file_has_the_bytes_of_dgl(tmp_path: Path, num_edges: int) -> None:
    rng = np.random.default_rng(0)
    src, dst = rng.integers(0, 5, (2, num_edges))
    values = {"src": src, "dst": dst, "node/x": np.arange(5), "edge/y": rng.integers(0, 9, num_edges).astype(np.uint8)}
    layout = graph_file_layout(5, num_edges, {"x": np.int64}, {"y": np.uint8})
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    layout.create(mine)
    with mine.open("r+b") as file:
        for name, rows in values.items():
            writer = layout.writer(file, name)
            writer.append(rows[:2])
            writer.append(rows[2:])
    graph = dgl.graph((torch.from_numpy(src), torch.from_numpy(dst)), num_nodes=5)
    graph.ndata["x"], graph.edata["y"] = torch.from_numpy(values["node/x"]), torch.from_numpy(values["edge/y"])
    save_graphs(str(theirs), [graph])
    found, expected = bytearray(mine.read_bytes()), bytearray(theirs.read_bytes())
    assert found[_HEADER] == bytes(len(found[_HEADER]))
    expected[_HEADER] = found[_HEADER]
    assert found == expected


@pytest.mark.parametrize("shape", [(3,), (3, 2, 2), (0, 4), (3, 0)], ids=str)
@pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "<i4", ">i8", "f2", ">f4", "f8", "c8", "?"])
def test_a_tensor_file_has_the_bytes_of_dgl(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    layout = tensor_file_layout({"ntype/naïve": ArraySpec(stored_dtype(values.dtype), shape)})
    layout.create(tmp_path / "mine")
    with (tmp_path / "mine").open("r+b") as file:
        layout.writer(file, "ntype/naïve").append(values)
    native = values.astype(values.dtype.newbyteorder("="))
    save_tensors(str(tmp_path / "theirs"), {"ntype/naïve": torch.from_numpy(native)})
    assert (tmp_path / "mine").read_bytes() == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize("dtype", ["U3", "O", "u4", "u8", "M8[s]", "f16"])
def test_types_that_files_lack_are_refused(dtype: str) -> None:
    with pytest.raises(ConfigError, match="expected uint8, signed integers"):
        stored_dtype(np.dtype(dtype))
