"""From parts of edges to parts of nodes: what edge partitioners need before a GNN can use them.

[Note: owners of nodes] An edge partitioner puts every edge into a part and copies nodes that have edges in several. A
GNN needs each node in one part, its owner, together with all its in-edges (Huang et al., "SDT-GNN", section II-B, show
what happens otherwise). So the owner is the part that got most of the node's edges, and the writer then completes the
neighbour list there. Both ends of an edge vote for the edge's part: where both are owned by it, the edge is not cut.

Exact counts would take O(N P) memory. Instead each node keeps the `SLOTS` parts with most votes by the algorithm of
Misra and Gries (1982): a vote for another part takes one from each of them. A part with more than 1 / (SLOTS + 1) of
the node's edges is always among them, and up to `SLOTS` parts are counted exactly.

Where the part with most votes is full, the node goes to the next among its slots that is not; nodes with most votes
choose first. Nodes that find all of them full, or have no edges, go to the part with the smallest load.
"""

from typing import NamedTuple

import numpy as np

from sar.data.arrays import Array
from sar.partition.assign.rebalance import rebalance
from sar.partition.assign.task import (
    AssignmentTask,
    Constraints,
    add_load,
    compiled,
    has_capacity,
    list_schedule,
    part_means,
)

SLOTS = 4


class Ballot(NamedTuple):
    """The parts voted for, (N, SLOTS), and their votes, (N, SLOTS) int32; a slot without votes is empty."""

    parts: Array
    votes: Array


def new_ballot(num_nodes: int, num_parts: int) -> Ballot:
    """Empty slots for all nodes."""
    part_dtype = np.int16 if num_parts <= np.iinfo(np.int16).max else np.int32
    return Ballot(np.zeros((num_nodes, SLOTS), part_dtype), np.zeros((num_nodes, SLOTS), np.int32))


@compiled
def vote(ballot: Ballot, node: int, part: int) -> None:
    """Count an edge of a node that was put into a part."""
    parts, votes = ballot
    empty = -1
    for slot in range(SLOTS):
        if votes[node, slot] == 0:
            if empty < 0:
                empty = slot
        elif parts[node, slot] == part:
            votes[node, slot] += 1
            return
    if empty >= 0:
        parts[node, empty] = part
        votes[node, empty] = 1
    else:
        for slot in range(SLOTS):
            votes[node, slot] -= 1


def choose_owners(task: AssignmentTask, ballot: Ballot) -> Array:
    """The owner of every node, (N,) int32, as in [Note: owners of nodes], within the constraints of the task."""
    num_nodes = len(ballot.parts)
    constraints = task.constraints()
    loads = np.zeros((task.num_parts, len(constraints.limits)))
    order = np.random.default_rng(task.seed).permutation(num_nodes)
    order = order[np.argsort(-ballot.votes.max(axis=1, initial=0)[order], kind="stable")]
    owner = np.full(num_nodes, -1, np.int32)
    _choose(order, ballot, constraints, loads, owner)
    left = order[owner[order] < 0]
    means = part_means(constraints.weights, task.num_parts)
    owner[left] = list_schedule(constraints.weights[left], means, loads)
    task.progress("choosing owners", 1.0)
    return rebalance(task, owner)


@compiled
def _choose(order: Array, ballot: Ballot, constraints: Constraints, loads: Array, owner: Array) -> None:
    """Give nodes to the part with most votes that is not full; of equals, the part of the smallest number."""
    parts, votes = ballot
    for node in order:
        most = 0
        for slot in range(SLOTS):
            part, number = parts[node, slot], votes[node, slot]
            better = number > most or (number == most and number > 0 and part < owner[node])
            if better and has_capacity(constraints, loads, node, part):
                owner[node], most = part, number
        if owner[node] >= 0:
            add_load(constraints, loads, node, owner[node], 1.0)
