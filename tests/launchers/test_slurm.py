"""The job of docs/howto/cluster.md on a Slurm of two nodes: started by srun and sbatch, as an array, and requeued."""

from pathlib import Path

import pytest

from tests.launchers.slurm import on_cluster, why_no_slurm
from tests.launchers.training import EPOCHS, make_partitions, told_losses
from tests.pages.blocks import runs_of
from tests.workers import REPOSITORY

PAGE = REPOSITORY / "docs" / "howto" / "cluster.md"
STOPPED_AFTER = 3

TRAIN = f"""
import os, runpy, sys, time, sar
save = sar.save_checkpoint
def save_and_wait(folder, *, step, **state):
    save(folder, step=step, **state)
    if step == {STOPPED_AFTER} and "SLURM_RESTART_COUNT" not in os.environ:
        time.sleep(300)
sar.save_checkpoint = save_and_wait
sys.argv = ["full_graph.py", "--partition-json", "parts/generated.json", "--epochs", "{EPOCHS}", *sys.argv[1:]]
sys.argv += os.environ.get("OPTIONS", "").split()
runpy.run_path("{REPOSITORY}/examples/full_graph.py", run_name="__main__")
"""

ON_TWO_NODES = "sbatch --nodes=2 --ntasks-per-node=1 --cpus-per-task=1 --open-mode=append"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the page's job and a script to train."""
    if (why := why_no_slurm()) is not None:
        pytest.skip(why)
    [job] = [block.code for run in runs_of(PAGE, PAGE.read_text()) for block in run.blocks if block.title == "job.sh"]
    (tmp_path / "job.sh").write_text(job)
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_nodes(folder: Path) -> None:
    """`srun` by itself, then two jobs of an array at the same time, which do not meet."""
    expected = [(epoch, pytest.approx(loss, abs=1e-4)) for epoch, loss in enumerate(make_partitions(folder))]
    script = f"OMP_NUM_THREADS=1 srun -N2 -n2 python train.py\n{ON_TWO_NODES} --wait --array=0-1 --output=%a.out job.sh"
    assert told_losses(on_cluster(script, folder, limit=400)) == expected
    for number in range(2):
        assert told_losses((folder / f"{number}.out").read_text()) == expected


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_requeued_job_goes_on(folder: Path) -> None:
    expected = [(epoch, pytest.approx(loss, abs=1e-4)) for epoch, loss in enumerate(make_partitions(folder))]
    script = f"""
    export OPTIONS="--checkpoint saved"
    job=$({ON_TWO_NODES} --parsable --requeue --output=out job.sh)
    until [ -e saved/step-{STOPPED_AFTER:06d} ]; do sleep 0.2; done
    scontrol requeue $job
    while squeue --noheader --jobs $job | grep -q .; do
        scontrol update JobId=$job StartTime=now || true  # else Slurm lets it wait for two minutes
        sleep 1
    done
    """
    on_cluster(script, folder, limit=400)
    # No epoch is told twice, as those before the requeue are not run again.
    assert told_losses((folder / "out").read_text()) == expected


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_names_of_nodes_that_do_not_resolve(folder: Path) -> None:
    script = "! OMP_NUM_THREADS=1 srun --kill-on-bad-exit=1 -N2 -n2 python train.py"
    said = on_cluster(script, folder, limit=300, hosts="")
    assert "for the address of worker 0's host, 'n1', which may be set by MASTER_ADDR" in said
