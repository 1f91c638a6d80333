"""Runs a user's model on one worker's graph without values, forward, backward and optimiser, and counts.

[Note: what is assumed]
Adam, cross-entropy on the nodes of `train_mask`, and `PartitionData` let go of after `construct_full_graph`. The
allocator gives freed memory back, as `initialize_comms` sets it (`docs/memory.md`): then resident memory is what is
live. What code takes before the first epoch differs between installations: `sar plan` measures it.

[Note: which epoch]
The second one is counted. By then there is all that the first one makes for good: edges grouped by source, tiles, and
the optimiser's state.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from sar.comm import session
from sar.comm.collectives import gather_grads
from sar.comm.statistics import statistics
from sar.core.graph.graph import GraphShardManager
from sar.errors import ConfigError, SarError
from sar.train.counted_graph import META, counted_graph
from sar.train.counting_group import CallTraffic, CountingGroup
from sar.train.graph_counts import GraphCounts, GraphInfo
from sar.train.meta_memory import CountedPool, MetaMemory

MakeModel = Callable[[GraphInfo], nn.Module]


@dataclass(frozen=True)
class TrialEpoch:
    """What one worker takes in an epoch.

    calls: its distributed calls.
    sent: all bytes sent, as `sar.comm.statistics()` counts them.
    parameters: bytes of the model's parameters.
    structure_before, structure: bytes of the graph as constructed, and in training.
    rise: bytes of tensors at the peak, beyond the graph as constructed, data and parameters.
    buffers: of which in message buffers.
    """

    calls: list[CallTraffic]
    sent: int
    parameters: int
    structure_before: int
    structure: int
    rise: int
    buffers: int


def try_epoch(counts: GraphCounts, worker: int, make_model: MakeModel) -> TrialEpoch:
    """Train for two epochs without values and count the second: see [Note: which epoch].

    Args:
        counts: of all workers.
        worker: the one to look at.
        make_model: called with the `GraphInfo`; its model is called as `model(graph, x)`, with x (N_i, F) features of
            this worker's nodes, or a dictionary of them by node type where there are several.

    Raises:
        ConfigError: the model cannot be run without values.
    """
    group, memory = CountingGroup(worker, counts.num_workers), MetaMemory()
    with session.standing_in(group, CountedPool(memory)):
        graph, structure = counted_graph(counts, worker, group)
        structure_before = structure.nbytes
        model = on_meta(make_model, counts.info)
        trainer = Trainer(counts, worker, graph, model)
        with memory:
            before = memory.live
            trainer.epoch()
            group.calls_made.clear()
            sent = statistics().bytes_sent
            memory.restart()
            trainer.epoch()
        group.count_messages()
        return TrialEpoch(
            calls=group.calls_made,
            sent=statistics().bytes_sent - sent,
            parameters=sum(parameter.nbytes for parameter in model.parameters()),
            structure_before=structure_before,
            structure=structure.nbytes,
            rise=memory.peak - before,
            buffers=memory.peak_buffers,
        )


class Trainer:
    """The loop of a training script.

    x: the features.
    """

    def __init__(self, counts: GraphCounts, worker: int, graph: GraphShardManager, model: nn.Module) -> None:
        nodes = counts.nodes[worker]
        features = {
            ntype: torch.empty(nodes[ntype], width, device=META) for ntype, width in counts.info.in_widths.items()
        }
        self.x: Any = features if len(nodes) > 1 else features[counts.info.ntypes[0]]
        self._graph = graph
        self._model = model
        self._optimizer = torch.optim.Adam(model.parameters())
        self._train_nodes = counts.train_nodes[worker]

    def epoch(self) -> None:
        try:
            loss = self._loss(self._model(self._graph, self.x))
            self._optimizer.zero_grad()
            loss.backward()
            gather_grads(self._model)
            self._optimizer.step()
        except SarError:
            raise
        except (RuntimeError, NotImplementedError) as error:
            raise ConfigError(
                f"the model cannot be run on tensors that have sizes and no values: {error} Operations whose results "
                "have a size that depends on values (masks, unique, Python reduce functions) cannot be planned."
            ) from error

    def _loss(self, outputs: Any) -> Tensor:
        """Cross-entropy of outputs (N_i, C) on the training nodes; the sum of those of other shapes."""
        losses = []
        for output in tree_leaves(outputs):
            if output.dim() == 2:
                chosen = torch.empty(min(self._train_nodes, len(output)), dtype=torch.int64, device=META)
                labels = torch.empty(len(output), dtype=torch.int64, device=META)
                losses.append(functional.cross_entropy(output[chosen], labels[chosen], reduction="sum"))
            else:
                losses.append(output.sum())
        return torch.stack(losses).sum() if len(losses) > 1 else losses[0]


def on_meta(make_model: MakeModel, info: GraphInfo) -> nn.Module:
    """The model, without values."""
    with META:
        model = make_model(info)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the function that makes the model returned a {type(model).__name__}; expected a Module.")
    return model.to(META)
