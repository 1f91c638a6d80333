"""`torch.set_default_device`: what sar makes for itself is on the CPU or with the data, whatever the default is."""

import dgl.function as fn
import pytest
import torch
from torch import nn

import sar
from sar.nn.statistics import global_mean
from tests.parity.harness import Mine, build, random_shares


def a_round_of_all(mine: Mine, default: str, folder: str) -> list[torch.Tensor]:
    """What is trained, sampled and saved with a default device; tensors made there by mistake meet those of the CPU."""
    partition, data = mine
    data.partition = partition
    model = nn.Sequential(nn.Linear(6, 4), sar.DistributedBN1D(4))
    sar.seed(3)
    torch.set_default_device(default)
    try:
        graph = build(partition, 1)
        looped = graph.remove_self_loop().add_self_loop()
        embedding = sar.nn.DistEmbedding(graph, 6)
        optimizers = [torch.optim.SGD(model.parameters(), 0.1), sar.nn.SparseAdam([embedding])]
        wanted = torch.arange(0, graph.num_nodes_global(), 3, device="cpu")
        sar.sync_params(model)
        for _ in range(2):
            h = model(data.nodes["x"] + embedding())
            with looped.local_scope():
                looped.ndata["h"], looped.ndata["x"] = h, data.nodes["x"]
                looped.update_all(fn.copy_u("h", "m"), fn.mean("m", "h"))
                looped.update_all(lambda edges: {"m": edges.src["h"].tanh()}, fn.max("m", "h"))
                looped.update_all(fn.copy_u("x", "m"), lambda nodes: {"x": nodes.mailbox["m"].sum(1)})
                looped.update_all(fn.copy_u("x", "m"), fn.sum("m", "s"))
                weights = sar.edge_softmax(looped, torch.zeros(looped.num_edges(), device="cpu"))
                out = looped.ndata["h"]
            rows = sar.fetch_rows(graph, out, wanted) * embedding(wanted)[:, :4]
            (out.sum() + rows.tanh().sum() + global_mean(h).square().sum() + weights.sum()).backward()
            sar.gather_grads(model)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        sampled = torch.zeros(0, dtype=torch.int64, device="cpu")
        sampler = sar.DistNeighborSampler([2, 3])
        for blocks in sar.DataLoader(graph, graph.node_ids()[::2], sampler, batch_size=4, shuffle=True):
            sampled = torch.cat([sampled, *blocks[0].edges()])
        pairs = sar.pair_graph(graph, wanted, wanted.flip(0))
        pairs.ndata["h"] = out.detach()
        pairs.apply_edges(fn.u_dot_v("h", "h", "s"))
        sar.save_checkpoint(folder, model=model, embeddings=embedding)
        sar.load_checkpoint(folder, model=model, embeddings=embedding)
        (block, *_) = sar.construct_mfgs(partition, graph.node_ids()[::3], 1)
        found = [
            sampled,
            *model.parameters(),
            embedding.weight,
            pairs.in_given_order(pairs.edata["s"]),
            block.in_degrees(),
        ]
    finally:
        torch.set_default_device(None)
    assert all(tensor.device.type == "cpu" for tensor in found)
    return [tensor.detach() for tensor in found]


@pytest.mark.processes("the default device is a thread's, and each of them would have it")
@pytest.mark.parametrize("world_size", [2])
def test_any_default_device(pool, world_size, tmp_path):
    mine = random_shares(world_size)
    expected, found = (
        pool.run(a_round_of_all, how, str(tmp_path / how), per_rank=mine, timeout=250) for how in ("cpu", "meta")
    )
    for wanted, values in zip(expected, found, strict=True):
        assert all(torch.equal(value, same) for value, same in zip(values, wanted, strict=True))
