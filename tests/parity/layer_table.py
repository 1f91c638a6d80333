"""The table of docs/layers.md, of the layers that `test_conv_layers.py` compares with DGL in all modes.

    python -m tests.parity.layer_table

writes it. The rest of the page is written by hand.
"""

import sar  # noqa: F401  before anything imports dgl
from tests.parity.conv_layers import NEEDS_PATCH, REGISTRY, TAKES_BLOCKS, among
from tests.workers import REPOSITORY

PAGE = REPOSITORY / "docs" / "layers.md"
BEGIN, END = "<!-- written by tests/parity/layer_table.py -->\n", "<!-- end -->\n"


def table() -> str:
    """In Markdown; options of a layer share a row if they run alike."""
    options: dict[tuple[str, str], list[str]] = {}
    for name in REGISTRY:
        layer, _, option = name.partition(" ")
        words = (option or "default") + "†" * among(NEEDS_PATCH, name)
        options.setdefault((layer, "yes" if among(TAKES_BLOCKS, name) else "-"), []).append(words)
    rows = [(layer, "; ".join(words), "1, 2, 3", blocks) for (layer, blocks), words in options.items()]
    return "".join(f"| {' | '.join(row)} |\n" for row in [("layer", "options", "modes", "MFG"), ("---",) * 4, *rows])


if __name__ == "__main__":
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{table()}{END}{rest.split(END)[1]}")
