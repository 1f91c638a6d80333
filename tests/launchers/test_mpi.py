"""`mpirun -n 2`: sar finds rank, number of workers and address in what Open MPI and MPICH say, and trains as DGL."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.comm.launch import LAUNCHER_NAMES, free_port
from tests.launchers.training import EPOCHS, make_partitions, output_of, told_losses
from tests.workers import REPOSITORY

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
ON_FEW_CORES = {"OMPI_MCA_rmaps_base_oversubscribe": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}


@pytest.mark.slow
@pytest.mark.parametrize("program", ["mpirun", "mpiexec.hydra"])
def test_mpi(tmp_path: Path, program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"there is no {program}: apt-get install openmpi-bin, or mpich")
    expected = make_partitions(tmp_path)
    own = {
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(tmp_path),
        "MASTER_PORT": str(free_port()),
    }
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_NAMES}
    script = [str(REPOSITORY / "examples" / "full_graph.py"), "--partition-json", "parts/generated.json"]
    command = [program, "-n", "2", sys.executable, *script, "--epochs", str(EPOCHS)]
    said = output_of(command, tmp_path, environment | AS_ROOT | ON_FEW_CORES | own, limit=200)
    assert told_losses(said) == [(epoch, pytest.approx(loss, abs=1e-4)) for epoch, loss in enumerate(expected)]
