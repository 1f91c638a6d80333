"""`examples/ray_train.py` under Ray Train: a worker is killed, all start again, and the losses are those of DGL."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from sar.cli.demo import community_graph
from sar.partition.graph_data import write_npz
from tests.examples.test_full_graph import run, training_of_one_process
from tests.pages.blocks import runs_of
from tests.workers import REPOSITORY

EXAMPLE = REPOSITORY / "examples" / "ray_train.py"
EPOCHS, KILLED_AFTER = 5, 3

KILLER = f"""
import os, signal, threading, ray_train
plain = ray_train.train

def train(config):
    import sar
    save = sar.save_checkpoint
    def save_and_die(folder, *, step, **state):
        save(folder, step=step, **state)
        if step == {KILLED_AFTER} and sar.rank() == 1 and not os.path.exists("KILLED"):
            open("KILLED", "w").close()
            os.kill(os.getpid(), {int(signal.SIGKILL)})
    sar.save_checkpoint = save_and_die
    import torch
    print("threads", torch.get_num_threads(), threading.current_thread() is threading.main_thread())
    return plain(config)

ray_train.train = train
ray_train.main()
"""


def environment(temporary: str) -> dict[str, str]:
    """Ray keeps its files in `temporary`, a short path because there are sockets, and sends nothing home."""
    own = {"HOME": temporary, "RAY_TMPDIR": temporary, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    own |= {"PYTHONPATH": f"{REPOSITORY}:{EXAMPLE.parent}", "GLOO_SOCKET_IFNAME": "lo", "RAY_DEDUP_LOGS": "0"}
    return {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | own


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="there is no ray: pip install 'sar-gnn[ray]'")
def test_training_goes_on_after_a_kill(tmp_path: Path) -> None:
    file = tmp_path / "generated.npz"
    write_npz(community_graph(400, 4000, num_features=16, num_classes=4), file)
    run("examples/partition_graph.py", "--dataset", str(file), "--parts", "2", "--out", str(tmp_path / "parts"))
    (tmp_path / "killer.py").write_text(KILLER.replace("KILLED", str(tmp_path / "killed")))
    options = [
        "--partition-json",
        "parts/generated.json",
        "--checkpoint",
        "saved",
        "--epochs",
        str(EPOCHS),
        "--cpus",
        "2",
    ]
    script = "import ray; ray.init(num_cpus=5, include_dashboard=False); exec(open('killer.py').read())"
    with (
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as temporary,
        subprocess.Popen(
            [sys.executable, "-c", script, *options],
            cwd=tmp_path,
            env=environment(temporary),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as driver,
    ):
        try:
            said, _ = driver.communicate(timeout=300)
        finally:
            if driver.poll() is None:
                os.killpg(driver.pid, signal.SIGKILL)  # Ray's processes end with it
    assert driver.returncode == 0, said
    assert (tmp_path / "killed").exists()
    assert set(re.findall(r"threads (\d+) (\w+)", said)) == {
        ("2", "False")
    }  # as many as `--cpus`, in a thread of Ray's
    # Ray may show what a worker prints twice. The epoch of the kill was saved before it was told, and is not run again.
    found = set(re.findall(r"epoch (\d+): loss ([\d.]+)$", said, re.MULTILINE))
    expected, _ = training_of_one_process(file, EPOCHS)
    told = [epoch for epoch in range(EPOCHS) if epoch != KILLED_AFTER - 1]
    assert sorted(int(epoch) for epoch, _ in found) == told
    assert {int(epoch): float(loss) for epoch, loss in found} == pytest.approx({n: expected[n] for n in told}, abs=1e-4)
    assert re.search(r"^test accuracy 0\.\d{4}$", said, re.MULTILINE)


def test_the_page_shows_the_loop_of_the_example() -> None:
    page = REPOSITORY / "docs" / "howto" / "ray.md"
    [shown] = [
        block.code for run in runs_of(page, page.read_text()) for block in run.blocks if block.language == "python"
    ]
    assert textwrap.indent(shown, " " * 4) in EXAMPLE.read_text()
