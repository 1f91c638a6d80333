"""The public methods and attributes of DGL's graphs, and what each is on a distributed one: docs/graph_methods.md.

    python -m tests.core.graph.method_table

writes the table. `test_method_table.py` compares each row with DGL on two workers, and requires all public names.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import dgl.function as fn
import torch
from torch import Tensor

import sar
from sar.adapters.dgl.advice import INSTEAD
from tests.workers import REPOSITORY

PAGE = REPOSITORY / "docs" / "graph_methods.md"
BEGIN, END = "<!-- written by tests/core/graph/method_table.py -->\n", "<!-- end -->\n"
SINCE_2_1 = {"materialize_data"}


class Row(NamedTuple):
    """One method.

    kind: how the workers' values make up that of the whole graph, as in `tests/parity/harness.py`: "same" on each,
        rows of each "node" or "edge" one worker after the other, or a "sum".
    value: of a graph whose nodes have x and edges w; a tensor, or what `repr` tells.
    note: what else to know.
    """

    kind: str
    value: Callable[[Any], Any]
    note: str = ""


def _summed(graph: Any) -> Tensor:
    """The sum of weighted messages into each node."""
    with graph.local_scope():
        graph.update_all(fn.u_mul_e("x", "w", "m"), fn.sum("m", "out"))
        return graph.dstdata["out"]


def _along_edges(graph: Any) -> Tensor:
    with graph.local_scope():
        graph.apply_edges(fn.u_add_v("x", "x", "sum"))
        return graph.edata["sum"]


def _several(graph: Any) -> Tensor:
    with graph.local_scope():
        graph.multi_update_all({"_E": (fn.copy_u("x", "m"), fn.max("m", "out"))}, "sum")
        return graph.ndata["out"]


def _kept(graph: Any) -> Tensor:
    """The field as it is after a scope in which it was another."""
    with graph.local_scope():
        graph.ndata["x"] = graph.ndata["x"] + 1
    return graph.ndata["x"]


def _another(graph: Any) -> Tensor:
    other = graph.local_var()
    other.ndata["x"] = 2 * other.ndata["x"]
    return torch.cat([graph.ndata["x"], _summed(other)], dim=1)


GLOBAL = "whole graph: add `_global`, as in `graph.num_nodes_global()`"
ROWS = {
    "add_self_loop": Row("node", lambda g: _summed(_unweighted(g.add_self_loop())), "collective"),
    "apply_edges": Row("edge", _along_edges, "own edges, from sources on any worker; collective"),
    "batch_num_nodes": Row("sum", lambda g: g.batch_num_nodes()),
    "batch_size": Row("same", lambda g: g.batch_size),
    "canonical_etypes": Row("same", lambda g: g.canonical_etypes),
    "device": Row("same", lambda g: str(g.device)),
    "dstdata": Row("node", lambda g: g.dstdata["x"], "on a full graph the same fields as `srcdata` and `ndata`"),
    "dstnodes": Row("sum", lambda g: g.dstnodes().shape[0], "local IDs; `graph.node_ids()` are global"),
    "dsttypes": Row("same", lambda g: g.dsttypes),
    "edata": Row("edge", lambda g: g.edata["w"], "of the edges into own nodes"),
    "edges": Row(
        "edge", lambda g: g.edges["_E"].data["w"], f"`graph.edges[etype].data`; for `graph.edges()`, {INSTEAD['edges']}"
    ),
    "etypes": Row("same", lambda g: g.etypes),
    "idtype": Row("same", lambda g: g.idtype),
    "in_degrees": Row("node", lambda g: g.in_degrees(), "of own nodes, with edges from all workers"),
    "is_block": Row("same", lambda g: g.is_block),
    "is_homogeneous": Row("same", lambda g: g.is_homogeneous),
    "local_scope": Row("node", _kept),
    "local_var": Row("node", _another),
    "multi_update_all": Row("node", _several, "as `update_all`"),
    "ndata": Row("node", lambda g: g.ndata["x"]),
    "nodes": Row("sum", lambda g: g.nodes().shape[0], "local IDs; `graph.node_ids()` are global"),
    "ntypes": Row("same", lambda g: g.ntypes),
    **{
        name: Row("sum", lambda g, name=name: getattr(g, name)(), GLOBAL)
        for prefix in ("num", "number_of")
        for name in (f"{prefix}_nodes", f"{prefix}_src_nodes", f"{prefix}_dst_nodes", f"{prefix}_edges")
    },
    "out_degrees": Row("node", lambda g: g.out_degrees(), "of own nodes, with edges into all workers"),
    "remove_self_loop": Row("node", lambda g: _summed(g.remove_self_loop()), "collective"),
    "srcdata": Row("node", lambda g: g.srcdata["x"], "own nodes only"),
    "srcnodes": Row("sum", lambda g: g.srcnodes().shape[0], "local IDs"),
    "srctypes": Row("same", lambda g: g.srctypes),
    "to": Row("node", lambda g: _summed(g.to("cpu"))),
    "to_canonical_etype": Row("same", lambda g: g.to_canonical_etype("_E")),
    "update_all": Row("node", _summed, "messages from all workers; collective"),
}


def _unweighted(graph: Any) -> Any:
    graph.edata["w"] = torch.ones_like(graph.edata["w"])
    return graph


def methods() -> dict[str, tuple[str, str]]:
    """By name: "whole graph", "own rows" or "not here", and the note."""
    import dgl

    public = {name for name in dir(dgl.DGLGraph) if not name.startswith("_")} | SINCE_2_1
    rows = {}
    for name in sorted(public):
        if name in ROWS:
            rows[name] = ("whole graph" if ROWS[name].kind == "same" else "own rows", ROWS[name].note)
        else:
            rows[name] = ("not here", INSTEAD.get(name, ""))
    return rows


def table() -> str:
    """Two tables, in Markdown: methods that are there, and the others by the advice that their errors give."""
    there: dict[tuple[str, str], list[str]] = {}
    absent: dict[str, list[str]] = {}
    for name, (here, note) in methods().items():
        if here == "not here":
            absent.setdefault(note, []).append(f"`{name}`")
        else:
            there.setdefault((here, note), []).append(f"`{name}`")
    lines = ["| method or attribute | value | notes |", "| --- | --- | --- |"]
    lines += [f"| {', '.join(names)} | {here} | {note} |" for (here, note), names in there.items()]
    lines += ["", "These raise an error with advice:", ""]
    lines += ["| method or attribute | instead |", "| --- | --- |"]
    lines += [f"| {', '.join(names)} | {advice} |" for advice, names in absent.items()]
    return "\n".join(lines) + "\n"


def distributed_only() -> list[str]:
    """Public names that DGL's graphs do not have."""
    return sorted(name for name in dir(sar.GraphShardManager) if not name.startswith("_") and name not in methods())


if __name__ == "__main__":
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}")
