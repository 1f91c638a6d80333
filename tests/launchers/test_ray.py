"""`examples/ray_train.py` under Ray Train: a worker is killed, all start again, and the losses are those of DGL."""

import importlib.util
import os
import re
import signal
import sys
import tempfile
from pathlib import Path

import pytest

from tests.launchers.training import EPOCHS, make_partitions, output_of, told_losses
from tests.workers import REPOSITORY

EXAMPLE = REPOSITORY / "examples" / "ray_train.py"
KILLED_AFTER = 3

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
    expected = make_partitions(tmp_path)
    (tmp_path / "killer.py").write_text(KILLER.replace("KILLED", str(tmp_path / "killed")))
    options = f"--partition-json parts/generated.json --checkpoint saved --epochs {EPOCHS} --cpus 2".split()
    script = "import ray; ray.init(num_cpus=5, include_dashboard=False); exec(open('killer.py').read())"
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as temporary:
        said = output_of([sys.executable, "-c", script, *options], tmp_path, environment(temporary), limit=300)
    assert (tmp_path / "killed").exists()
    told = set(re.findall(r"threads (\d+) (\w+)", said))
    assert told == {("2", "False")}  # as many as `--cpus`, and in a thread of Ray's
    # Ray may show what a worker prints twice. The epoch of the kill was saved before it was told, and is not run again.
    losses = set(told_losses(said))
    assert dict(losses) == {
        epoch: pytest.approx(expected[epoch], abs=1e-4) for epoch in range(EPOCHS) if epoch != KILLED_AFTER - 1
    }
    assert len(losses) == EPOCHS - 1
    assert re.search(r"^test accuracy 0\.\d{4}$", said, re.MULTILINE)
