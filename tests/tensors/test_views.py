"""The bytes of tensors, of which checksums are taken."""

import pytest
import torch

from sar.tensors.views import as_bytes

TABLE = torch.arange(12.0).view(4, 3)
TENSORS = {
    "one row of a column": TABLE[1:2, 1],
    "no row of a column": TABLE[:0, 1],
    "one row of two columns": TABLE.unsqueeze(1)[1:2, :, ::2],
    "a column": TABLE[:, 1],
    "transposed": TABLE.T,
    "repeated": TABLE[:, :1].expand(-1, 5),
    "a number": torch.tensor(3),
    "conjugate": torch.complex(TABLE, TABLE).conj(),
    "negative": torch.complex(TABLE, TABLE).conj().imag,
    "half": TABLE.bfloat16()[:1, 2],
    "with a gradient": TABLE.clone().requires_grad_(),
}


@pytest.mark.parametrize("name", TENSORS)
def test_bytes_are_those_of_a_copy(name):
    shown = torch.tensor(TENSORS[name].tolist(), dtype=TENSORS[name].dtype)
    assert as_bytes(TENSORS[name]) == shown.reshape(-1).view(torch.uint8).numpy().data
