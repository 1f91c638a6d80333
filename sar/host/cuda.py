"""CUDA devices of this process: their availability, and the peak memory of tensors on one."""

import torch

from sar.host.memory import PeakMemory


class PeakCudaMemory:
    """Like `PeakMemory`, for tensors on this process's CUDA device."""

    def __init__(self) -> None:
        self.restart()
        self.baseline = torch.cuda.memory_allocated()

    def restart(self) -> None:
        """Reset the peak, but not the baseline of `above_baseline`."""
        torch.cuda.reset_peak_memory_stats()

    def above_baseline(self) -> int:
        """Peak bytes of tensors since construction or `restart`, minus the bytes at construction."""
        return max(0, torch.cuda.max_memory_allocated() - self.baseline)


def peak_memory(device: torch.device) -> PeakMemory | PeakCudaMemory:
    """Start a measurement of the memory for tensors of a device."""
    return PeakCudaMemory() if device.type == "cuda" else PeakMemory()


def why_no_cuda(devices: int = 1) -> str | None:
    """The reason why this process has fewer CUDA devices than requested, or None."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    there = torch.cuda.device_count()
    return None if there >= devices else f"torch sees {there} CUDA devices, of {devices} needed"
