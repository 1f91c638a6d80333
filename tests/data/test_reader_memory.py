"""Loading a partition takes 1.5 times what is kept, plus the size of graph.dgl: measured in a fresh process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.adapters.dgl.directories import dgl, save_tensors

LOAD = """
import json, sys, tracemalloc
from pathlib import Path
import sar
from sar.adapters.dgl.shim import require_dgl
require_dgl()
import dgl.distributed

def high_water():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

sar.load_dgl_partition_data(sys.argv[1], 0, "cpu")  # whatever is made once, on a small graph
Path("/proc/self/clear_refs").write_text("5")
before = high_water()
data = sar.load_dgl_partition_data(sys.argv[2], 0, "cpu")
peak = high_water() - before
tensors = [tensor for shard in data.all_shard_edges for tensor in (*shard.edges, *shard.edge_features.values())]
kept = sum(tensor.nbytes for tensor in (*tensors, *data.node_features.values()))
print(json.dumps({"peak": peak, "kept": kept}))
"""
SLACK = 8 * 2**20
"""Bytes: slices that are read, and what allocators round up."""


def write_single_partition(folder: Path, num_nodes: int, num_edges: int, width: int) -> Path:
    """Write one partition whose edges are in no order that helps."""
    folder.mkdir()
    random = torch.Generator().manual_seed(0)
    src, dst = torch.randint(0, num_nodes, (2, num_edges), generator=random)
    graph = dgl.graph((src, dst), num_nodes=num_nodes)
    graph.ndata["_ID"], graph.edata["_ID"] = torch.arange(num_nodes), torch.arange(num_edges)
    graph.ndata["inner_node"] = torch.ones(num_nodes, dtype=torch.uint8)
    graph.edata["inner_edge"] = torch.ones(num_edges, dtype=torch.uint8)
    dgl.save_graphs(str(folder / "graph.dgl"), [graph])
    save_tensors(str(folder / "node_feat.dgl"), {"_N/feat": torch.ones(num_nodes, width)})
    save_tensors(str(folder / "edge_feat.dgl"), {"_N:_E:_N/feat": torch.ones(num_edges, width)} if width else {})
    content = {
        "num_parts": 1,
        "node_map": {"_N": [[0, num_nodes]]},
        "edge_map": {"_N:_E:_N": [[0, num_edges]]},
        "ntypes": {"_N": 0},
        "etypes": {"_N:_E:_N": 0},
        "part-0": {"part_graph": "graph.dgl", "node_feats": "node_feat.dgl", "edge_feats": "edge_feat.dgl"},
    }
    path = folder / "graph.json"
    path.write_text(json.dumps(content))
    return path


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads peak memory from Linux's /proc")
@pytest.mark.parametrize(
    "num_edges, width", [(250_000, 128), (3_000_000, 0)], ids=("wide edge features", "structure only")
)
def test_peak_memory(tmp_path, num_edges, width):
    small = write_single_partition(tmp_path / "small", 100, 1000, 4)
    large = write_single_partition(tmp_path / "large", 5000, num_edges, width)
    result = subprocess.run(
        [sys.executable, "-c", LOAD, str(small), str(large)], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    measured = json.loads(result.stdout.splitlines()[-1])
    assert measured["kept"] >= num_edges * (24 + 4 * width)
    assert measured["peak"] >= measured["kept"] - SLACK
    assert measured["peak"] <= 1.5 * measured["kept"] + (tmp_path / "large" / "graph.dgl").stat().st_size + SLACK
