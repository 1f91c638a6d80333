"""No operation on an edge index gives away the numbers that a worker has for its sources."""

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import get_overridable_functions
from torch_geometric import transforms as T
from torch_geometric.data import Data

import sar
from sar.adapters.pyg.edge_index import DistributedEdgeIndex
from sar.adapters.pyg.guarded import GuardedTensor
from sar.errors import SarError
from tests.graphs import partition_in_memory, random_graph
from tests.parity.harness import deal, random_data

SHOWN = {Tensor.__repr__, Tensor.__format__}
"""These are for reading."""

ARBITRARY = ("empty", "resize", "data_ptr", "__hash__")
"""Parts of the names of functions whose results are different each time."""

PAST_TORCH_FUNCTION = {
    "tensor": torch.tensor,
    "as_tensor": torch.as_tensor,
    "asarray": torch.asarray,
    "LongTensor": torch.LongTensor,
    "Tensor": torch.Tensor,
    "Parameter": lambda e: torch.nn.Parameter(e, requires_grad=False),
    "as_subclass": lambda e: e.as_subclass(Tensor),
    "new_tensor": lambda e: torch.zeros(1).new_tensor(e),
    "set_": lambda e: torch.zeros(1, dtype=torch.int64).set_(e),
    "sparse_coo_tensor": lambda e: torch.sparse_coo_tensor(e, torch.ones(e.size(-1))),
    "sparse_csr_tensor": lambda e: torch.sparse_csr_tensor(torch.tensor([0, e.size(-1)]), e, torch.ones(e.size(-1))),
    "from_dlpack": torch.from_dlpack,
    "np.asarray": np.asarray,
    "np.array": np.array,
    "memoryview": memoryview,
    "list": list,
    "iter": lambda e: [*iter(e)],
    "first": lambda e: int(e[..., 0]),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda e: pickle.loads(pickle.dumps(e)),
    "in data": lambda e: pickle.loads(pickle.dumps(Data(edge_index=e))),
    "ToDense": lambda e: T.ToDense()(Data(edge_index=e, num_nodes=30)).adj,
    "functional": lambda e: torch.func.functionalize(lambda x: x + 1)(e),
    "without torch functions": lambda e: _plainly_added(e),
    "nested index": lambda e: torch.arange(100)[[e]],
    "embedding": lambda e: torch.nn.Embedding(100, 2)(e),
}


def _plainly_added(value):
    with torch._C.DisableTorchFunctionSubclass():
        return value + 1


def arguments(value):
    """Ways to call a function with the value, and with new tensors beside it."""
    rows, zeros = torch.arange(value.size(-1)), torch.zeros(value.size(-1))
    return [
        (value,),
        (value, value),
        (value, 0),
        (value, -1),
        (value, torch.int32),
        (value, 0, value),
        (value, 0, 1),
        (value, 0, rows),
        (value, 0, rows, rows),
        (value, rows),
        (rows, value),
        (zeros, value),
        (zeros, 0, value),
        (zeros, 0, value, zeros),
        (zeros, (value,), zeros),
        (value, (slice(None), 0)),
        (zeros > 0, value, rows),
        ([value, value],),
        ([rows, value],),
        ("i,i->i", value, value),
    ]


def shown(result):
    """All that can be read of a result; nothing of guarded tensors."""
    if isinstance(result, GuardedTensor):
        return "guarded"
    if isinstance(result, Tensor):
        return "tensor", result.dtype, tuple(result.shape), result.to_dense().tolist()
    if isinstance(result, np.ndarray):
        return result.tolist()
    if isinstance(result, dict):
        return {name: shown(value) for name, value in result.items()}
    if isinstance(result, (list, tuple)):
        return [shown(value) for value in result]
    if isinstance(result, Data):
        return shown(result.to_dict())
    return repr(result)


def called(function, given):
    """What a call shows, in its result and in the tensors that it was given; and its error, if any."""
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` takes longer than the call
    try:
        return shown((function(*given), given)), True
    except SarError as error:
        return str(error)[:40], False
    except Exception as error:  # torch's own, of arguments that the function does not take
        return type(error).__name__, False


def renumbered(edges):
    """The same edges, with other numbers of their sources."""
    sources, destinations = edges.plain
    ends = torch.stack([edges.numbering.bounds[-1] - 1 - sources, destinations])
    return DistributedEdgeIndex.of(ends, edges.numbering, edges.num_dst)


KINDS = {
    "edge index": lambda edges: edges,
    "sources": lambda edges: edges[0],
    "part of the sources": lambda edges: edges[0][: edges.size(1) // 2],
    "column of sources": lambda edges: edges[0].view(-1, 1),
}


def leaks(mine):
    """The functions of which a result is another one where the sources have other numbers."""
    warnings.simplefilter("ignore")
    edges = sar.pyg.edge_index(sar.construct_full_graph(mine[0]))
    other, found, kept = renumbered(edges), [], 0
    functions = {each: arguments for every in get_overridable_functions().values() for each in every}
    functions |= {each: lambda value: [(value,)] for each in PAST_TORCH_FUNCTION.values()}
    functions.pop(Tensor._cdata.__get__)
    for kind, of in KINDS.items():
        for function, make_arguments in functions.items():
            name = getattr(function, "__qualname__", str(function))
            if function in SHOWN or any(part in str(name) for part in ARBITRARY):
                continue
            for one, two in zip(*(make_arguments(of(value)) for value in (edges, other)), strict=True):
                first, done = called(function, one)
                kept += done
                if done and (first, done) != called(function, two):
                    found.append((kind, str(function), one, first))
    return found, kept


@pytest.mark.parametrize("world_size", [1])
def test_no_function_of_torch_tells_the_numbers_of_sources(pool, world_size):
    parts = partition_in_memory(random_graph(8, 7, 12), torch.zeros(7, dtype=torch.int64), 1)
    for found, kept in pool.run(leaks, per_rank=deal(parts, random_data(parts)), timeout=300):
        assert not found, found[:10]
        assert kept > 100  # shapes, copies and such
