"""Batches from seed edges, as PyTorch Geometric's own loaders mean them.

These need compiled packages; the part of them that numbers seed edges, `edge_sample`, does not.
"""

import pytest
import torch
from torch_geometric.sampler import EdgeSamplerInput, HeteroSamplerOutput, NegativeSampling, SamplerOutput
from torch_geometric.sampler.neighbor_sampler import edge_sample

import sar
from sar.common_tuples import EID
from sar.errors import ConfigError, GraphError
from tests.matrix import corner
from tests.sampling.edge_cases import plain_case, typed_case
from tests.sampling.scenes import BUYS, FOLLOWS

E = ("_N", "_E", "_N")
NEGATIVES = {
    "none": lambda: None,
    "for each": lambda: 2,
    "binary": lambda: NegativeSampling("binary", 1.5),
    "triplet": lambda: NegativeSampling("triplet", 3),
    "one": lambda: NegativeSampling("triplet", 1),
}


INDICES = ("edge_label_index", "src_index", "dst_pos_index", "dst_neg_index")


def plain(data):
    """The stores of a batch as dictionaries, by type."""
    if not hasattr(data, "edge_types"):
        return {None: data.to_dict()}
    return {**{t: data[t].to_dict() for t in data.node_types}, **{t: data[t].to_dict() for t in data.edge_types}}


def link_batches(mine, negatives, labels):
    """The batches of an epoch, and for every type the ends of this worker's seeds, in their order, by global ID."""
    partition, seeds = mine
    graph = sar.construct_full_graph(partition)
    for etype in graph.canonical_etypes:
        if labels is not None:
            graph.edges[etype].data["edge_label"] = graph.edges[etype].data[EID] % 3 + labels
    inner = sar.DistNeighborSampler([-1, -1])
    sampler = sar.EdgePredictionSampler(inner, negative_sampler=NEGATIVES[negatives]())
    options = {"shuffle": True, "foreign_seeds": True, "seed": 3}
    batches = [plain(batch) for batch in sar.DataLoader(graph, seeds, sampler, 5, format="pyg", **options)]
    return batches, given_ids(graph, seeds)


def given_ids(graph, seeds):
    if isinstance(seeds, torch.Tensor):
        return {E: seeds}
    return {etype: graph.edges[etype].data[EID][rows] for etype, rows in seeds.items()}


class TheSame(NegativeSampling):
    """Draws what a batch has."""

    def draw(self, src, dst):
        self.ends = {"src": src, "dst": dst}
        return self

    def sample(self, num_samples, endpoint, num_nodes=None):
        assert len(self.ends[endpoint]) == num_samples
        return self.ends[endpoint]


def check_pairs(batch, etype, nodes_of, ends, labels, lowest, negatives):
    """The fields of one edge type against what `edge_sample` makes of the same seeds and the same negative pairs.

    lowest: label of the graph's edges.
    """
    typed = etype != E
    store = batch[etype if typed else None]
    at = [batch[etype[end] if typed else None] for end in (0, 2)]
    src, dst = ends[0][store["input_id"]], ends[1][store["input_id"]]
    drawing = None
    if negatives == "binary" or negatives == "for each":
        drawn = store["edge_label_index"][:, len(src) :]
        ratio = 1.5 if negatives == "binary" else 2
        drawing = TheSame("binary", ratio).draw(nodes_of[0][drawn[0]], nodes_of[1][drawn[1]])
        if negatives == "for each":
            assert torch.equal(drawing.ends["src"], src.repeat_interleave(2))
    elif negatives in ("triplet", "one"):
        drawn = at[1]["dst_neg_index"]
        assert drawn.shape == ((len(src), 3) if negatives == "triplet" else (len(src),))
        drawing = TheSame("triplet", drawn[0].numel() if len(src) else 1).draw(None, nodes_of[1][drawn.flatten()])
    if not len(src):
        return
    label = None if labels is None or negatives in ("triplet", "one") else labels[store["input_id"]]
    if drawing is not None and label is not None and lowest == 0:
        label = label + 1  # as `LinkLoader` does
    sampled = []

    def sample(seeds, _time):
        sampled.append(seeds)
        empty = torch.empty(0, dtype=torch.int64)
        if typed:
            return HeteroSamplerOutput(seeds, {}, {}, {})
        return SamplerOutput(seeds, empty, empty, empty)

    inputs = EdgeSamplerInput(store["input_id"], src, dst, label, input_type=etype if typed else None)
    count = {etype[0]: 10**6, etype[2]: 10**6} if typed else 10**6
    found = edge_sample(inputs, sample, count, False, None, drawing).metadata
    [seeds] = sampled
    seeds = [seeds[etype[end]] for end in (0, 2)] if typed else [seeds, seeds]
    assert torch.equal(store["input_id"], found[0])
    if negatives in ("triplet", "one"):
        assert torch.equal(nodes_of[0][at[0]["src_index"]], seeds[0][found[1]])
        assert torch.equal(nodes_of[1][at[1]["dst_pos_index"]], seeds[1][found[2]])
        assert torch.equal(nodes_of[1][at[1]["dst_neg_index"]], seeds[1][found[3]])
        assert "edge_label_index" not in store
        return
    for end in (0, 1):
        assert torch.equal(nodes_of[end][store["edge_label_index"][end]], seeds[end][found[1][end]])
    assert ("edge_label" in store) == (found[2] is not None)
    if found[2] is not None:
        assert torch.equal(store["edge_label"], found[2])


def all_ends(case):
    """Global IDs of the ends of every edge, by `_ID`, (E,) int64 both."""
    src, dst = (torch.empty(len(case.edge_orig), dtype=torch.int64) for _ in range(2))
    for partition in case.partitions:
        for shard in partition.all_shard_edges:
            ids = shard.edge_features["_ID"]
            src[ids], dst[ids] = shard.edges
    return src, dst


@pytest.mark.parametrize(
    "negatives, labels", [*((n, None) for n in NEGATIVES), ("none", 0), ("binary", 0), ("binary", 1)]
)
@pytest.mark.parametrize("world_size", [corner(1), 2])
def test_seed_edges(pool, world_size, negatives, labels):
    case = plain_case(world_size)
    order = torch.randperm(110, generator=torch.Generator().manual_seed(0))[:60]
    seeds = [order[order % world_size == rank] for rank in range(world_size)]
    seeds[0] = seeds[0][:3]  # so that some batches of this worker are empty
    mine = list(zip(case.partitions, seeds, strict=True))
    src, dst = all_ends(case)
    for batches, given in pool.run(link_batches, negatives, labels, per_rank=mine):
        ids = given[E]
        taken = torch.cat([batch[None]["input_id"] for batch in batches])
        assert torch.equal(taken.sort().values, torch.arange(len(ids)))
        for batch in batches:
            nodes = batch[None]["n_id"]
            of_seeds = None if labels is None else ids % 3 + labels
            check_pairs(batch, E, (nodes, nodes), (src[ids], dst[ids]), of_seeds, labels, negatives)
            edges = batch[None]["edge_index"]
            assert torch.equal(nodes[edges], torch.stack([src, dst])[:, batch[None]["e_id"]])
            assert "batch_size" not in batch[None]
            # All in-edges of the ends of pairs, and of the sources of these.
            pairs = [batch[None][name] for name in INDICES if name in batch[None]]
            ends = nodes[torch.cat([index.flatten() for index in pairs])].unique()
            into = torch.isin(dst, torch.cat([ends, src[torch.isin(dst, ends)]]))
            assert torch.equal(batch[None]["e_id"].sort().values, into.nonzero().squeeze(1))


BOTH = [BUYS, FOLLOWS]
OF_TYPES = [("binary", label, etypes) for label in (None, 0) for etypes in ([BUYS], [FOLLOWS], BOTH)]


@pytest.mark.parametrize("negatives, labels, etypes", [*OF_TYPES, *(("triplet", None, [etype]) for etype in BOTH)])
@pytest.mark.parametrize("world_size", [corner(1), 2])
def test_seed_edges_of_types(pool, world_size, negatives, labels, etypes):
    case = typed_case(world_size)
    seeds = pool.run(rows_of_types, etypes, per_rank=case.partitions)
    mine = list(zip(case.partitions, seeds, strict=True))
    src, dst = all_ends(case)
    kinds = torch.cat([partition.node_features["_TYPE"] for partition in case.partitions])
    for batches, given in pool.run(link_batches, negatives, labels, per_rank=mine):
        for batch in batches:
            for kind, ntype in enumerate(case.partitions[0].node_type_names):
                assert bool((kinds[batch[ntype]["n_id"]] == kind).all())  # of drawn nodes, too
        for etype, ids in given.items():
            taken = torch.cat([batch[etype]["input_id"] for batch in batches])
            assert torch.equal(taken.sort().values, torch.arange(len(ids)))
            for batch in batches:
                nodes = [batch[etype[end]]["n_id"] for end in (0, 2)]
                of_seeds = None if labels is None else ids % 3 + labels
                check_pairs(batch, etype, nodes, (src[ids], dst[ids]), of_seeds, labels, negatives)
        assert all(
            "edge_label_index" not in store for batch in batches for t, store in batch.items() if t not in etypes
        )


def rows_of_types(partition, etypes):
    """Every other edge into worker 0's nodes, and on others all of the first type."""
    graph = sar.construct_full_graph(partition)
    if sar.rank():
        return {etypes[0]: torch.arange(graph.num_edges(etypes[0])).flip(0)}
    return {etype: torch.arange(0, graph.num_edges(etype), 2) for etype in etypes}


def refusals(partition):
    graph = sar.construct_full_graph(partition)
    inner = sar.DistNeighborSampler([1])
    with pytest.raises(ConfigError, match="has weights of nodes"):
        sar.EdgePredictionSampler(inner, negative_sampler=NegativeSampling("binary", 1, torch.ones(23)))
    with pytest.raises(ConfigError, match="expected the number of pairs"):
        sar.EdgePredictionSampler(inner, negative_sampler=1.5)
    triplets = sar.EdgePredictionSampler(inner, negative_sampler=NegativeSampling("triplet"))
    with pytest.raises(GraphError, match="expected one type for triplets"):
        sar.DataLoader(graph, rows_of_types(partition, [BUYS, FOLLOWS]), triplets, format="pyg")


@pytest.mark.parametrize("world_size", [2])
def test_what_is_refused(pool, world_size):
    pool.run(refusals, per_rank=typed_case(world_size).partitions)
