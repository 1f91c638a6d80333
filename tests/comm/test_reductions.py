"""Every reduction over workers with every dtype, at the limits of each: torch's result of all rows, or an error."""

from functools import partial

import pytest
import torch
import torch_geometric.nn as pyg
from torch.distributed import ReduceOp

import sar
from sar import comm
from tests.core.attempts import catch

DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
)
GRAPHS = torch.tensor([0, 1, 1, 0])  # of the four rows


def rows_of(dtype):
    """Four rows, of usual numbers in the first column, and at the limits in the others."""
    if dtype == torch.bool:
        return torch.tensor([[0, 1, 0], [0, 1, 1], [0, 1, 0], [0, 1, 0]], dtype=dtype)
    if dtype.is_complex:
        real = torch.tensor([[1.5, torch.nan], [-2.5, 1], [3, 1], [-3, 1]], dtype=dtype.to_real())
        return torch.complex(real, real.flip(0))
    if dtype.is_floating_point:
        most, tiny = torch.finfo(dtype).max, torch.finfo(dtype).tiny
        columns = [1.5, -2.5, 3, -3], [most, most, 0, 0], [torch.inf, 1, 1, 1], [torch.inf, 1, -torch.inf, 1]
        columns = *columns, [torch.nan, 1, 2, 3], [1, 2, torch.nan, 3], [-torch.inf] * 4, [tiny] * 4
        return torch.tensor(columns, dtype=torch.float64).T.to(dtype)
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    return torch.tensor([[1, 2, 2, 3], [most, most, 0, 0], [least, least, most, 1], [most] * 4], dtype=dtype).T


def of_pairs(function):
    """What `function` gives of rows 0 and 2, and of rows 1 and 3."""
    return lambda x: function(x.view(2, 2, -1))


def pairwise(function):
    return lambda x: function(x[:2], x[2:])


def all_reduced(x, op):
    x = x.clone()
    comm.all_reduce(x, op)
    return x


def pooled(x, pool):
    return pool(x, GRAPHS[: len(x)] if sar.rank() == 0 else GRAPHS[4 - len(x) :], 2)


REDUCED = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "AVG": lambda x, y: (x.float() + y.float()).div(2).to(x.dtype) if x.itemsize == 2 else (x + y) / 2,
    "MAX": torch.maximum,
    "MIN": torch.minimum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
OF_EQUAL_SHARES = {
    "all_sum": (sar.all_sum, of_pairs(lambda x: x.sum(0))),
    "all_max": (sar.all_max, of_pairs(lambda x: x.amax(0))),
    "global_sum": (sar.nn.global_sum, of_pairs(lambda x: x.sum(0))),
    **{
        f"all_reduce {name}": (partial(all_reduced, op=getattr(ReduceOp, name)), pairwise(function))
        for name, function in REDUCED.items()
    },
}
OF_ROWS = {
    "global_mean": (sar.nn.global_mean, lambda x: x.mean(0)),
    "global_max": (sar.nn.global_max, lambda x: x.amax(0)),
    **{
        f"{kind} of {graphs} graphs": (
            partial(pooled, pool=ours) if graphs == 2 else ours,
            partial(theirs, batch=GRAPHS if graphs == 2 else None, size=graphs),
        )
        for kind in ("add", "mean", "max")
        for ours, theirs in [(getattr(sar.pyg, f"global_{kind}_pool"), getattr(pyg, f"global_{kind}_pool"))]
        for graphs in (1, 2)
    },
}
OPERATIONS = OF_EQUAL_SHARES | OF_ROWS
REFUSED_BY_TORCH = {"NotImplementedError", "RuntimeError", "TypeError"}


def attempt(function, *args):
    found = []
    failure = catch(lambda: found.append(function(*args)))
    if failure is None:
        return found[0]
    sar.recover()
    return failure


def reduce_rows(name, share):
    """Of every dtype what the operation gives, or its failure, of the first rows on worker 0 and the others on 1."""
    sar.Config.timeout = 20
    rows = [x[:share] if sar.rank() == 0 else x[share:] for x in map(rows_of, DTYPES)]
    return [attempt(OPERATIONS[name][0], x) for x in rows]


@pytest.mark.parametrize("name, share", [*((name, 2) for name in OPERATIONS), *((name, 4) for name in OF_ROWS)])
@pytest.mark.parametrize("world_size", [2])
def test_is_what_torch_gives_of_all_rows_or_refused(pool, world_size, name, share):
    for of_worker in pool.run(reduce_rows, name, share):
        for dtype, found in zip(DTYPES, of_worker, strict=True):
            expected = attempt_on_one_machine(OPERATIONS[name][1], rows_of(dtype))
            if isinstance(found, torch.Tensor):
                assert isinstance(expected, torch.Tensor) or name == "all_max", (dtype, found, expected)
            elif "SarError" in found.bases:
                assert dtype not in (torch.float32, torch.float64) or name[-4:] in (" BOR", "BAND", "BXOR"), found
            else:  # by torch itself, as on one machine
                assert found.kind in REFUSED_BY_TORCH, found
                assert not isinstance(expected, torch.Tensor), (dtype, found)
            if isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor):
                torch.testing.assert_close(found, expected, equal_nan=True, msg=partial("{}: {}".format, dtype))


def attempt_on_one_machine(function, x):
    try:
        return function(x)
    except (RuntimeError, TypeError) as error:
        return error


NUMBERS = [2**62, -(2**63), 2**63 - 1, 2**63, True, False, 0.5, float("nan"), 1j, torch.int8, "text", None]


def reduce_numbers():
    sar.Config.timeout = 20
    return [[attempt(call, number) for call in (sar.all_sum, sar.all_max)] for number in NUMBERS]


@pytest.mark.parametrize("world_size", [2])
def test_numbers_of_python(pool, world_size):
    for of_worker in pool.run(reduce_numbers):
        for number, found in zip(NUMBERS, of_worker, strict=True):
            if isinstance(number, (int, float)) and number != 2**63:
                assert str(found) == str([number + number, number]), "with the same types"
            else:
                assert {failure.kind for failure in found} == {"ConfigError"}, (number, found)


def pool_with_size(size, given):
    batch = torch.tensor([0, 1, 2])
    if given == "later":
        return pyg.global_add_pool(torch.ones(3, 2), sar.pyg.batch_vector(batch), size)
    return sar.pyg.global_add_pool(torch.ones(3, 2), batch - int(given == "negative"), size)


def pool_with_sizes():
    sar.Config.timeout = 20
    cases = [(1, "at once"), (2, "at once"), (1, "later"), (2, "later"), (3, "negative"), (None, "negative")]
    return [attempt(pool_with_size, *case) for case in cases], pool_with_size(4, "at once")


@pytest.mark.parametrize("world_size", [2])
def test_graphs_beyond_the_size_are_refused(pool, world_size):
    for refused, right in pool.run(pool_with_sizes):
        assert {failure.kind for failure in refused} == {"GraphError"}, refused
        assert torch.equal(right, torch.tensor([[2.0, 2], [2, 2], [2, 2], [0, 0]]))
