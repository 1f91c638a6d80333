"""Arguments of all commands. Imports no heavy modules, so `--help` and invalid options respond immediately."""

import argparse
from pathlib import Path

from sar.errors import ConfigError
from sar.host.memory import parse_bytes

# Repeated here because the modules that define them import compilers and libraries. A test compares them.
METHODS = "random", "spring", "ldg", "multilevel", "metis"
FORMATS = "text", "parquet", "npy", "dgl", "chunked"


def _chunk(parser: argparse.ArgumentParser) -> None:
    _add_input(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="output directory")
    parser.add_argument("--name", help="name of the graph (default: from the input, or of the first file)")
    parser.add_argument("--chunks", type=int, default=1, metavar="N", help="files per edge type (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="random seed of --split (default: %(default)s)")


def _demo(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--dataset", metavar="NAME", help="known to dgl.data; default: a generated graph")
    add("--data", metavar="DIR", help="folder of downloads")
    add("--workers", type=int, default=2, metavar="W", help="processes that divide the graph (%(default)s)")
    add("--parts", type=int, default=4, metavar="P", help="partitions (%(default)s)")
    memory = "limit for a process with one partition in memory at a time, code included (%(default)s)"
    add("--memory", type=size, default="512MiB", metavar="SIZE", help=memory)
    add("--epochs", type=int, default=10, metavar="N", help="(%(default)s)")
    add("--lr", type=float, default=0.01, help="learning rate of Adam (%(default)s)")
    add("--seed", type=int, default=0, help="of the graph, the split and the parameters (%(default)s)")
    add("--nodes", type=int, default=50_000, metavar="N", help="of the generated graph (%(default)s)")
    add("--degree", type=int, default=20, metavar="D", help="mean, of the generated graph (%(default)s)")
    add("--device", default="cpu", help="of the workers: cpu, or cuda, which they share or have each (%(default)s)")
    add("--bf16", action="store_true", help="compute in bfloat16, by autocast, which is not exact")
    add(
        "--out", type=Path, default=Path("demo"), help="folder for the picture, the table and the outputs (%(default)s)"
    )
    add("--time-limit", type=float, default=600, metavar="S", help="for one training run (%(default)s)")


def _infer(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("directory", type=Path, metavar="DIR_OR_JSON", help="partition directory, or its JSON file")
    model = "function that returns the model, as for sar plan"
    add("--model", required=True, metavar="FILE.py:FUNCTION", help=model)
    add("--weights", type=Path, required=True, metavar="FILE", help="state dict, as written by sar.save_model")
    out = "output file: .npy in the order of the input, or .parquet with a column of IDs"
    add("--out", type=Path, required=True, metavar="FILE", help=out)
    nodes = "write only these nodes: IDs in .npy (S,), Parquet or text; FILE#COLUMN selects a column"
    add("--nodes", metavar="FILE", help=nodes)
    add("--header", action=argparse.BooleanOptionalAction, help="text begins with column names (default: detected)")
    add("--ntype", help="node type of the outputs; optional if there is only one")
    add("--classes", type=int, metavar="C", help="classes of the model (default: the greatest label plus one)")
    workers = "workers of this process, which take turns (default: one per partition); 1 keeps the graph in memory"
    add("--workers", type=int, metavar="W", help=workers)
    memory = "memory of all workers on this machine, such as 5GiB (default: all available)"
    add("--memory", type=size, metavar="SIZE", help=memory)
    add("--spill", type=Path, metavar="DIR", help="folder on disk for waiting workers (default: that of --out)")


def _inspect(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("directory", type=Path, metavar="DIR_OR_JSON", help="partition directory, or its JSON file")
    add("--verify", action="store_true", help="also verify the checksums of all files")
    add("--json", action="store_true", help="print one JSON object instead of a table")


def _launch(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    workers = "number of workers (default: one per GPU; else one per partition, at most one per core; else one)"
    add("--workers", type=int, metavar="W", help=workers)
    add("--threads", type=int, metavar="T", help="threads per worker (default: OMP_NUM_THREADS, else cores / workers)")
    named = "JSON file or partition directory, to count partitions (default: the first in the script's arguments)"
    add("--partition-json", type=Path, metavar="FILE", help=named)
    add(
        "--allocator",
        choices=("mimalloc", "auto", "least", "kept", "system"),
        help="mimalloc keeps freed memory for the next epoch, and is the default for training in memory if installed "
        "(pip install cmeel-mimalloc); other choices are values of Config.allocator (default: auto)",
    )
    memory = "train out of core in this much memory, such as 5GiB, for all workers: one partition at a time in each"
    add("--memory", type=size, metavar="SIZE", help=memory)
    add("--resident", type=int, metavar="1", help="train out of core in the memory of the machine or container")
    spill = "with --memory or --resident: folder on disk for waiting partitions (default: that of the partitions)"
    add("--spill", type=Path, metavar="DIR", help=spill)
    add("--max-restarts", type=int, default=0, metavar="N", help="restarts if a worker fails (default: %(default)s)")
    grace = "time that workers have to exit after SIGTERM or SIGUSR1 (default: %(default)s); see sar.should_stop"
    add("--grace", type=float, default=30.0, metavar="SECONDS", help=grace)
    add("script", type=Path, help="Python training script; options of sar launch come before it")
    add("script_arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")


def _partition(parser: argparse.ArgumentParser) -> None:
    _add_input(parser)
    add = parser.add_argument
    parts = "number of parts, for any number of workers; auto: chosen from --workers and their memory"
    add("--parts", type=_parts, required=True, metavar="P", help=parts)
    add("--out", type=Path, metavar="DIR", help="output directory")
    add("--name", help="name of the graph and its JSON file (default: from the input, or of the first file)")
    add(
        "--num-hops",
        type=int,
        metavar="H",
        help="keep a halo of H hops and the edges out of each part, as dgl.distributed.partition_graph does (default: "
        "only edges into a part, which is all that sar reads)",
    )
    add = parser.add_argument_group("assignment").add_argument
    methods = f"{', '.join(METHODS)}; metis is an alias of multilevel (default: %(default)s)"
    add("--method", default="multilevel", metavar="METHOD", help=methods)
    add("--seed", type=int, default=0, help="random seed of the method and of --split (default: %(default)s)")
    balance = "node features to balance over parts, such as train_mask; in_edges; or in_edges/FEATURE of edges"
    add("--balance", nargs="+", default=[], metavar="FIELD", help=balance)
    imbalance = "allowed excess over the mean part size (default: %(default)s)"
    add("--imbalance", type=float, default=0.05, metavar="SHARE", help=imbalance)
    add(
        "--volume-bound",
        type=float,
        metavar="SHARE",
        help="spring: maximum sum of degrees in a cluster, relative to the mean sum of a part (0.5)",
    )
    order = "order of the nodes in a part: by the method's clusters, for caches, or by ids (%(default)s)"
    add("--order", default="clusters", choices=("clusters", "ids"), help=order)
    add("--assignment", type=Path, metavar="DIR", help="read the assignment from NTYPE.txt for each node type")
    add("--write-assignment", type=Path, metavar="DIR", help="write the assignment in this form")
    add("--assign-only", action="store_true", help="only write the assignment, without --out")
    fitting = parser.add_argument_group("for --parts auto, such as --workers 4 --memory-per-worker 8GiB")
    add = fitting.add_argument
    add("--workers", type=int, metavar="Q", help="minimum number of parts")
    memory = "memory that each part must fit in (default: that of this machine)"
    add("--memory-per-worker", type=size, metavar="SIZE", help=memory)
    reserve = "memory of a worker in addition to graph and features (T of SDT-GNN; default: two thirds)"
    add("--reserve", type=size, metavar="SIZE", help=reserve)


def _plan(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("directory", type=Path, metavar="DIR_OR_JSON", help="partition directory, or its JSON file")
    add(
        "--model",
        default="sage",
        metavar="MODEL",
        help="sage, gcn, gat, or FILE.py:FUNCTION, a function that takes sar.train.counted_graph.GraphInfo (types and "
        "widths) and returns a module (default: %(default)s)",
    )
    add("--layers", type=int, default=3, metavar="L", help="layers of sage, gcn and gat (default: %(default)s)")
    add("--hidden", type=int, default=256, metavar="D", help="hidden width, over all heads (default: %(default)s)")
    add("--heads", type=int, default=4, metavar="H", help="heads of gat (default: %(default)s)")
    add("--features", type=int, metavar="F", help="input width (default: that of the feature 'feat')")
    add("--classes", type=int, metavar="C", help="number of classes (default: the greatest 'label' plus one)")
    memory = "plan for one process that trains one partition at a time in this much memory, such as 5GiB"
    add("--memory", type=size, metavar="SIZE", help=memory)
    spill = "with --memory: folder on disk for waiting partitions (default: that of the partitions)"
    add("--spill", type=Path, metavar="DIR", help=spill)
    add("--json", action="store_true", help="print one JSON object instead of tables")


def _add_input(parser: argparse.ArgumentParser) -> None:
    """Declare the input, its options, and the memory to use."""
    what = "files in order, a directory or a pattern; for several edge types: NTYPE:RELATION:NTYPE=FILE ..."
    parser.add_argument("input", nargs="+", metavar="INPUT", help=what)
    memory = "memory to use in addition to Python and its libraries, such as 2GiB"
    parser.add_argument("--memory-limit", dest="memory", type=size, metavar="SIZE", help=memory)
    group = parser.add_argument_group("input")
    add = group.add_argument
    add("--format", choices=FORMATS, help="format of the input (default: from file names)")
    nodes = "number of nodes of edge lists (default: from IDs)"
    add("--num-nodes", action="append", default=[], metavar="[NTYPE=]N", help=nodes)
    ids = "map IDs that are strings or integers with gaps to 0, 1, ...; --node-feature id=FILE#COLUMN gives the order"
    add("--ids", choices=["map"], help=ids)
    field = "additional feature; FILE#COLUMN selects a column of a table, such as label=nodes.csv#label"
    for kind, form in (("node", "[NTYPE/]NAME=FILE"), ("edge", "[NTYPE:RELATION:NTYPE/]NAME=FILE")):
        add(f"--{kind}-feature", action="append", default=[], metavar=form, help=field)
    delimiter = "delimiter of text files: a character, or TAB (default: detected in each file)"
    add("--delimiter", type=lambda text: "\t" if text in ("TAB", "\\t") else text, metavar="CHARACTER", help=delimiter)
    header = "text files begin with column names (default: detected in each file)"
    add("--header", action=argparse.BooleanOptionalAction, help=header)
    add("--columns", nargs=2, metavar=("SRC", "DST"), help="columns of text and Parquet files, by name or number")
    split = "create random masks with these fractions of the labelled nodes, such as 0.6,0.2,0.2; see --seed"
    add("--split", type=_shares, metavar="TRAIN,VAL,TEST", help=split)
    for name in ("train", "val", "test"):
        listed = f"node IDs of {name}_mask: a file such as train.csv or train.npy, or FILE#COLUMN"
        add(f"--{name}-nodes", action="append", default=[], metavar="[NTYPE=]FILE", help=listed)
    add("--allow-nan", action="store_true", help="accept NaN and infinity in features")
    undirected = "add reverse edges, and keep only the first of duplicate edges (logs how many were removed)"
    add("--undirected", action="store_true", help=undirected)
    add("--remove-duplicates", action="store_true", help="keep only the first of duplicate edges")
    add("--remove-self-loops", action="store_true", help="remove all self-loops")
    loops = "give each node exactly one self-loop, which replaces existing self-loops"
    add("--add-self-loops", action="store_true", help=loops)


def size(text: str) -> int:
    """An argument that is a size, in bytes."""
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _parts(text: str) -> int | str:
    if text != "auto" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of parts; expected a number, such as 4, or auto")
    return text if text == "auto" else int(text)


def _shares(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(share) for share in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of fractions such as 0.6,0.2,0.2") from error


COMMANDS = {
    "chunk": (_chunk, "Write a graph in DGL's chunked format, for its distributed partitioning pipeline."),
    "demo": (_demo, "Train in memory, by several workers and out of core, compare, and write all outputs."),
    "infer": (_infer, "Compute a trained model's outputs for all or some nodes, one partition in memory at a time."),
    "inspect": (_inspect, "Show the contents of a partition directory, and check that its files are consistent."),
    "launch": (_launch, "Start the workers of one host, as torchrun does, with threads and network configured."),
    "partition": (
        _partition,
        "Partition a graph that may be larger than memory into a directory that DGL, DistDGL and sar read.",
    ),
    "plan": (_plan, "Predict traffic and peak memory of every worker for a model on a partition directory."),
}
"""Function that declares a command's arguments, and description. The module `sar.cli.NAME` has `run(arguments)`."""
