"""The link prediction example on workers, against DGL's graphs of the same pairs in one process."""

from pathlib import Path

import dgl
import dgl.function as fn
import pytest
import torch
from torch.nn import functional

import sar
from sar.cli.demo import community_graph
from sar.partition.in_memory import divide, training_graph
from tests.examples.scripts import example, in_double
from tests.matrix import corner


def run_on_worker(argv):
    torch.set_default_dtype(torch.float64)
    return example("link_prediction").main(argv)


def scores(pairs, nodes, h):
    graph = dgl.graph(pairs, num_nodes=nodes)
    graph.ndata["h"] = h
    graph.apply_edges(fn.u_dot_v("h", "h", "score"))
    return graph.edata["score"].squeeze(1)


def joined(pairs):
    return tuple(map(torch.cat, zip(*pairs, strict=True)))


def train_alone(json_file, workers, a):
    """Losses and the bounds of the final MRR on one machine, with the pairs that the workers draw, in global IDs."""
    script = example("link_prediction")
    parts = [sar.load_dgl_partition_data(json_file, rank, "cpu") for rank in range(workers)]
    original = torch.cat([part.node_features["orig_id"] for part in parts])
    x = torch.cat([sar.suffix_key_lookup(part.node_features, "feat") for part in parts])
    kept, links, tests, others, drawn = [], [], [], [], [[] for _ in range(a.epochs)]
    for rank, part in enumerate(parts):
        src, dst = script.edges(part)
        test = script.held_out(original[src], original[dst])
        kept.append((src[~test], dst[~test]))
        links.append((src[~test & (src < dst)], dst[~test & (src < dst)]))
        tests.append((src[test & (src < dst)], dst[test & (src < dst)]))
        torch.manual_seed(a.seed + 1 + rank)
        others.append(script.corrupted(tests[-1][0], a.ranked, len(x)))
        for pairs in drawn:
            pairs.append(script.corrupted(links[-1][0], a.negatives, len(x)))
    kept, links, tests, others = map(joined, (kept, links, tests, others))
    assert set(zip(*(ends.tolist() for ends in kept), strict=True)).isdisjoint(
        pair for src, dst in zip(*(ends.tolist() for ends in tests), strict=True) for pair in ((src, dst), (dst, src))
    )
    graph = dgl.graph(kept, num_nodes=len(x))
    torch.manual_seed(a.seed)
    model = script.GCN(x.shape[1], a.hidden)
    optimizer = torch.optim.Adam(model.parameters(), lr=a.lr)
    losses = []
    for pairs in map(joined, drawn):
        h = model(graph, x)
        made = torch.cat([scores(links, len(x), h), scores(pairs, len(x), h)])
        known = (torch.arange(len(made)) < len(links[0])).to(made.dtype)
        loss = functional.binary_cross_entropy_with_logits(made, known)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        h = model(graph, x)
        above = scores(others, len(x), h).view(-1, a.ranked) - scores(tests, len(x), h).unsqueeze(1)
        drawn_itself = others[1].view(-1, a.ranked) == tests[1].unsqueeze(1)
        above[drawn_itself] = -1.0
        # Nodes that are alike have scores that are equal, or not, by rounding: these may take either place.
        ranks = [1 + drawn_itself.sum(1) / 2 + (above > limit).sum(1).double() for limit in (-1e-12, 1e-12)]
    return losses, [rank.reciprocal().mean().item() for rank in ranks]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("world_size", [corner(1), 2, corner(3)])
def test_losses_and_ranks_are_those_of_one_machine(pool, tmp_path: Path, world_size):
    data = in_double(training_graph(community_graph(300, 2400, 12, 4)))
    json_file = divide(data, tmp_path, "graph", world_size).json_file
    argv = ["--partition-json", str(json_file), "--epochs", "5", "--hidden", "32", "--negatives", "2", "--lr", "0.003"]
    results = pool.run(run_on_worker, argv, timeout=120)
    losses, (least, most) = train_alone(json_file, world_size, example("link_prediction").parser.parse_args(argv))
    for found, found_mrr in results:
        assert found == pytest.approx(losses, rel=1e-9)
        assert least - 1e-12 <= found_mrr <= most + 1e-12
    assert most - least < 2e-4
    assert losses[-1] < losses[0]
    assert least > 0.055  # of ranks drawn at random: 0.052
