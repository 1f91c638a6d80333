"""examples/cluster: the command of the TrainJob, run here."""

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.comm.launch import free_port
from tests.launchers.training import EPOCHS, make_partitions, output_of, told_losses
from tests.workers import REPOSITORY

CLUSTER = REPOSITORY / "examples" / "cluster"
IN_IMAGE = Path("/sar/examples")


def manifest(name: str) -> Any:
    return yaml.safe_load((CLUSTER / f"{name}.yaml").read_text())


def mounted(pod: Any) -> list[str]:
    """Where a pod's containers have its claims."""
    claims = {volume["name"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume}
    return [
        mount["mountPath"] for part in pod["containers"] for mount in part["volumeMounts"] if mount["name"] in claims
    ]


@pytest.mark.slow
def test_what_the_train_job_runs(tmp_path: Path) -> None:
    """Its command on two nodes, which are told who they are as the runtime `torch-distributed` tells them."""
    expected = make_partitions(tmp_path)
    spec = manifest("trainjob")["spec"]
    trainer = spec["trainer"]
    [job] = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert mounted(job["template"]["spec"]["template"]["spec"]) == ["/graphs"]
    program, script, *arguments = [*trainer["command"], *trainer["args"]]
    assert program == "torchrun"
    assert Path(script).parent == IN_IMAGE
    json_file, folder = "/graphs/partitions/cora/cora.json", "/graphs/checkpoints/trainjob"
    here = {json_file: str(tmp_path / "parts" / "generated.json"), folder: str(tmp_path / "saved")}
    torchrun = [sys.executable, "-m", "torch.distributed.run", str(REPOSITORY / "examples" / Path(script).name)]
    command = shlex.join([*torchrun, *(here.get(word, word) for word in arguments), "--epochs", str(EPOCHS)])
    told = {"NNODES": trainer["numNodes"], "NPROC_PER_NODE": trainer["numProcPerNode"], "MASTER_ADDR": "127.0.0.1"}
    told |= {"MASTER_PORT": free_port()}
    own = {f"PET_{name}": str(value) for name, value in told.items()}
    own |= {"PYTHONPATH": str(REPOSITORY), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    both = f"PET_NODE_RANK=1 {command} & PET_NODE_RANK=0 {command}; wait $!"
    losses = told_losses(output_of(["bash", "-e", "-c", both], tmp_path, os.environ | own, limit=200))
    assert losses == [(epoch, pytest.approx(loss, abs=1e-4)) for epoch, loss in enumerate(expected)]
