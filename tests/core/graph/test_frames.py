"""Frames: edge features, what local_scope undoes, which errors unknown or unfit fields give."""

import dgl.function as fn
import pytest
import torch

from sar.common_tuples import EID, ORIG_ID
from tests.core.attempts import catch_and_recover, fail_on_all_ranks
from tests.graphs import partition_in_memory, random_graph
from tests.parity.harness import build
from tests.parity.scenarios import scattered

MODES = pytest.mark.parametrize("mode", [1, 3])
TWO = pytest.mark.parametrize("world_size", [2])


def example(workers=2):
    graph = random_graph(11, 20, 90, isolated=2)
    features = {"w": torch.rand(90), "kind": torch.randint(0, 3, (90,)), "f": torch.rand(90, 2, 3)}
    return partition_in_memory(graph, scattered(20, workers), workers, features, {"h": torch.rand(20, 2)}), features


def edge_features(partition, mode):
    graph = build(partition, mode)
    return {name: graph.edata[name] for name in graph.edata}, {name: graph.ndata[name] for name in graph.ndata}


@MODES
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_edge_features_are_there_from_the_start_in_the_visible_order(pool, world_size, mode):
    parts, features = example(world_size)
    results = pool.run(edge_features, mode, per_rank=parts.partitions)
    for rank, (edata, ndata) in enumerate(results):
        assert ndata == {}, "node features stay in the partition data"
        assert set(edata) >= {"w", "kind", "f", EID}
        rows = parts.split_edges(parts.edge_ids)[rank]
        for name, values in features.items():
            assert torch.equal(edata[name], values[rows])
        shards = parts.partitions[rank].all_shard_edges
        for name in (EID, ORIG_ID):
            assert torch.equal(edata[name], torch.cat([shard.edge_features[name] for shard in shards]))


def scopes(partition, mode):
    graph = build(partition, mode)
    outside = torch.rand(graph.num_nodes(), 3)
    graph.ndata["h"] = outside
    before = set(graph.edata)

    def change():
        graph.ndata["h"] = outside + 1
        graph.ndata["new"] = outside
        graph.edata["e"] = graph.edata.pop("w")
        graph.update_all(fn.copy_u("h", "m"), fn.sum("m", "out"))

    def unchanged():
        return graph.ndata["h"] is outside and set(graph.ndata) == {"h"} and set(graph.edata) == before

    results = {}
    with graph.local_scope():
        change()
        results["inside"] = graph.ndata["h"] is not outside and "out" in graph.ndata and "w" not in graph.edata
        with graph.local_scope():
            graph.ndata["h"] = outside + 2
        results["nested"] = bool((graph.ndata["h"] == outside + 1).all())
    results["after"] = unchanged()
    local = graph.local_var()
    local.ndata["h"] = outside + 3
    local.update_all(fn.copy_u("h", "m"), fn.sum("m", "out"))
    results["local_var"] = "out" in local.ndata and unchanged()

    def fail():
        with graph.local_scope():
            change()
            raise ValueError("on purpose")

    results["raised"] = catch_and_recover(fail).kind
    results["after exception"] = unchanged()
    graph.update_all(fn.copy_u("h", "m"), fn.sum("m", "out"))
    results["works on"] = graph.ndata["out"].shape == outside.shape
    return results


@MODES
@TWO
def test_local_scope_restores_also_after_exceptions(pool, mode):
    for results in pool.run(scopes, mode, per_rank=example()[0].partitions):
        assert results.pop("raised") == "ValueError"
        assert results == dict.fromkeys(["inside", "nested", "after", "local_var", "after exception", "works on"], True)


def summed(graph, message, **options):
    graph.update_all(message, fn.sum("m", "out"), **options)


MISTAKES = {
    "field of sources": lambda graph: summed(graph, fn.copy_u("hidden", "m")),
    "field of destinations": lambda graph: graph.apply_edges(fn.u_add_v("x", "hidden", "m")),
    "field of edges": lambda graph: summed(graph, fn.u_mul_e("x", "hidden", "m")),
    "ndata": lambda graph: graph.ndata["hidden"],
    "edata": lambda graph: graph.edata.pop("hidden"),
    "etype": lambda graph: summed(graph, fn.copy_u("x", "m"), etype="hidden"),
    "view": lambda graph: graph["hidden"],
    "ntype": lambda graph: graph.num_nodes("hidden"),
    "nodes": lambda graph: graph.nodes["hidden"],
    "integers summed": lambda graph: summed(graph, fn.copy_u("i", "m")),
    "integers multiplied": lambda graph: summed(graph, fn.u_mul_e("i", "j", "m")),
    "integers' maximum": lambda graph: graph.update_all(fn.copy_u("i", "m"), fn.max("m", "out")),
    "integers' product": lambda graph: graph.apply_edges(fn.u_dot_v("i", "i", "m")),
    "integers' minimum": lambda graph: graph.update_all(fn.u_add_e("i", "j", "m"), fn.min("m", "out")),
    "another field": lambda graph: graph.update_all(fn.copy_u("x", "m"), fn.sum("another", "out")),
}
"""What a field or type that is not there, or does not fit, is used for."""


def mistake(graph, data, name):
    graph.ndata["x"] = graph.ndata["y"] = data.nodes["x"]
    graph.ndata["i"] = torch.ones(graph.num_nodes(), 2, dtype=torch.int64)
    graph.edata["j"] = torch.ones(graph.num_edges(), 2, dtype=torch.int64)
    MISTAKES[name](graph)


@pytest.mark.parametrize("name", MISTAKES)
@TWO
def test_mistakes(pool, name):
    for failure in fail_on_all_ranks(pool, example()[0], mistake, name):
        if name == "another field":
            assert failure.kind == "GraphError"
            words = ("'m'", "'another'")
        elif name.startswith("integers"):
            assert "SarError" in failure.bases, failure
            words = ("int64", "float")  # the mend
        else:
            assert failure.kind == "FieldError", failure
            assert "KeyError" in failure.bases
            assert not failure.message.startswith('"'), "the sentence, not its repr"
            words = ("'hidden'", "'x', 'y'") if name == "ndata" else ("'hidden'",)
        assert all(word in failure.message for word in words), failure
