"""`convert_batchnorm`: norm layers of torch and PyTorch Geometric over the nodes of all workers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sar.errors import ConfigError
from sar.nn.statistics import DistributedBN1D


def convert_batchnorm(model: nn.Module, *, distributed: bool = True) -> nn.Module:
    """Let the norm layers of a model normalise by the nodes of all workers.

    Every `torch.nn.BatchNorm1d` becomes a `DistributedBN1D`. From PyTorch Geometric, `BatchNorm`, `DiffGroupNorm`,
    `GraphNorm`, `GraphSizeNorm`, `HeteroBatchNorm`, `InstanceNorm`, `LayerNorm` with mode "graph",
    `MeanSubtractionNorm` and `PairNorm` are converted. Modules, parameters, statistics and hooks remain the same
    objects, so optimizers and state dicts stay valid. Each call of a converted layer is collective. If it is given a
    batch vector, this assigns each node to one of several graphs on all workers.

    Args:
        model: a model, or a norm layer; changed in place.
        distributed: False leaves the layers as they are, and lets `sync_params` accept them: they normalise by the rows
            that they are given on one worker, such as those of a mini-batch. Default True.

    Returns:
        The model.

    Raises:
        ConfigError: for batch normalisation of other dimensions, for a lazy one, or for a layer of PyTorch Geometric
            whose forward is your own. Then nothing is changed.
    """
    of_pyg: Mapping[type[nn.Module], Callable[..., Tensor]] = {}
    if "torch_geometric" in sys.modules:  # otherwise the model has none of its layers
        from sar.adapters.pyg.norms import OVER_ALL

        of_pyg = OVER_ALL
    norms = []
    for name, module in model.named_modules():
        kind = next((kind for kind in of_pyg if isinstance(module, kind)), None)
        if kind is not None or isinstance(module, _BatchNorm):
            norms.append((name or "a", module, kind))
    if distributed:
        for name, module, kind in norms:
            if kind is None and type(module) is not nn.BatchNorm1d:
                if not isinstance(module, nn.SyncBatchNorm | DistributedBN1D):
                    raise ConfigError(
                        f"convert_batchnorm found {name} {type(module).__name__}; expected BatchNorm1d, as features of "
                        "nodes are (nodes, features). Run a lazy module once before, and replace others by hand."
                    )
            elif kind and type(module).forward is not kind.forward and not hasattr(module, "knows_its_rows"):
                raise ConfigError(
                    f"convert_batchnorm found {name} {type(module).__name__}, whose forward is your own; expected that "
                    f"of {kind.__name__}. Let it combine the workers by sar.nn.global_sum, and call "
                    "convert_batchnorm(layer, distributed=False) before, which leaves it as it is."
                )
        for _, module, kind in norms:
            if type(module) is nn.BatchNorm1d:
                module.__class__ = DistributedBN1D  # as torch does it with lazy modules
                vars(module).update(n_feats=module.num_features, distributed=None)
            elif kind and type(module).forward is kind.forward:
                vars(module)["forward"] = partial(of_pyg[kind], module)
    for _, module, _ in norms:
        vars(module)["knows_its_rows"] = True
    return model
