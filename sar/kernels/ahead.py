"""The usual kernels compiled ahead of their use, in forked processes, while data are read and other packages imported.

[Note: compiling ahead]
A process forked from this one needs not import torch again, which takes longer than most kernels. It calls each kernel
on two edges, so that exactly what a model calls is compiled, and leaves to others what they are compiling (see [Note:
compiled once]). Nobody waits for it but for a kernel's lock: if it fails or is killed, kernels are compiled where they
are first called. It ends with the process that it comes from, at the latest after `LIMIT_SECONDS`. Where everything was
found, a file says so, and later runs do not begin.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import logging
import os
import platform
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
from sar.kernels.backend import compiled, load_kernels
from sar.kernels.code_cache import TakenElsewhereError, code_folder, digest_of, nothing_awaited
from sar.kernels.edge_block import EdgeBlock
from sar.kernels.ops import EdgeMessage, EdgeOperand, Op, Target

LIMIT_SECONDS = 120
NICENESS = 5
MOST = 3  # processes; most of the time goes into as many kernels
PR_SET_PDEATHSIG = 1


@cache
def compile_ahead() -> None:
    """Begin to compile the usual kernels, once a process; not where they were compiled before, nor beside a GPU."""
    done = _done_file()
    if done is None or done.exists() or torch.cuda.is_initialized():
        return
    cores, workers = len(os.sched_getaffinity(0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    parent = os.getpid()
    for _ in range(min(max(cores // workers, 1), MOST)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
            child = os.fork()
        if child == 0:
            _run(parent, done)
        threading.Thread(target=_reap, args=[child], daemon=True).start()


def _done_file() -> Path | None:
    """The file that says that this processor's code is complete."""
    folder = code_folder()
    if folder is None:
        return None
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = "".join(sorted({line for line in lines if line.startswith(("model name", "flags"))}))
        key = f"{digest_of(Path(__file__).parent)} {sys.version} {platform.machine()} {cpu}"
        return folder / f"complete-{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}"
    return None


def _reap(child: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)


def _run(parent: int, done: Path) -> None:
    """What a forked process does; it does not return, and touches nothing that it has in common with its parent."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
                signal.signal(number, signal.SIG_DFL)
            signal.alarm(LIMIT_SECONDS)
            logging.disable()
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor in range(3):
                os.dup2(null, descriptor)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            gc.disable()  # what is made here is kept, and looking at it costs as much as a kernel
            os.nice(NICENESS)
            _compile_all()
            done.touch()
            status = 0
    finally:
        os._exit(status)


def _compile_all() -> None:
    """Take the steps that nobody else is at, and then wait for the others."""
    left = []
    with nothing_awaited():
        for step in steps():
            try:
                step()
            except TakenElsewhereError:
                left.append(step)
    for step in left:
        step()


def steps() -> list[Callable[[], object]]:
    """Calls of the kernels that SAGE-like and GAT-like models use on float32, those first that are needed first."""
    from sar.kernels.cpu.csr_view import transpose  # loads the compiler

    kernels, ends = compiled(), torch.arange(2, device="cpu")
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
