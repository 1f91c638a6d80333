"""Arguments of all commands. Imports only what parses them, so that `--help` and a wrong option answer at once."""

import argparse
from pathlib import Path

from sar.errors import ConfigError
from sar.host.memory import parse_bytes

# Named here, because the modules that have them import compilers and libraries; a test compares.
METHODS = "random", "spring", "ldg", "multilevel", "metis"
FORMATS = "text", "parquet", "npy", "dgl", "chunked"


def _chunk(parser: argparse.ArgumentParser) -> None:
    _add_input(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory to make")
    parser.add_argument("--name", help="of the graph; default: its own, or that of the first file")
    parser.add_argument("--chunks", type=int, default=1, metavar="N", help="files for each list of edges (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of --split (%(default)s)")


def _demo(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--dataset", metavar="NAME", help="known to dgl.data; default: a generated graph")
    add("--data", metavar="DIR", help="folder of downloads")
    add("--workers", type=int, default=2, metavar="W", help="processes that divide the graph (%(default)s)")
    add("--parts", type=int, default=8, metavar="P", help="partitions (%(default)s)")
    memory = "limit for a process with one partition in memory at a time, code included (%(default)s)"
    add("--memory", type=size, default="512MiB", metavar="SIZE", help=memory)
    add("--epochs", type=int, default=20, metavar="N", help="(%(default)s)")
    add("--lr", type=float, default=0.01, help="learning rate of Adam (%(default)s)")
    add("--seed", type=int, default=0, help="of the graph, the split and the parameters (%(default)s)")
    add("--nodes", type=int, default=100_000, metavar="N", help="of the generated graph (%(default)s)")
    add("--degree", type=int, default=20, metavar="D", help="mean, of the generated graph (%(default)s)")
    add("--device", default="cpu", help="of the workers: cpu, or cuda, which they share or have each (%(default)s)")
    add(
        "--out", type=Path, default=Path("demo"), help="folder for the picture, the table and the outputs (%(default)s)"
    )
    add("--time-limit", type=float, default=600, metavar="S", help="for one training run (%(default)s)")


def _infer(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("directory", type=Path, metavar="DIR_OR_JSON", help="a partition directory, or its JSON file")
    model = "a function that makes the model, FILE.py:FUNCTION, as for sar plan"
    add("--model", required=True, metavar="FILE.py:FUNCTION", help=model)
    add("--weights", type=Path, required=True, metavar="FILE", help="a state dict, as sar.save_model writes it")
    out = "an .npy file, in the order of the input; or a .parquet file, with a column of IDs"
    add("--out", type=Path, required=True, metavar="FILE", help=out)
    nodes = "write these only: IDs in .npy (S,), Parquet, or text such as CSV; of several columns FILE#COLUMN"
    add("--nodes", metavar="FILE", help=nodes)
    add("--header", action=argparse.BooleanOptionalAction, help="whether text begins with names of columns (found out)")
    add("--ntype", help="node type of the outputs; may be left out if there is one")
    add("--classes", type=int, metavar="C", help="of the model; default: one more than the greatest label")
    workers = "workers of this process, which take turns; default: one for each partition. 1 has all in memory"
    add("--workers", type=int, metavar="W", help=workers)
    memory = "for all workers of this machine, such as 5GiB; default: what there is"
    add("--memory", type=size, metavar="SIZE", help=memory)
    add("--spill", type=Path, metavar="DIR", help="a folder on a disk for waiting workers; default: that of --out")


def _inspect(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("directory", type=Path, metavar="DIR_OR_JSON", help="a partition directory, or its JSON file")
    add("--verify", action="store_true", help="also compare every byte with the parts' checksums")
    add("--json", action="store_true", help="print one JSON object instead of a table")


def _launch(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    workers = "default: one for each GPU, else one for each partition up to the cores, else one"
    add("--workers", type=int, metavar="W", help=workers)
    add("--threads", type=int, metavar="T", help="of each worker; default: OMP_NUM_THREADS, else cores / workers")
    named = "of the partitions to count, or its directory; default: the first among the script's own arguments"
    add("--partition-json", type=Path, metavar="FILE", help=named)
    add(
        "--allocator",
        choices=("mimalloc", "auto", "least", "kept", "system"),
        help="mimalloc keeps freed memory for the next epoch, and is the default in memory if it is installed "
        "(pip install cmeel-mimalloc); the others are values of Config.allocator, of which auto is the default",
    )
    memory = "for all workers, such as 5GiB: each trains one partition after the other, and has one in memory at a time"
    add("--memory", type=size, metavar="SIZE", help=memory)
    add("--resident", type=int, metavar="1", help="the same in what memory there is, of the machine or its container")
    spill = "with --memory or --resident: a folder on a disk for the others; default: that of the partitions"
    add("--spill", type=Path, metavar="DIR", help=spill)
    add("--max-restarts", type=int, default=0, metavar="N", help="of all workers, if one fails (%(default)s)")
    grace = "that the workers have to end after SIGTERM or SIGUSR1 (%(default)s); see sar.should_stop"
    add("--grace", type=float, default=30.0, metavar="SECONDS", help=grace)
    add("script", type=Path, help="the training script, in Python; options of sar launch stand before it")
    add("script_arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")


def _partition(parser: argparse.ArgumentParser) -> None:
    _add_input(parser)
    add = parser.add_argument
    parts = "number of parts; any number of workers can train on them; auto: as --workers and their memory need"
    add("--parts", type=_parts, required=True, metavar="P", help=parts)
    add("--out", type=Path, metavar="DIR", help="directory to make")
    add("--name", help="of the graph and of its JSON file; default: its own, or that of the first file")
    add(
        "--num-hops",
        type=int,
        metavar="H",
        help="keep a halo of H hops and the edges out of each part, as dgl.distributed.partition_graph does; default: "
        "only the edges into a part, which is all that sar reads",
    )
    add = parser.add_argument_group("assignment").add_argument
    methods = f"{', '.join(METHODS)}; metis is multilevel (%(default)s)"
    add("--method", default="multilevel", metavar="METHOD", help=methods)
    add("--seed", type=int, default=0, help="of the method, and of --split (%(default)s)")
    balance = "node fields that parts share evenly, for instance train_mask; in_edges; or in_edges/FIELD of edges"
    add("--balance", nargs="+", default=[], metavar="FIELD", help=balance)
    imbalance = "how much larger than the mean a part may be (%(default)s)"
    add("--imbalance", type=float, default=0.05, metavar="SHARE", help=imbalance)
    add(
        "--volume-bound",
        type=float,
        metavar="SHARE",
        help="of spring: above this sum of degrees a cluster takes no more nodes; of a part's mean sum (0.5)",
    )
    add("--assignment", type=Path, metavar="DIR", help="take this one: NTYPE.txt for each type")
    add("--write-assignment", type=Path, metavar="DIR", help="write the assignment in that form")
    add("--assign-only", action="store_true", help="write nothing but that: no --out")
    fitting = parser.add_argument_group("for --parts auto, such as --workers 4 --memory-per-worker 8GiB")
    add = fitting.add_argument
    add("--workers", type=int, metavar="Q", help="the fewest parts: one for each")
    memory = "that each part has to fit; default: that of this machine"
    add("--memory-per-worker", type=size, metavar="SIZE", help=memory)
    reserve = "memory that a worker needs beside graph and features (T of SDT-GNN); default: two thirds"
    add("--reserve", type=size, metavar="SIZE", help=reserve)


def _plan(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("directory", type=Path, metavar="DIR_OR_JSON", help="a partition directory, or its JSON file")
    add(
        "--model",
        default="sage",
        metavar="MODEL",
        help="sage, gcn or gat, or FILE.py:FUNCTION, which returns a module when called with the graph's types and "
        "widths (sar.train.counted_graph.GraphInfo) (%(default)s)",
    )
    add("--layers", type=int, default=3, metavar="L", help="of sage, gcn and gat (%(default)s)")
    add("--hidden", type=int, default=256, metavar="D", help="their width, of gat of all heads together (%(default)s)")
    add("--heads", type=int, default=4, metavar="H", help="of gat (%(default)s)")
    add("--features", type=int, metavar="F", help="input width; default: that of the feature 'feat'")
    add("--classes", type=int, metavar="C", help="default: one more than the greatest 'label'")
    memory = "plan for one process, which trains one partition after the other in so much memory, such as 5GiB"
    add("--memory", type=size, metavar="SIZE", help=memory)
    spill = "with --memory: the folder on a disk for the other partitions; default: that of the partitions"
    add("--spill", type=Path, metavar="DIR", help=spill)
    add("--json", action="store_true", help="print one JSON object instead of tables")


def _add_input(parser: argparse.ArgumentParser) -> None:
    """Declare the input, its options, and the memory to use."""
    what = "files in order, a directory or a pattern; or edges of several types: NTYPE:RELATION:NTYPE=FILE ..."
    parser.add_argument("input", nargs="+", metavar="INPUT", help=what)
    memory = "memory to use beside Python and its libraries, such as 2GiB"
    parser.add_argument("--memory-limit", dest="memory", type=size, metavar="SIZE", help=memory)
    group = parser.add_argument_group("input")
    add = group.add_argument
    add("--format", choices=FORMATS, help="default: by the names of the files")
    add("--num-nodes", action="append", default=[], metavar="[NTYPE=]N", help="of edge lists; default: by their IDs")
    ids = "number nodes whose IDs are strings, or integers with gaps; --node-feature id=FILE#COLUMN gives the order"
    add("--ids", choices=["map"], help=ids)
    field = "one more field; of a table FILE#COLUMN, such as label=nodes.csv#label"
    for kind, form in (("node", "[NTYPE/]NAME=FILE"), ("edge", "[NTYPE:RELATION:NTYPE/]NAME=FILE")):
        add(f"--{kind}-feature", action="append", default=[], metavar=form, help=field)
    delimiter = "between fields of text: a character, or TAB; default: found out from the first row of each file"
    add("--delimiter", type=lambda text: "\t" if text in ("TAB", "\\t") else text, metavar="CHARACTER", help=delimiter)
    header = "whether text begins with names of columns, in all tables; default: found out in each"
    add("--header", action=argparse.BooleanOptionalAction, help=header)
    add("--columns", nargs=2, metavar=("SRC", "DST"), help="of text and Parquet, by name or number")
    split = "make masks of these shares of the labelled nodes, such as 0.6,0.2,0.2, drawn with --seed"
    add("--split", type=_shares, metavar="TRAIN,VAL,TEST", help=split)
    for name in ("train", "val", "test"):
        listed = f"file with the IDs of the nodes of {name}_mask, such as train.csv, an .npy file or FILE#COLUMN"
        add(f"--{name}-nodes", action="append", default=[], metavar="[NTYPE=]FILE", help=listed)
    add("--allow-nan", action="store_true", help="take NaN and infinity in features")
    undirected = "add reverse edges; of parallel edges only the first one stays, with its features (says how many go)"
    add("--undirected", action="store_true", help=undirected)
    add("--remove-duplicates", action="store_true", help="of parallel edges only the first one stays")
    add("--remove-self-loops", action="store_true", help="remove all self-loops")
    loops = "give each node exactly one self-loop: those that are there go first, with or without --remove-self-loops"
    add("--add-self-loops", action="store_true", help=loops)


def size(text: str) -> int:
    """An argument that is a size, in bytes."""
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _parts(text: str) -> int | str:
    if text != "auto" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of parts; expected one, such as 4, or auto")
    return text if text == "auto" else int(text)


def _shares(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(share) for share in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of shares; expected one, such as 0.6,0.2,0.2") from error


COMMANDS = {
    "chunk": (_chunk, "Write a graph in DGL's chunked format, as its distributed partitioning pipeline reads it."),
    "demo": (_demo, "Train in memory, by several workers and out of core, compare, and write all outputs."),
    "infer": (_infer, "Write a trained model's outputs for all nodes, or for some, one partition in memory at a time."),
    "inspect": (_inspect, "Show what is in a partition directory, and check that its files fit together."),
    "launch": (_launch, "Start the workers of one host, as torchrun does, with threads and network set up."),
    "partition": (
        _partition,
        "Divide a graph that may be larger than memory, and write a directory that DGL, DistDGL and sar read.",
    ),
    "plan": (_plan, "Predict bytes sent and peak memory of every worker for a model on a partition directory."),
}
"""What declares the arguments of a command, and what it does. Its module, `sar.cli.NAME`, has `run(arguments)`."""
