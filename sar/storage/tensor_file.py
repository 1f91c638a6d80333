"""Read DGL's tensor files (`dgl.data.utils.save_tensors`) in slices, where DGL itself reads them whole."""

from pathlib import Path

from sar.storage.cursor import Cursor
from sar.storage.file_layout import TENSOR_FILE_MARK
from sar.storage.stored_tensor import StoredTensor, open_file


def open_tensors(path: Path) -> dict[str, StoredTensor]:
    """Find the tensors in a file without reading them.

    Raises:
        PartitionError: the file is missing, truncated, or no tensor file.
    """
    with open_file(path) as file:
        cursor = Cursor(path, file)
        cursor.mark(TENSOR_FILE_MARK, "a tensor file")
        cursor.number()
        return cursor.arrays()
