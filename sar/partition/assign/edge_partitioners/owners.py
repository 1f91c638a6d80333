"""From parts of edges to parts of nodes: what edge partitioners need before a GNN can use them.

[Note: owners of nodes] An edge partitioner puts every edge into a part and copies nodes that have edges in several. A
GNN needs each node in one part, its owner, together with all its in-edges (Huang et al., "SDT-GNN", section II-B, show
what happens otherwise). So the owner is the part that got most of the node's edges, and the writer then completes the
neighbour list there. Both ends of an edge vote for the edge's part: where both are owned by it, the edge is not cut.

Exact counts would take O(N P) memory. Instead each node keeps the `SLOTS` parts with most votes by the algorithm of
Misra and Gries (1982): a vote for another part takes one from each of them. A part with more than 1 / (SLOTS + 1) of
the node's edges is always among them, and up to `SLOTS` parts are counted exactly.

Where the favourite is full, the node goes to the next part among its slots that has room; nodes with most votes choose
first. Nodes that find no room, or have no edges, go to the least occupied part.
"""

import numpy as np

from sar.partition.assign.assignment import AssignmentTask
from sar.partition.assign.balance import constraints, deal, has_room, weight_of
from sar.partition.assign.compiled import compiled
from sar.partition.assign.settle import settle
from sar.partition.graph_data import Array

SLOTS = 4
Ballot = tuple[Array, Array]
"""The parts voted for, (N, SLOTS), and their votes, (N, SLOTS); a slot without votes is empty."""


def new_ballot(num_nodes: int, num_parts: int) -> Ballot:
    """Empty slots for all nodes."""
    part_dtype = np.int16 if num_parts <= np.iinfo(np.int16).max else np.int32
    return np.zeros((num_nodes, SLOTS), part_dtype), np.zeros((num_nodes, SLOTS), np.int32)


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
    """The owner of every node, (N,) int32, as told in [Note: owners of nodes], within the constraints of the task."""
    parts, votes = ballot
    num_nodes = len(parts)
    rules = constraints(num_nodes, task.num_parts, task.weights, task.imbalance)
    loads = np.zeros((len(rules.limits), task.num_parts))
    order = np.random.default_rng(task.seed).permutation(num_nodes)
    order = order[np.argsort(-votes.max(axis=1, initial=0)[order], kind="stable")]
    owner = np.empty(num_nodes, np.int32)
    _choose(order, ballot, rules.weights, rules.limits, loads, owner)
    homeless = order[owner[order] < 0]
    owner[homeless] = deal(np.ones(len(homeless), np.int64), rules.weights[:, homeless], rules.means, loads)
    task.progress("choosing owners", 1.0)
    return settle(task, owner)


@compiled
def _choose(order: Array, ballot: Ballot, weights: Array, limits: Array, loads: Array, owner: Array) -> None:
    """Give nodes to the part with most votes that has room, or -1; of equals, the part of the smallest number."""
    parts, votes = ballot
    for node in order:
        owner[node] = -1
        most = 0
        for slot in range(SLOTS):
            part, number = parts[node, slot], votes[node, slot]
            better = number > most or (number == most and number > 0 and part < owner[node])
            if better and has_room(weights, limits, loads, node, part):
                owner[node], most = part, number
        if owner[node] >= 0:
            for which in range(len(limits)):
                loads[which, owner[node]] += weight_of(weights, which, node)
