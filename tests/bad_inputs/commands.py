"""Command lines that cannot be run."""

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
        command("partition nix.csv --parts 2 --out parts"), "there is no file 'nix.csv'"
    ),
    "no parts": case(command("partition edges.csv --parts 0 --out parts"), "0 parts were asked for"),
    "parts beyond any number": case(
        command("partition edges.csv --parts 99999999999999999999 --out parts"),
        "99999999999999999999 parts were asked for",
    ),
    "hops beyond any number": case(
        command("partition edges.csv --parts 2 --out parts --num-hops 99999999999999999999"),
        "num_hops is 99999999999999999999",
    ),
    "a seed below 0": case(
        command("partition edges.csv --parts 2 --out parts --seed -1"), "seed is -1; expected 0 to 2**63 - 1"
    ),
    "a method that is not there": case(
        command("partition edges.csv --parts 2 --out parts --method nix"), "there is no partition method 'nix'"
    ),
    "a feature without a file": case(
        command("partition edges.csv --parts 2 --out parts --node-feature x"), "--node-feature x: expected NAME=VALUE"
    ),
    "a feature of too many nodes": case(
        command("partition edges.csv --parts 2 --out parts --node-feature x=x.npy --num-nodes 3"), "x.npy has 4 rows"
    ),
    "a feature's file that is not there": case(
        command("partition edges.csv --parts 2 --out parts --node-feature x=y.npy"), "there is no file 'y.npy'"
    ),
    "a balance of what is not there": case(
        command("partition edges.csv --parts 2 --out parts --balance train_mask"),
        "balance of 'train_mask': expected in_edges",
    ),
    "an edge beyond the nodes": case(
        command("partition edges.csv --parts 2 --out parts --num-nodes 2"), "edges.csv, line 2, '1,2': the destination"
    ),
    "too little memory": case(
        command("partition edges.csv --parts 2 --out parts --memory-limit 2B"),
        "2 bytes of memory are too little: 3 nodes",
    ),
    "a place that is taken": case(
        command("partition edges.csv --parts 2 --out ."), "' already holds edges.csv, train.py, x.npy"
    ),
    "text that is no edges": case(
        command("partition edges.csv --parts 2 --out parts", edges="0,1\na,b\n"),
        "edges.csv, line 2, 'a,b': column 0",
    ),
    "edges of one end": case(
        command("partition edges.csv --parts 2 --out parts", edges="0\n1\n"),
        "edges.csv has 1 columns, '0' in its first",
    ),
    "no directory to inspect": case(command("inspect nix"), "Cannot read nix"),
    "no partitions in the directory to inspect": case(command("inspect ."), ". has 0 JSON files of partitions"),
    "no directory to plan for": case(command("plan nix"), "Cannot read nix"),
    "less than one worker": case(command("launch --workers 0 train.py"), "--workers 0: expected at least 1"),
    "less than one thread": case(command("launch --threads 0 train.py"), "--threads 0: expected at least 1"),
    "where partitions are kept, after the script": case(
        command("launch --resident 1 train.py --spill here"), "--resident and --spill go together"
    ),
    "no script": case(command("launch --workers 1 nix.py"), "there is no file nix.py"),
    "partitions to count that are not there": case(
        command("launch --partition-json nix.json train.py"), "Cannot read nix.json"
    ),
}
