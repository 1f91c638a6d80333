"""The kernels in plain torch for tests whose tensors are on the CPU, carried to a GPU and back: a plugin of pytest.

CARRIED_TO=cuda python -m pytest -p tests.gpu.carried -k reference-1 tests/kernels/test_attention.py
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import sar.kernels.torch as torch_kernels
from sar.kernels import EdgeBlock, EdgeMessage, EdgeOperand
from sar.kernels.api import Backend

DEVICE = os.environ["CARRIED_TO"]


def carried(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def on_device(*operands: Any) -> Any:
        copies: dict[int, tuple[Tensor, Tensor]] = {}

        def there(value: Any) -> Any:
            if isinstance(value, Tensor):
                return copies.setdefault(id(value), (value, value.to(DEVICE, copy=True)))[1]
            if isinstance(value, EdgeBlock):
                return value.to(DEVICE)
            if isinstance(value, EdgeOperand):
                return value._replace(values=there(value.values))
            if isinstance(value, EdgeMessage):
                return value.with_values([there(values) for values in value.tensors])
            return type(value)(*map(there, value)) if hasattr(value, "_fields") else value

        made = kernel(*map(there, operands))
        for value, copy in copies.values():
            changed = copy.cpu()
            if not torch.equal(_bytes(changed), _bytes(value)):  # operands may be views that cannot be written to
                value.copy_(changed)
        return made.cpu() if isinstance(made, Tensor) else made

    return on_device


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


for name in (name for name in vars(Backend) if not name.startswith("_")):
    setattr(torch_kernels, name, carried(getattr(torch_kernels, name)))
