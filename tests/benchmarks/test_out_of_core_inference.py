"""What partitions in turns are compared with gives the outputs of the whole graph."""

from pathlib import Path

import dgl
import numpy as np
import pytest
import torch

from benchmarks.graphs import GeneratedSize, prepare
from benchmarks.models import Model
from benchmarks.out_of_core_inference import arrays
from benchmarks.out_of_core_inference_run import gather


@pytest.mark.parametrize("name", ["SAGE", "GAT"])
def test_gathering(tmp_path: Path, name: str) -> None:
    graph = prepare("rmat", GeneratedSize(200, 1500, 12), Path(), tmp_path, 0)
    folder, order = arrays(graph, 2)
    torch.manual_seed(0)
    model = Model(name, 12, 3).eval()
    gather(folder, model, tmp_path / "out.npy", 64, 1)
    whole = dgl.graph(graph.data.ends(), num_nodes=200)
    with torch.no_grad():
        expected = model(whole, torch.from_numpy(graph.data.node_data["_N"]["feat"]))
    assert np.allclose(np.load(tmp_path / "out.npy"), expected[torch.from_numpy(order)], atol=1e-5)
