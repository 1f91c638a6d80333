"""Functions and transforms of PyTorch Geometric on workers: equal to one machine's, or refused."""

import inspect

import pytest
import torch
from torch_geometric import nn as pyg
from torch_geometric import utils
from torch_geometric.data import Data

import sar
from sar.adapters.dgl.shim import has_dgl
from sar.adapters.pyg import refused
from sar.errors import GraphError
from tests.matrix import corner
from tests.parity import pyg_functions
from tests.parity.harness import check, random_data, run_everywhere
from tests.parity.pyg_functions import KINDS, graph_of, run
from tests.parity.pyg_layers import random_parts


def refusals(graph, rows):
    """All that are refused raise, with sar's reason."""
    ours, others = graph_of(graph, rows), {}
    for kind, (_, refused_cases, _) in KINDS.items():
        for name, case in refused_cases.items():
            if name == "to_dgl" and not has_dgl():
                continue
            try:
                others[f"{kind} {name}"] = type(case(ours))
            except Exception as error:
                if not isinstance(error, GraphError) or "distributed edge_index" not in str(error):
                    others[f"{kind} {name}"] = error
    assert not others, f"these did not raise a GraphError: {others}"
    return {}


class Doubled(pyg_functions.T.BaseTransform):
    """A transform of a user's, which is not checked."""

    def forward(self, data):
        data.x = 2 * data.x
        return data


def models(graph, rows):
    """Models with statistics of their own of all nodes."""
    edges, x, _, mask, _ = graph_of(graph, rows)
    data = Data(x, edges)
    auto = pyg.VGAE(lambda x, edges: (x, x)).double()
    infomax = pyg.DeepGraphInfomax(6, pyg.GCNConv(6, 6), lambda z, *_: z.mean(0), lambda x, e: (x, e)).double()
    correct = pyg.CorrectAndSmooth(2, 0.5, 2, 0.5, autoscale=True)
    calls = (
        lambda: correct.correct(x.softmax(1), mask[mask].long(), mask, edges),
        lambda: infomax(x, edges),
        lambda: auto.encode(x, edges),
        lambda: pyg.GAE(lambda x, edges: x).recon_loss(x, edges, edges),
        lambda: pyg.GAE(lambda x, edges: x).test(x, edges, edges),
        lambda: pyg.ARGVA(lambda x, edges: (x, x), torch.nn.Linear(6, 1)).encode(x, edge_index=edges),
        lambda: pyg.SGFormer(6, 4, 3).double()(x, edges, sar.pyg.batch_vector(torch.zeros(len(x)).long())),
        lambda: pyg.Polynormer(6, 4, 3).double()(data.x, data.edge_index, torch.zeros(len(x)).long()),
        data.has_self_loops,
        data.has_isolated_nodes,
        data.is_undirected,
    )
    for call in calls:
        with pytest.raises(GraphError, match="was called with a distributed edge_index or batch vector, but"):
            call()
    assert torch.equal(Doubled()(data).x, 2 * x)
    with pytest.raises(GraphError, match=r"sar\.split_seeds"):
        pyg_functions.T.RandomNodeSplit()(data)
    with pytest.raises(GraphError, match="RandomLinkSplit before the graph is partitioned"):
        utils.train_test_split_edges(data)
    scaled = pyg.CorrectAndSmooth(2, 0.5, 2, 0.5, autoscale=False, scale=0.7)
    return {"node corrected": scaled.correct(x.softmax(1), mask[mask].long(), mask, edges)}


@pytest.mark.parametrize("world_size", [2, corner(1), corner(3)])
def test_what_is_refused(pool, world_size):
    parts = random_parts(world_size, even=True)
    run_everywhere(pool, parts, random_data(parts, torch.float64), [(refusals, ()), (models, ())], (1,))


@pytest.mark.parametrize("world_size", [2, corner(1), corner(3)])
def test_what_is_exact(pool, world_size):
    parts = random_parts(world_size)
    cases = [(run, (name, kind)) for kind, (exact, _, _) in KINDS.items() for name in exact]
    check(pool, parts, random_data(parts, torch.float64), cases, (1,))


@pytest.mark.parametrize("world_size", [2])
def test_what_is_local_runs(pool, world_size):
    parts = random_parts(world_size)
    cases = [(run, (name, kind)) for kind, (_, _, local) in KINDS.items() for name in local]
    run_everywhere(pool, parts, random_data(parts, torch.float64), cases, (1,))


def test_everything_is_here():
    """All transforms, and functions whose arguments have an edge index or a `Data`."""
    functions = {name: inspect.signature(getattr(utils, name)).parameters for name in utils.__all__}
    functions = {name for name, parameters in functions.items() if {"edge_index", "data"} & {*parameters}}
    of_utils, of_transforms = ([{name.split(" ")[0] for name in cases} for cases in kind] for kind in KINDS.values())
    assert functions <= set().union(*of_utils, pyg_functions.UTILS_PACKAGES)
    exact, _, local = of_transforms
    assert exact | local == refused.EXACT_TRANSFORMS | refused.SCALING_TRANSFORMS
    assert set(refused.FUNCTIONS) <= of_utils[1]
