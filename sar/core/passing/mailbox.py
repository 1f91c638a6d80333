"""Python reduce functions: a destination's messages side by side, destinations of equal in-degree together.

This is the memory-hungry path: the worker holds the messages of all its edges.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from sar.core.passing.batches import Fields, NodeBatch, RowView, checked_results, results_on_nothing
from sar.core.relation import Relation

ReduceFunction = Callable[[NodeBatch], Mapping[str, Tensor]]


def reduce_mailboxes(
    relation: Relation, function: ReduceFunction, messages: dict[str, Tensor], nodes: Fields
) -> dict[str, Tensor]:
    """Call `function` once for every in-degree, as DGL does, and put the results together.

    Args:
        relation: whose destinations reduce.
        function: takes a `NodeBatch`, returns new fields, (N_batch, ...) each.
        messages: (E, ...) each, in the visible edge order.
        nodes: fields of the destinations, (N_dst, ...) each.

    Returns:
        The new fields, (N_dst, ...) each, 0 for nodes without messages.

    Raises:
        GraphError: where the function does not return a dictionary of a row for every node.
    """
    indptr, edge_ids = relation.in_edges
    pieces: list[Mapping[str, Tensor]] = []
    rows: list[Tensor] = []
    for degree in relation.in_degrees[relation.in_degrees > 0].unique().tolist():
        members = (relation.in_degrees == degree).nonzero().squeeze(1)
        slots = torch.arange(degree, device=members.device)
        chosen = edge_ids[(indptr[members].unsqueeze(1) + slots).flatten()]
        mailbox = {
            name: m.index_select(0, chosen).view(len(members), degree, *m.shape[1:]) for name, m in messages.items()
        }
        data = RowView(nodes, partial(torch.index_select, dim=0, index=members))
        batch = NodeBatch(members, data, mailbox, relation.etype[2])
        rows.append(members)
        pieces.append(checked_results(function, function(batch), len(members)))
    if not pieces:
        rows.append(relation.in_degrees.new_empty(0))
        pieces.append(_reduce_nothing(relation, function, messages, nodes))
    index = torch.cat(rows)
    results = {}
    for name in pieces[0]:
        values = torch.cat([piece[name] for piece in pieces])
        zeros = values.new_zeros(relation.num_dst, *values.shape[1:])
        results[name] = zeros.index_copy(0, index, values)
    return results


def _reduce_nothing(
    relation: Relation, function: ReduceFunction, messages: dict[str, Tensor], nodes: Fields
) -> Mapping[str, Tensor]:
    """What the function makes where no node has a message: no rows, but of the right fields and shapes."""

    def call(rows: int) -> Mapping[str, Tensor]:
        # Made of the messages, so that the backward reaches the other workers from here too.
        mailbox = {
            name: torch.cat([m[:0], m.new_zeros(rows, *m.shape[1:])]).unsqueeze(1) for name, m in messages.items()
        }
        data = RowView(nodes, lambda column: column.new_zeros(rows, *column.shape[1:]))
        members = relation.in_degrees.new_zeros(rows)
        return checked_results(function, function(NodeBatch(members, data, mailbox, relation.etype[2])), rows)

    return results_on_nothing(function, call)
