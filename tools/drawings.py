"""Drawings of how sar works, for the pages: `python -m tools.drawings` writes them to docs/pictures/ as SVG.

Each is computed, not sketched: halos from the edges, schedules from the rule by which workers exchange, the curves of
memory from docs/figures.json. They are narrow, so that they can be read on a phone.
"""

import json
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
FOLDER = DOCS / "pictures"

WIDTH = 480
OWNERS = ("#0072b2", "#d55e00", "#009e73")
"""Colours of workers 0, 1 and 2, told apart by the colour-blind too (Okabe and Ito)."""
INK, GREY, PALE = "#222222", "#888888", "#e4e4e4"

Point = tuple[float, float]


class Drawing:
    """An SVG picture, written element by element."""

    def __init__(self, height: float, title: str):
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img" '
            f'font-family="sans-serif" font-size="14">',
            f"<title>{title}</title>",
            '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="6" markerHeight="6" '
            'orient="auto-start-reverse"><path d="M0,0 L10,5 L0,10 z" fill="context-stroke"/></marker></defs>',
            f'<rect width="{WIDTH}" height="{height:g}" rx="6" fill="white"/>',
        ]

    def text(self, x: float, y: float, words: str, anchor: str = "start", colour: str = INK, size: int = 14) -> None:
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}" font-size="{size}">{words}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, fill: str, stroke: str = "none") -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}" stroke="{stroke}"/>'
        )

    def circle(self, at: Point, fill: str, stroke: str, label: str, colour: str) -> None:
        self.parts.append(
            f'<circle cx="{at[0]:g}" cy="{at[1]:g}" r="13" fill="{fill}" stroke="{stroke}" stroke-width="2"/>'
        )
        self.text(at[0], at[1] + 5, label, "middle", colour)

    def line(self, start: Point, end: Point, colour: str = GREY, *, tip: bool = False, dashed: bool = False) -> None:
        more = ' marker-end="url(#tip)"' * tip + ' stroke-dasharray="5 4"' * dashed
        self.parts.append(
            f'<line x1="{start[0]:g}" y1="{start[1]:g}" x2="{end[0]:g}" y2="{end[1]:g}" stroke="{colour}" '
            f'stroke-width="1.6"{more}/>'
        )

    def path(self, points: Iterable[Point], colour: str, fill: str = "none") -> None:
        ends = " ".join(f"{x:g},{y:g}" for x, y in points)
        shape = "polyline" if fill == "none" else "polygon"
        self.parts.append(f'<{shape} points="{ends}" stroke="{colour}" stroke-width="2" fill="{fill}"/>')

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>\n"])


NODES: dict[int, tuple[Point, int]] = {
    0: ((70, 60), 0), 1: ((150, 45), 0), 2: ((110, 125), 0),
    3: ((300, 50), 1), 4: ((390, 70), 1), 5: ((330, 130), 1),
    6: ((150, 215), 2), 7: ((245, 190), 2), 8: ((320, 225), 2),
}  # fmt: skip
"""Place and owner of every node of the example."""
EDGES = [(0, 1), (1, 2), (2, 0), (3, 1), (3, 4), (5, 3), (4, 5), (7, 2), (6, 2), (6, 7), (7, 8), (8, 5), (2, 5), (5, 7)]


def partition() -> str:
    """A graph in three parts, and what worker 0 holds of it."""
    picture = Drawing(520, "A graph in three parts, and what worker 0 holds of it")
    picture.text(20, 20, "The graph: three parts, one for each worker")
    _graph(picture, 0, set(NODES), EDGES)
    into = [(u, v) for u, v in EDGES if NODES[v][1] == 0]
    halo = {u for u, _ in into if NODES[u][1] != 0}
    own = {node for node, (_, owner) in NODES.items() if owner == 0}
    picture.line((0, 258), (WIDTH, 258), PALE)
    picture.text(20, 282, "What worker 0 holds: its nodes, and all edges into them")
    _graph(picture, 255, own | halo, into)
    picture.text(20, 508, f"Hollow: the halo, {len(halo)} nodes of others, whose rows it fetches", size=13)
    return picture.svg()


def _graph(picture: Drawing, down: float, nodes: set[int], edges: list[tuple[int, int]]) -> None:
    for u, v in edges:
        (x, y), (to_x, to_y) = NODES[u][0], NODES[v][0]
        length = math.hypot(to_x - x, to_y - y)
        step = ((to_x - x) * 16 / length, (to_y - y) * 16 / length)
        crossing = NODES[u][1] != NODES[v][1]
        start, end = (x + step[0], y + step[1] + down), (to_x - step[0], to_y - step[1] + down)
        picture.line(start, end, OWNERS[NODES[u][1]] if crossing else GREY, tip=True, dashed=crossing)
    for node in sorted(nodes):
        (x, y), owner = NODES[node]
        own = down == 0 or owner == 0
        picture.circle(
            (x, y + down), OWNERS[owner] if own else "white", OWNERS[owner], str(node), "white" if own else INK
        )


def aggregation() -> str:
    """One layer on three workers, forward and backward, in time."""
    picture = Drawing(468, "One layer on three workers, forward and backward, in time")
    _sweep(picture, 22, "Forward: own edges, then those from each other worker", "rows of")
    _sweep(picture, 244, "Backward: the same walk; gradients go home", "gradient to")
    picture.text(20, 460, "Colour: whose rows are read. Thin boxes: what is on the wire meanwhile.", size=12)
    return picture.svg()


def _sweep(picture: Drawing, top: float, title: str, travels: str) -> None:
    """In round k worker r reads from (r - k) mod 3, and sends to (r + k) mod 3."""
    picture.text(20, top, title)
    left, width, backward = 78, 130, travels != "rows of"
    for r in range(3):
        y = top + 14 + 60 * r
        picture.text(8, y + 20, f"worker {r}", colour=OWNERS[r], size=13)
        for k in range(3):
            source, x = (r - k) % 3, left + k * width
            picture.box(x, y, width - 6, 28, OWNERS[source])
            words = "own edges" if k == 0 else f"edges from {source}"
            picture.text(x + (width - 6) / 2, y + 19, words, "middle", "white", 13)
            # Rows of a round travel while the round before is computed; gradients leave when they are there.
            if k and not backward:
                _wire(picture, x - width, y + 32, width - 6, source, f"{travels} {source}")
            if k and backward:
                _wire(picture, x + 10, y + 32, width - 16, source, f"{travels} {source}")
    end = left + 3 * width - 6
    picture.line((left, top + 196), (end, top + 196), tip=True)
    picture.text(end, top + 192, "time", "end", GREY, 12)


def _wire(picture: Drawing, x: float, y: float, width: float, source: int, words: str) -> None:
    picture.box(x, y, width, 15, "white", OWNERS[source])
    picture.text(x + width / 2, y + 12, words, "middle", INK, 11)


def memory() -> str:
    """Peak memory against the number of workers, as measured."""
    measured = _measured()
    picture = Drawing(330, "Peak memory against the number of workers")
    picture.text(20, 22, "MB at the peak of the worker that needs most")
    counts = sorted({count for points in measured.values() for count in points})
    highest, lowest = 800.0, 50.0

    def at(count: int, megabytes: float) -> Point:
        across = math.log2(count) / math.log2(counts[-1])
        return 60 + 330 * across, 40 + 245 * math.log(highest / megabytes) / math.log(highest / lowest)

    for megabytes in (50, 100, 200, 400, 800):
        y = at(1, megabytes)[1]
        picture.line((60, y), (390, y), PALE)
        picture.text(52, y + 5, str(megabytes), "end", GREY, 12)
    for count in counts:
        picture.text(at(count, 1)[0], 304, str(count), "middle", GREY, 12)
    picture.text(225, 322, "workers; 1 is DGL in one process", "middle", GREY, 12)
    for points, colour in zip(measured.values(), OWNERS, strict=True):
        picture.line(at(1, points[1]), at(counts[-1], points[1] / counts[-1]), colour, dashed=True)
        picture.path([at(*point) for point in sorted(points.items())], colour)
        for point in points.items():
            x, y = at(*point)
            picture.box(x - 3, y - 3, 6, 6, colour)
    for number, (model, points) in enumerate(measured.items()):
        last = points[counts[-1]]
        picture.text(300, 62 + 18 * number, f"{model}: {points[1]:.0f} to {last:.0f}", colour=OWNERS[number], size=13)
    picture.text(300, 116, "dashed: 1 / W", colour=GREY, size=12)
    return picture.svg()


def _measured() -> dict[str, dict[int, float]]:
    """MB at peak by model and number of workers, 1 for DGL's process, of the graph rmat."""
    found: dict[str, dict[int, float]] = {}
    for row in json.loads((DOCS / "figures.json").read_text())["rmat"]["rows"]:
        workers = re.fullmatch(r"(\d+) workers, sar|1 process, DGL", row["trained by"])
        if workers and row["mode"] in ("", "1") and row["model"] != "GIN":  # whose line is close to that of SAGE
            found.setdefault(row["model"], {})[int(workers[1] or 1)] = float(row["MB at peak"])
    return found


LAYERS, HALO, TILE = 3, 12, 2
"""Of the picture of modes: layers, halo rows of a layer, rows of a tile (as many as a bounded buffer holds)."""


def modes() -> str:
    """Rows of others that a worker holds, over a forward and a backward, in each mode."""
    picture = Drawing(432, "Rows of others that a worker holds in each mode")
    titles = (
        "Mode 1: a bounded buffer; fetched again where needed",
        "Mode 2: what was fetched is kept for the backward",
        "Mode 3: as mode 2, and a layer's rows come at once",
    )
    for number, title in enumerate(titles):
        bottom = 130 + 132 * number
        held = _held(number + 1)
        picture.text(20, bottom - 104, title)
        width = 440 / len(held)
        points = [(20.0, bottom)]
        for i, rows in enumerate(held):
            points += [(20 + i * width, bottom - 2.4 * rows), (20 + (i + 1) * width, bottom - 2.4 * rows)]
        picture.path([*points, (460.0, bottom)], OWNERS[number], PALE)
        picture.line((240, bottom - 92), (240, bottom), dashed=True)
    picture.text(130, 418, "forward, layers 1 to 3", "middle", GREY, 13)
    picture.text(350, 418, "backward, layers 3 to 1", "middle", GREY, 13)
    return picture.svg()


def _held(mode: int) -> list[int]:
    """Rows held after each tile of the forward, then of the backward."""
    tiles, forward = HALO // TILE, []
    if mode == 1:
        return (([TILE] * tiles + [0]) * LAYERS) * 2
    for layer in range(LAYERS):
        forward += [layer * HALO + (HALO if mode == 3 else TILE * (tile + 1)) for tile in range(tiles)]
        forward.append((layer + 1) * HALO)
    backward = [(LAYERS - layer) * HALO for layer in range(LAYERS) for _ in range(tiles + 1)]
    return forward + backward


def batch() -> str:
    """The messages of one mini-batch of two layers between a worker and the owner of some of its nodes."""
    steps = (
        ("both agree on the batch", None),
        ("layer 2: seeds whose neighbours are wanted", True),
        ("their sampled in-edges", False),
        ("layer 1: the nodes found so far", True),
        ("their sampled in-edges", False),
        ("all input nodes, once", True),
        ("their features, in one message", False),
    )
    height = 76 + 40 * len(steps)
    picture = Drawing(height, "The messages of one mini-batch of two layers")
    for x, owner, words in ((90, 0, "a worker"), (390, 1, "an owner")):
        picture.box(x - 60, 12, 120, 28, OWNERS[owner])
        picture.text(x, 31, words, "middle", "white")
        picture.line((x, 40), (x, height - 34), PALE)
    for number, (words, outward) in enumerate(steps):
        y = 76 + 40 * number
        picture.text(240, y - 8, words, "middle", size=13)
        if outward is None:
            picture.line((240, y), (94, y), tip=True)
            picture.line((240, y), (386, y), tip=True)
        else:
            ends = ((94, y), (386, y))
            picture.line(*(ends if outward else ends[::-1]), OWNERS[0 if outward else 1], tip=True)
    picture.text(240, height - 12, "Then the blocks are on the worker: layers need no messages.", "middle", GREY, 13)
    return picture.svg()


CALLS = ("A", "B", "C")
"""Distributed calls of the picture of turns."""


def turns() -> str:
    """Three workers of one process over three distributed calls: who computes, and what lies in the file."""
    picture = Drawing(246, "Three workers of one process take turns")
    picture.text(20, 22, "One process, three partitions: one in memory at a time")
    stretches = _stretches(len(OWNERS), len(CALLS))
    left, width, top = 84, 388 / sum(len(calls) for _, calls in stretches), 40
    x, ends = float(left), {}
    for owner in range(len(OWNERS)):
        picture.text(8, top + 20 + 50 * owner, f"worker {owner}", colour=OWNERS[owner], size=13)
        picture.line((left, top + 15 + 50 * owner), (left + 388, top + 15 + 50 * owner), GREY, dashed=True)
    for number, (owner, calls) in enumerate(stretches):
        y, length = top + 50 * owner, width * len(calls)
        if number:
            picture.line((x, ends[number - 1]), (x, y + 15), PALE)
        picture.box(x + 1, y, length - 2, 30, OWNERS[owner])
        for place, call in enumerate(calls):
            picture.text(x + width * (place + 0.5), y + 20, f"to {CALLS[call]}", "middle", "white", 12)
        ends[number] = y + 15
        x += length
    bottom = top + 50 * len(OWNERS)
    picture.line((left, bottom + 4), (left + 388, bottom + 4), tip=True)
    picture.text(left + 388, bottom + 20, "time", "end", GREY, 12)
    picture.text(20, bottom + 38, "Dashed: its tensors are in the file, written when its turn ends.", size=12)
    return picture.svg()


def _stretches(size: int, calls: int) -> list[tuple[int, list[int]]]:
    """Who has the turn, one after the other, and on the way to which calls; as `sar.outofcore.turns` has it.

    The last to arrive at a call stays in memory and goes on to the next one; then it is the turn of the next worker.
    """
    found: list[tuple[int, list[int]]] = []
    first = 0
    for call in range(calls):
        for step in range(size):
            worker = (first + step) % size
            if found and found[-1][0] == worker:
                found[-1][1].append(call)
            else:
                found.append((worker, [call]))
        first = (first + size - 1) % size
    return found


DRAWINGS: dict[str, Callable[[], str]] = {
    draw.__name__: draw for draw in (partition, aggregation, memory, modes, batch, turns)
}


def main() -> None:
    """Write all of them."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in DRAWINGS.items():
        (FOLDER / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    main()
