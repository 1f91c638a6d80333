"""Command lines that cannot be run."""

import contextlib
import io

import numpy as np

from sar.cli import main
from tests.bad_inputs import Printed
from tests.stages import without_stages


def command(line, edges="0,1\n1,2\n2,0\n"):
    """Run `sar LINE` in the folder, with edges.csv, four features of nodes and a script; raises what it prints."""

    def run(folder):
        (folder / "edges.csv").write_text(edges)
        (folder / "train.py").write_text("import sar\n")
        np.save(folder / "x.npy", np.ones((4, 2), np.float32))
        np.save(folder / "y3.npy", np.ones(3, np.float32))
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            status = main(line.split())
        if status != 0:
            assert not list(folder.glob("parts*"))
            raise Printed(without_stages(said.getvalue()).strip())

    return run


def partition(options="", **content):
    return command(f"partition edges.csv --parts 2 --out parts {options}", **content)


CASES = {
    "Printed": {
        "there is no file 'nix.csv'": command("partition nix.csv --parts 2 --out parts"),
        "0 parts were asked for": command("partition edges.csv --parts 0 --out parts"),
        "999999 parts were asked for": command("partition edges.csv --parts 99999999999999999999 --out parts"),
        "num_hops is 99999999999999999999": partition("--num-hops 99999999999999999999"),
        "seed is -1; expected 0 to 2**63 - 1": partition("--seed -1"),
        "there is no partition method 'nix'": partition("--method nix"),
        "--node-feature x: expected NAME=VALUE": partition("--node-feature x"),
        "x.npy has 4 rows": partition("--node-feature x=x.npy --num-nodes 3"),
        "there is no file 'y.npy'": partition("--node-feature x=y.npy"),
        "balance of 'train_mask': expected in_edges": partition("--balance train_mask"),
        "edges.csv, line 2, '1,2': the destination": partition("--num-nodes 2"),
        "there is a for x already": partition("--node-feature x=a --node-feature x=b"),
        "--num-nodes many: expected a number": partition("--num-nodes many"),
        "edges.csv: expected NTYPE:RELATION": command("partition edges.csv a:b:c=d.csv --parts 2 --out parts"),
        "name a directory to make, --out DIR": partition("--assign-only"),
        "the split is 0.9, 0.2, 0.2": partition("--split 0.9,0.2,0.2"),
        "a volume bound is for the method 'spring'": partition("--method ldg --volume-bound 0.5"),
        "--reserve are for --parts auto": partition("--workers 2"),
        "--parts auto takes --workers": command("partition edges.csv --parts auto --reserve 1MB --out parts"),
        "1 GiB (1,073.7 MB) are reserved": command(
            "partition edges.csv --out parts --parts auto --workers 2 --memory-per-worker 1GiB --reserve 1GiB"
        ),
        "2 bytes of memory are too little: 3 nodes": partition("--memory-limit 2B"),
        "' already holds edges.csv, train.py, x.npy": command("partition edges.csv --parts 2 --out ."),
        "edges.csv, line 2, 'a,b': column 0": partition(edges="0,1\na,b\n"),
        "edges.csv has 1 columns, '0' in its first": partition(edges="0\n1\n"),
        "Cannot read nix": command("inspect nix"),
        ". has 0 JSON files of partitions": command("inspect ."),
        "Cannot read nix (No such file": command("plan nix"),
        "--workers 0: expected at least 1": command("launch --workers 0 train.py"),
        "--threads 0: expected at least 1": command("launch --threads 0 train.py"),
        "--memory and --resident need a folder on a disk": command("launch --resident 1 train.py --spill here"),
        "--spill goes with --memory SIZE": command("launch --spill here train.py"),
        "SAR_PARTS is not set, and no argument of the script, nowhere": command(
            "launch --resident 1 --spill . train.py nowhere"
        ),
        "--spill nix: expected an existing folder": command("launch --resident 1 --spill nix train.py"),
        "as in x.npy": command(
            "partition edges.csv --parts 2 --out parts --node-feature x=x.npy --node-feature y=y3.npy"
        ),
        "there is no file nix.py": command("launch --workers 1 nix.py"),
        "Cannot read nix.json": command("launch --partition-json nix.json train.py"),
    },
}
