"""The sliced reader of DGL's tensor files, against DGL's own."""

import pytest
import torch

from sar.data import arrays
from sar.data.tensor_files import open_tensors
from sar.errors import PartitionError
from tests.adapters.dgl.directories import load_tensors, save_tensors

CPU = torch.device("cpu")
DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip
UNREADABLE_FOR_DGL = (torch.bfloat16, torch.complex64, torch.complex128)
"""DGL 1.1 writes these, but does not read them back where they are empty."""


@pytest.fixture(params=(1, 48, 4 * 2**20), ids="slices of {} bytes".format)
def slice_bytes(request, monkeypatch):
    monkeypatch.setattr(arrays, "_SLICE_BYTES", request.param)


@pytest.mark.usefixtures("slice_bytes")
@pytest.mark.parametrize("shape", [(7,), (7, 3), (5, 2, 4), (0,), (0, 6), (6, 0), (1, 100)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_dtypes_and_shapes(tmp_path, dtype, shape):
    tensor = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    path = tmp_path / "features.dgl"
    save_tensors(str(path), {"before": torch.ones(3), "ntype/naïve name": tensor, "after": torch.arange(4)})
    expected = tensor.to(torch.uint8) if dtype == torch.bool else tensor
    if dtype not in UNREADABLE_FOR_DGL:
        assert torch.equal(load_tensors(str(path))["ntype/naïve name"], expected)
    found = open_tensors(path)
    assert set(found) == {"before", "ntype/naïve name", "after"}
    stored = found["ntype/naïve name"]
    assert stored.shape == tuple(expected.shape)
    values = stored.load(CPU)
    assert values.dtype == expected.dtype == getattr(torch, stored.dtype_name)
    assert torch.equal(values, expected)
    position = torch.randperm(shape[0], generator=torch.Generator().manual_seed(1)).int()
    assert torch.equal(stored.load(CPU, position)[position.long()], expected)
    assert torch.equal(found["after"].load(CPU), torch.arange(4))


@pytest.mark.parametrize("length", range(0, 200, 3))
def test_truncation_is_found_before_anything_is_read(tmp_path, length):
    path = tmp_path / "features.dgl"
    save_tensors(str(path), {"a": torch.arange(10), "b": torch.arange(3)})
    content = path.read_bytes()
    assert length < len(content)
    path.write_bytes(content[:length])
    with pytest.raises(PartitionError, match=f"truncated: it ends after {length} bytes"):
        open_tensors(path)


def test_file_that_shrinks_while_it_is_read(tmp_path):
    path = tmp_path / "features.dgl"
    save_tensors(str(path), {"a": torch.arange(1000)})
    stored = open_tensors(path)["a"]
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(PartitionError, match="truncated"):
        stored.load(CPU)


@pytest.mark.parametrize(
    "at, content, found",
    [
        (0, b"x", "where the mark of a tensor file should be"),
        (32, b"\xff", "a name that is not UTF-8"),
        (33, b"x", "an array with the mark"),
        (49, b"\2", "device 2"),
        (57, b"\0", "0 dimensions"),
        (61, b"\3", r"dtype \(3, 64, 1\)"),
        (65, b"\5", r"shape \(5,\) in 80 bytes"),
        (72, b"\xff", "an array of shape"),
    ],
)
def test_what_is_not_known_is_named(tmp_path, at, content, found):
    path = tmp_path / "features.dgl"
    save_tensors(str(path), {"a": torch.arange(10)})
    whole = path.read_bytes()
    path.write_bytes(whole[:at] + content + whole[at + len(content) :])
    with pytest.raises(PartitionError, match=f"{path} has .*{found}"):
        open_tensors(path)["a"].load()
