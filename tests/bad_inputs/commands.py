"""Command lines that cannot be run: what `sar` prints after its name."""

import contextlib
import io
from functools import partial

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


case = partial(Case, error="Printed")

CASES = {
    "an input that is not there": case(
        command("partition nix.csv --parts 2 --out parts"),
        "sar partition: there is no file 'nix.csv'; check its name, and the directory it is relative to.",
    ),
    "no parts": case(
        command("partition edges.csv --parts 0 --out parts"),
        "sar partition: 0 parts were asked for; expected at least 1.",
    ),
    "parts beyond any number": case(
        command("partition edges.csv --parts 99999999999999999999 --out parts"),
        "sar partition: 99999999999999999999 parts were asked for; expected at most 2**31 - 1.",
    ),
    "hops beyond any number": case(
        command("partition edges.csv --parts 2 --out parts --num-hops 99999999999999999999"),
        "sar partition: num_hops is 99999999999999999999; expected at most 2**31 - 1.",
    ),
    "a seed below 0": case(
        command("partition edges.csv --parts 2 --out parts --seed -1"),
        "sar partition: seed is -1; expected 0 to 2**63 - 1.",
    ),
    "a method that is not there": case(
        command("partition edges.csv --parts 2 --out parts --method nix"),
        "sar partition: there is no partition method 'nix'; expected one of random, spring, ldg, multilevel, metis.",
    ),
    "a feature without a file": case(
        command("partition edges.csv --parts 2 --out parts --node-feature x"),
        "sar partition: --node-feature x: expected NAME=VALUE.",
    ),
    "a feature of too many nodes": case(
        command("partition edges.csv --parts 2 --out parts --node-feature x=x.npy --num-nodes 3"),
        "sar partition: x.npy has 4 rows; expected 3, as many as there are nodes or edges of the type that "
        "'_N/x' belongs to. Correct the file, or the number of nodes.",
    ),
    "a feature's file that is not there": case(
        command("partition edges.csv --parts 2 --out parts --node-feature x=y.npy"),
        "sar partition: there is no file 'y.npy'; check its name, and the directory it is relative to.",
    ),
    "a balance of what is not there": case(
        command("partition edges.csv --parts 2 --out parts --balance train_mask"),
        "sar partition: balance of 'train_mask': expected in_edges, as there are no node fields.",
    ),
    "an edge beyond the nodes": case(
        command("partition edges.csv --parts 2 --out parts --num-nodes 2"),
        "sar partition: edges.csv, line 2, '1,2': the destination is node 2; expected 0 to 1. Correct the edges, or "
        "the number of nodes. "
        "IDs that are strings, or have gaps, are numbered with --ids map.",
    ),
    "too little memory": case(
        command("partition edges.csv --parts 2 --out parts --memory-limit 2B"),
        "sar partition: 2 bytes of memory are too little: 3 nodes take 9 bytes each, and slices of the graph at "
        "least 2,097,152. Allow at least 2,097,179, or leave the limit out.",
    ),
    "a place that is taken": case(
        command("partition edges.csv --parts 2 --out ."),
        "sar partition: '...' already holds edges.csv, train.py, x.npy, and nothing is overwritten unless asked "
        "(--overwrite); name another directory.",
    ),
    "text that is no edges": case(
        command("partition edges.csv --parts 2 --out parts", edges="0,1\na,b\n"),
        "sar partition: edges.csv, line 2, 'a,b': column 0 has 'a'; expected an integer. Correct the line, or name "
        "the right layout. "
        "IDs that are strings, or have gaps, are numbered with --ids map.",
    ),
    "edges of one end": case(
        command("partition edges.csv --parts 2 --out parts", edges="0\n1\n"),
        "sar partition: edges.csv has 1 columns, '0' in its first line; expected two, source and destination. "
        "Name these two (--columns), or the delimiter between them (--delimiter).",
    ),
    "no directory to inspect": case(
        command("inspect nix"),
        "sar inspect: Cannot read nix (No such file or directory); expected the JSON file that `sar partition`, "
        "sar.partition_graph or dgl.distributed.partition_graph writes beside the folders part0, part1, ... "
        "Check the path, or divide the graph first.",
    ),
    "no partitions in the directory to inspect": case(
        command("inspect ."), "sar inspect: . has 0 JSON files of partitions (none); expected one. Name the file."
    ),
    "no directory to plan for": case(
        command("plan nix"),
        "sar plan: reading nix\nsar plan: Cannot read nix (No such file or directory); expected the JSON file "
        "that `sar partition`, sar.partition_graph or dgl.distributed.partition_graph writes beside the folders "
        "part0, part1, ... Check the path, or divide the graph first.",
    ),
    "less than one worker": case(
        command("launch --workers 0 train.py"), "sar launch: --workers 0: expected at least 1."
    ),
    "less than one thread": case(
        command("launch --threads 0 train.py"), "sar launch: --threads 0: expected at least 1."
    ),
    "where partitions are kept, after the script": case(
        command("launch --resident 1 train.py --spill here"),
        "sar launch: --resident and --spill go together: --resident 1 --spill DIR, with DIR on a disk. --spill "
        "stands after train.py, so the script gets it: put it before.",
    ),
    "no script": case(
        command("launch --workers 1 nix.py"),
        "sar launch: there is no file nix.py; expected the training script after the options.",
    ),
    "partitions to count that are not there": case(
        command("launch --partition-json nix.json train.py"),
        "sar launch: Cannot read nix.json (No such file or directory); expected the JSON file that `sar "
        "partition`, sar.partition_graph or dgl.distributed.partition_graph writes beside the folders part0, "
        "part1, ... Check the path, or divide the graph first.",
    ),
}
