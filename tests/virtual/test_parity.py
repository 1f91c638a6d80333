"""What holds for worker processes holds for virtual workers: tests of the engine, with these in place of those.

`pytest --virtual W` runs any other test like that. What tensors weigh, torch.compile and recovery are not alike.
"""

from itertools import product

import pytest
from _pytest.mark.structures import ParameterSet

from tests.core import test_attention, test_autograd, test_checkpointing, test_gradient_rules, test_pruned_backward
from tests.nn import test_batch_norm, test_edge_softmax, test_embedding, test_fetch_rows
from tests.parity import test_conv_layers as convs
from tests.parity import test_hetero, test_messages, test_mfgs
from tests.virtual.virtual_pool import VirtualPool

SHAPES = [(1, 2), (1, 5), (2, 2), (2, 4)]
TESTS = [
    convs.test_python_functions_in_many_tiles,
    test_attention.test_scores_dropout_and_edge_weights,
    test_autograd.test_gradients,
    test_autograd.test_parameters_captured_by_a_message_function,
    test_batch_norm.test_batch_norm,
    test_checkpointing.test_gradients,
    test_checkpointing.test_many_tiles,
    test_edge_softmax.test_edge_softmax,
    test_embedding.test_full_graph_training_beside_shared_parameters,
    test_embedding.test_lookups_of_any_nodes,
    test_fetch_rows.test_rows_and_gradients,
    test_gradient_rules.test_a_gradient_wanted_on_one_rank_only,
    test_hetero.test_types_that_are_missing,
    test_messages.test_messages,
    test_mfgs.test_message_flow_graphs,
    test_pruned_backward.test_gradients,
]
QUICK = ["GATConv", "GraphConv both", "SAGEConv lstm", "SAGEConv mean"]


def cases():
    """Every test with every combination of its other parameters; all but a few of the first are slow."""
    for test in TESTS:
        names, choices = ["world_size"], [[None]]
        for mark in test.pytestmark:
            if mark.name == "parametrize" and mark.args[0] != "world_size":
                own = mark.args[0].split(", ") if isinstance(mark.args[0], str) else list(mark.args[0])
                names += own
                choices.append([ParameterSet.extract_from(one, len(own) == 1).values for one in mark.args[1]])
        for number, chosen in enumerate(product(*choices)):
            values = [value for one in chosen[1:] for value in one]
            arguments = dict(zip(names[1:], values, strict=True))
            yield pytest.param(test, arguments, id=f"{test.__module__.rpartition('_')[2]} {test.__name__[5:]} {number}")


@pytest.fixture
def virtual(world_size, each):
    """`each` virtual workers in each of `world_size` processes."""
    return VirtualPool(world_size, each)


def shapes(quick):
    """W and V; of a quick test those that differ most are in `make test`."""
    return [pytest.param(*shape, marks=[] if quick and shape in SHAPES[1:3] else pytest.mark.slow) for shape in SHAPES]


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize("world_size, each", shapes(True))
def test_common_convolutions(virtual, name):
    parts = convs.with_in_edges(virtual.world_size)
    convs.check(virtual, parts, convs.random_data(parts, convs.precision_of(name)), [(convs.conv_gradients, (name,))])


@pytest.mark.parametrize("name", convs.CONVS)
@pytest.mark.parametrize("world_size, each", shapes(False))
def test_convolution(virtual, name):
    convs.test_convolution(virtual, virtual.world_size, name, lambda *told: None)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch's Adagrad, in the reference
@pytest.mark.parametrize("test, arguments", list(cases()))
@pytest.mark.parametrize("world_size, each", shapes(False))
def test_engine(virtual, test, arguments):
    test(virtual, virtual.world_size, **arguments)
