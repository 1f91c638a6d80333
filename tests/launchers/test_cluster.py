"""examples/cluster: the commands of the manifests, run here, and the steps of the image."""

import os
import re
import shlex
import shutil
import subprocess
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


def test_what_the_ray_job_runs() -> None:
    """The command exists in the image with these options, and the cluster has the CPUs and the volume for it."""
    spec = manifest("rayjob")["spec"]
    words = shlex.split(spec["entrypoint"])
    assert words[:2] == ["python", f"{IN_IMAGE}/ray_train.py"]
    options = dict(zip(words[2::2], words[3::2], strict=True))
    known = re.findall(r'add_argument\(\s*"(--[\w-]+)"', (REPOSITORY / "examples" / "ray_train.py").read_text())
    assert set(options) <= set(known)
    cluster = spec["rayClusterSpec"]
    [group] = cluster["workerGroupSpecs"]
    pod = group["template"]["spec"]
    assert group["replicas"] == int(options["--workers"])
    assert pod["containers"][0]["resources"]["limits"]["cpu"] == options["--cpus"]
    assert mounted(pod) == mounted(cluster["headGroupSpec"]["template"]["spec"]) == ["/graphs"]
    assert all(options[name].startswith("/graphs/") for name in ("--partition-json", "--checkpoint"))
    assert f"ray=={cluster['rayVersion']}\n" in (REPOSITORY / "constraints.txt").read_text()


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


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_steps_of_the_image(tmp_path: Path) -> None:
    """What pip installs, in a new environment from a copy of the repository, can be imported, Ray's jobs included."""
    lines = (CLUSTER / "Dockerfile").read_text().splitlines()
    assert f"WORKDIR {IN_IMAGE.parent}" in lines
    [install] = [line.removeprefix("RUN ") for line in lines if line.startswith("RUN pip ")]
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
    )
    if listed.returncode:
        pytest.skip("an image is made from a git repository")
    for name in filter(None, listed.stdout.split("\0")):
        (tmp_path / "sar" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / "sar" / name)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    output_of([sys.executable, "-m", "venv", str(tmp_path / "root")], tmp_path, environment, limit=120)
    environment["PATH"] = f"{tmp_path / 'root' / 'bin'}:{environment['PATH']}"
    output_of(["sh", "-e", "-c", install], tmp_path / "sar", environment, limit=900)
    check = "import ray.job_submission, ray.train.torch, aiohttp, sar, dgl; print(ray.__version__, sar.__file__)"
    said = output_of(["python", "-W", "ignore", "-c", check], tmp_path, environment, limit=200)
    version, file = said.splitlines()[-1].split()
    assert version == manifest("rayjob")["spec"]["rayClusterSpec"]["rayVersion"]
    assert Path(file).is_relative_to(tmp_path / "root")
