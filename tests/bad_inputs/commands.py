"""Command lines that cannot be run: what `sar` prints after its name."""

import contextlib
import io

import numpy as np

from sar.cli import main
from tests.bad_inputs import Case, Printed
from tests.stages import without_stages


def command(line, edges="0,1\n1,2\n2,0\n"):
    """Run `sar LINE` in the folder, with edges.csv, four features of nodes and a script; raises what it prints."""

    def run(folder):
        (folder / "edges.csv").write_text(edges)
        (folder / "train.py").write_text("import sar\n")
        np.save(folder / "x.npy", np.ones((4, 2), np.float32))
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            status = main(line.split())
        if status != 0:
            raise Printed(without_stages(said.getvalue()).strip())

    return run


CASES = {
    "an input that is not there": Case(
        command("partition nix.csv --parts 2 --out parts"),
        "Printed",
        "sar partition: there is no file 'nix.csv'; check its name, and the directory it is relative to.",
    ),
    "no parts": Case(
        command("partition edges.csv --parts 0 --out parts"),
        "Printed",
        "sar partition: 0 parts were asked for; expected at least 1.",
    ),
    "a method that is not there": Case(
        command("partition edges.csv --parts 2 --out parts --method nix"),
        "Printed",
        "sar partition: there is no partition method 'nix'; expected one of random, spring, ldg, multilevel, metis.",
    ),
    "a feature without a file": Case(
        command("partition edges.csv --parts 2 --out parts --node-feature x"),
        "Printed",
        "sar partition: --node-feature x: expected NAME=VALUE.",
    ),
    "a feature of too many nodes": Case(
        command("partition edges.csv --parts 2 --out parts --node-feature x=x.npy --num-nodes 3"),
        "Printed",
        "sar partition: x.npy has 4 rows; expected 3, as many as there are nodes or edges of the type that '_N/x'"
        " belongs to. Correct the file, or the number of nodes.",
    ),
    "a feature's file that is not there": Case(
        command("partition edges.csv --parts 2 --out parts --node-feature x=y.npy"),
        "Printed",
        "sar partition: there is no file 'y.npy'; check its name, and the directory it is relative to.",
    ),
    "a balance of what is not there": Case(
        command("partition edges.csv --parts 2 --out parts --balance train_mask"),
        "Printed",
        "sar partition: balance of 'train_mask': expected in_edges, as there are no node fields.",
    ),
    "an edge beyond the nodes": Case(
        command("partition edges.csv --parts 2 --out parts --num-nodes 2"),
        "Printed",
        "sar partition: edges.csv, line 2: '1,2' has an ID out of range; expected source an integer from 0 to 1 "
        "and destination an integer from 0 to 1. Correct the line, or name the right layout. "
        "IDs that are strings, or have gaps, are numbered with --ids map (ids='map').",
    ),
    "too little memory": Case(
        command("partition edges.csv --parts 2 --out parts --memory-limit 2B"),
        "Printed",
        "sar partition: 2 bytes of memory are too little: 3 nodes take 9 bytes each, and slices of the graph at least "
        "2,097,152. Allow at least 2,097,179, or leave the limit out.",
    ),
    "a place that is taken": Case(
        command("partition edges.csv --parts 2 --out ."),
        "Printed",
        "sar partition: '...' already holds edges.csv, train.py, x.npy, and nothing is overwritten unless "
        "asked (--overwrite); name another directory.",
    ),
    "text that is no edges": Case(
        command("partition edges.csv --parts 2 --out parts", edges="0,1\na,b\n"),
        "Printed",
        "sar partition: edges.csv, line 2: 'a,b' has something that is no integer; expected source an integer "
        "from 0 and destination an integer from 0, separated by ','. Correct the line, or name the right layout. "
        "IDs that are strings, or have gaps, are numbered with --ids map (ids='map').",
    ),
    "edges of one end": Case(
        command("partition edges.csv --parts 2 --out parts", edges="0\n1\n"),
        "Printed",
        "sar partition: edges.csv has 1 columns, '0' in its first line; expected two, source and destination. "
        "Name these two (columns=, --columns), or the delimiter between them (delimiter=, --delimiter).",
    ),
    "no directory to inspect": Case(
        command("inspect nix"),
        "Printed",
        "sar inspect: Cannot read nix (No such file or directory); expected the JSON file that "
        "`sar partition`, sar.partition_graph or dgl.distributed.partition_graph writes beside the folders part0, "
        "part1, ... Check the path, or divide the graph first.",
    ),
    "no partitions in the directory to inspect": Case(
        command("inspect ."),
        "Printed",
        "sar inspect: . has 0 JSON files of partitions (none); expected one. Name the file.",
    ),
    "no directory to plan for": Case(
        command("plan nix"),
        "Printed",
        "sar plan: reading nix\nsar plan: Cannot read nix (No such file or directory); expected the JSON file that "
        "`sar partition`, sar.partition_graph or dgl.distributed.partition_graph writes beside the folders part0, "
        "part1, ... Check the path, or divide the graph first.",
    ),
    "less than one worker": Case(
        command("launch --workers 0 train.py"),
        "Printed",
        "sar launch: --workers 0: expected at least 1.",
    ),
    "less than one thread": Case(
        command("launch --threads 0 train.py"),
        "Printed",
        "sar launch: --threads 0: expected at least 1.",
    ),
    "where partitions are kept, after the script": Case(
        command("launch --resident 1 train.py --spill here"),
        "Printed",
        "sar launch: --resident and --spill go together: --resident 1 --spill DIR, with DIR on a disk. --spill stands "
        "after train.py, so the script gets it: put it before.",
    ),
    "no script": Case(
        command("launch --workers 1 nix.py"),
        "Printed",
        "sar launch: there is no file nix.py; expected the training script after the options.",
    ),
    "partitions to count that are not there": Case(
        command("launch --partition-json nix.json train.py"),
        "Printed",
        "sar launch: Cannot read nix.json (No such file or directory); expected the JSON file that "
        "`sar partition`, sar.partition_graph or dgl.distributed.partition_graph writes beside the folders part0, "
        "part1, ... Check the path, or divide the graph first.",
    ),
}
