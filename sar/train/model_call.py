"""Calls a user's model for `sar infer` and `sar plan`, in the way of scripts for DGL or for PyTorch Geometric."""

from collections.abc import Iterable, Mapping
from inspect import Parameter, signature
from itertools import chain
from typing import Any

from torch import Tensor, nn

from sar.core.graph.graph import GraphShardManager
from sar.errors import ConfigError, PartitionError
from sar.train.counted_graph import INPUTS


def input_features(node_features: Mapping[str, Tensor], ntypes: Iterable[str]) -> dict[str, Tensor]:
    """The input features of models, (N, F) each, by node type with features."""
    named = [(ntype, f"{ntype}/{name}") for name in reversed(INPUTS) for ntype in ntypes]
    found = {ntype: node_features[name] for ntype, name in named if name in node_features}
    if not found:
        raise PartitionError(f"no node type has a feature {' or '.join(INPUTS)}, which models start from.")
    return found


def call_model(model: nn.Module, graph: GraphShardManager, node_features: Mapping[str, Tensor]) -> Any:
    """Run a model on this worker's nodes, with features in the dtype of its weights. A collective call.

    A model with modules of PyTorch Geometric is called as `model(x, edge_index)`, or with dictionaries if there are
    several types. Further parameters of its forward receive the attribute of the same name of
    `sar.pyg.load_partition`'s data, if any; a forward with one parameter receives the data. Other models are called as
    `model(graph, x)`.
    """
    dtype = next((value.dtype for value in model.state_dict().values() if value.is_floating_point()), None)

    def cast(values: Tensor) -> Tensor:
        return values.to(dtype) if values.is_floating_point() else values

    classes = chain.from_iterable(type(module).__mro__ for module in model.modules())
    if not any(kind.__module__.partition(".")[0] == "torch_geometric" for kind in classes):
        x = {ntype: cast(rows) for ntype, rows in input_features(node_features, graph.ntypes).items()}
        return model(graph, x if len(graph.ntypes) > 1 else next(iter(x.values())))

    from sar.adapters.pyg.graph import make_data

    data = make_data(node_features, graph).apply(cast)
    kinds_of_many = Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD
    parameters = [each for each in signature(model.forward).parameters.values() if each.kind not in kinds_of_many]
    if len(parameters) == 1:
        return model(data)
    field = data.__getitem__ if graph.is_homogeneous else data.collect
    names = {each.name: each.name.removesuffix("_dict") for each in parameters[2:]}
    fields = {own: field(name) for own, name in names.items() if name in data}
    if lacking := [each.name for each in parameters[2:] if each.default is each.empty and each.name not in fields]:
        raise ConfigError(
            f"the model's forward takes {', '.join(lacking)}; expected some of {', '.join(data.keys())}. Partition the "
            "graph with such features, or give the parameters defaults."
        )
    return model(field("x"), field("edge_index"), **fields)
