"""The tables of what was compared with one machine, in docs/layers.md and docs/pyg_layers.md; their pages are by hand.

python -m tests.parity.tables        # writes them
"""

from collections.abc import Iterable
from pathlib import Path

import sar  # noqa: F401  before anything imports dgl
from tests.parity import pyg_layers
from tests.parity.conv_layers import NEEDS_PATCH, REGISTRY, TAKES_BLOCKS, among
from tests.parity.pyg_functions import KINDS
from tests.workers import REPOSITORY


def by_layer(names: Iterable[str], default: str = "") -> dict[str, list[str]]:
    """The options of each layer or function, of names such as `GATConv edges`."""
    options: dict[str, list[str]] = {}
    for layer, _, option in (name.partition(" ") for name in names):
        options.setdefault(layer, []).append(option or default)
    return options


def layers_of_dgl() -> list[tuple[str, ...]]:
    """Options of a layer share a row if they run alike."""
    rows = [("layer", "options", "modes", "MFG"), ("---",) * 4]
    options: dict[tuple[str, str], list[str]] = {}
    for name in REGISTRY:
        layer, _, option = name.partition(" ")
        words = (option or "default") + "†" * among(NEEDS_PATCH, name)
        options.setdefault((layer, "yes" if among(TAKES_BLOCKS, name) else "-"), []).append(words)
    return rows + [(layer, "; ".join(words), "1, 2, 3", blocks) for (layer, blocks), words in options.items()]


def layers_of_pyg() -> list[tuple[str, ...]]:
    """Layers with the same options share a row."""
    layers: dict[str, list[str]] = {}
    for layer, options in by_layer(pyg_layers.LAYERS, "plain").items():
        layers.setdefault("; ".join(options), []).append(layer)
    return [("layers", "options"), ("---", "---"), *((", ".join(names), options) for options, names in layers.items())]


def functions_of_pyg() -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("of", "exact", "refused", "local by nature"), ("---",) * 4]
    for kind, (exact, refused, local) in KINDS.items():
        why: dict[str, list[str]] = {}
        for name, (_, reason) in local.items():
            why.setdefault(reason, []).append(name)
        reasons = "; ".join(f"{reason}: {listed(names)}" for reason, names in why.items())
        rows.append((f"`{kind}`", listed(exact), listed(refused), reasons))
    return rows


def listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" + f" ({', '.join(how)})" * any(how) for name, how in by_layer(names).items())


DOCS = REPOSITORY / "docs"
TABLES = {
    "layers of DGL": (DOCS / "layers.md", layers_of_dgl),
    "layers of PyTorch Geometric": (DOCS / "pyg_layers.md", layers_of_pyg),
    "functions of PyTorch Geometric": (DOCS / "pyg_layers.md", functions_of_pyg),
}
"""The page of each, and what makes its rows."""


def with_table(name: str) -> tuple[Path, str]:
    """A page, and its text with the table as it is to be."""
    page, rows = TABLES[name]
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows())
    begin, end = f"<!-- table: {name}, of tests/parity/tables.py -->\n", "<!-- end -->\n"
    before, rest = page.read_text().split(begin)
    return page, before + begin + table + end + rest.partition(end)[2]


if __name__ == "__main__":
    for name in TABLES:
        page, text = with_table(name)
        page.write_text(text)
