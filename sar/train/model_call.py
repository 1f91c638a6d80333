"""How `sar infer` calls a model that a user's function makes: as scripts for DGL do, or for PyTorch Geometric."""

from collections.abc import Iterable, Mapping
from inspect import Parameter, signature
from itertools import chain
from typing import Any

from torch import Tensor, nn

from sar.core.graph.graph import GraphShardManager
from sar.errors import ConfigError, PartitionError
from sar.train.counted_graph import INPUTS


def input_features(node_features: Mapping[str, Tensor], ntypes: Iterable[str]) -> dict[str, Tensor]:
    """The features that models start from, (N, F) each, of the node types that have any."""
    named = [(ntype, f"{ntype}/{name}") for name in reversed(INPUTS) for ntype in ntypes]
    found = {ntype: node_features[name] for ntype, name in named if name in node_features}
    if not found:
        raise PartitionError(f"no node type has a feature {' or '.join(INPUTS)}, which models start from.")
    return found


def call_model(model: nn.Module, graph: GraphShardManager, node_features: Mapping[str, Tensor]) -> Any:
    """Run a model on this worker's nodes, with features in the dtype of its weights; called by all workers together.

    A model with modules of PyTorch Geometric is called as `model(x, edge_index)`, or with dictionaries if there are
    several types. Further parameters of its forward get the field of their name of `sar.pyg.load_partition`'s data, if
    it is there; a forward with one parameter gets the data. Other models are called as `model(graph, x)`.
    """
    dtype = next((value.dtype for value in model.state_dict().values() if value.is_floating_point()), None)

    def cast(values: Tensor) -> Tensor:
        return values.to(dtype) if values.is_floating_point() else values

    kinds = chain.from_iterable(type(module).__mro__ for module in model.modules())
    if not any(kind.__module__.partition(".")[0] == "torch_geometric" for kind in kinds):
        x = {ntype: cast(rows) for ntype, rows in input_features(node_features, graph.ntypes).items()}
        return model(graph, x if len(graph.ntypes) > 1 else next(iter(x.values())))

    from sar.adapters.pyg.graph import make_data

    data = make_data(node_features, graph).apply(cast)
    declared = signature(model.forward).parameters.values()
    parameters = [each for each in declared if each.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)]
    if len(parameters) == 1:
        return model(data)
    several, names = not graph.is_homogeneous, data.keys()

    def field(name: str) -> Any:
        return data.collect(name) if several else data[name]

    fields = {}
    for each in parameters[2:]:
        name = each.name.removesuffix("_dict")
        if name in names:
            fields[each.name] = field(name)
        elif each.default is Parameter.empty:
            raise ConfigError(
                f"the model's forward takes {each.name!r}; expected one of {sorted(names)}. Partition the graph with "
                "such a feature, or give the parameter a default."
            )
    return model(field("x"), field("edge_index"), **fields)
