"""The usual kernels compiled ahead of their use, in forked processes, while data are read and other packages imported.

[Note: compiling ahead]
A forked process need not import torch again, which takes longer than most kernels. It calls each kernel on two edges,
so it compiles exactly what a model calls; [Note: compiled once] shares the work and the result. Nobody waits for such a
process but for a kernel's lock: if it fails or is killed, kernels are compiled at their first call. It ends with its
parent, at the latest after `LIMIT_SECONDS`. A file says that all kernels are there, and later runs do not fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import torch

from sar.kernels.attention_operands import (
    STATISTICS,
    Attention,
    AttentionOperands,
    Gradients,
    OnlineSoftmaxState,
    Score,
)
from sar.kernels.backend import load_kernels
from sar.kernels.code_cache import HERE, code_folder, digest_of_sources
from sar.kernels.edge_block import EdgeBlock
from sar.kernels.ops import EdgeMessage, EdgeOperand, Op, Target

LIMIT_SECONDS = 120
NICENESS = 5
MOST = 3  # processes; most of the time goes into as many kernels
PR_SET_PDEATHSIG = 1


@cache
def compile_ahead() -> bool:
    """Begin to compile the usual kernels, once a process; False if they were compiled before, or CUDA is in use."""
    folder = code_folder()
    if folder is None or torch.cuda.is_initialized():
        return False
    with contextlib.suppress(OSError):
        cpu = {line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("model", "flags"))}
        key = f"{digest_of_sources(HERE)} {sys.version} {sorted(cpu)}"
        done = folder / f"complete-{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}"
        if done.exists():
            return False
        parent, cores = os.getpid(), len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        processes = min(max(cores, 1), MOST)
        for number in range(processes):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
                child = os.fork()
            if child == 0:
                try:
                    # Give up all that the process has in common with its parent, but for the parent's death.
                    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                    if os.getppid() != parent:
                        os._exit(0)
                    for received in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
                        signal.signal(received, signal.SIG_DFL)
                    signal.alarm(LIMIT_SECONDS)
                    logging.disable()
                    null = os.open(os.devnull, os.O_RDWR)
                    for descriptor in range(3):
                        os.dup2(null, descriptor)
                    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
                    gc.disable()  # looking at what is kept here costs as much as a kernel
                    os.nice(NICENESS)
                    # First a share of its own, then that of others, the last first, which they have not begun.
                    for step in [*steps()[number::processes], *reversed(steps())]:
                        step()
                    done.touch()
                finally:
                    os._exit(0)
            threading.Thread(target=_reap, args=[child], daemon=True).start()
    return True


def _reap(child: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)


def steps() -> list[Callable[[], object]]:
    """Calls of the kernels that SAGE-like and GAT-like models use on float32, in the order of their first use."""
    import sar.kernels.cpu.kernels as kernels  # loads the compiler
    from sar.kernels.cpu.csr_view import transpose

    ends = torch.arange(2, device="cpu")
    block = EdgeBlock.from_coo(ends, ends, 2, 2)
    x, how = torch.ones(2, 1, 1, device="cpu"), Attention(Score.ADDITIVE, 0.2)
    scores, attn, stats = x[:, 0], x[:1, 0], torch.ones(2, STATISTICS, 1, device="cpu")
    scored = AttentionOperands(x, scores, attn, None, scores)
    grads = Gradients(x.clone(), scores.clone(), None, None, scores.clone())
    message = EdgeMessage(Op.COPY, EdgeOperand.of(scores, Target.U), None)
    return [
        load_kernels,
        partial(transpose, block),
        lambda: kernels.aggregate_sum(block, message, scores.clone()),
        lambda: kernels.attend(block, how, scored, OnlineSoftmaxState.start(2, x)),
        lambda: kernels.attend_grad(block, how, scored, x, stats, grads),
        partial(kernels.project, x, attn),
        lambda: kernels.project_grad(x, attn, scores, x.clone(), attn.clone()),
        lambda: kernels.head_sums(how, x, x, stats),
    ]
