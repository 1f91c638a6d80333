"""Marks and codes in DGL's binary files, for the reader and the writer. DGL 1.1 and 2.1 write the same layout.

Both kinds of files are little-endian. Every structure begins with a mark of 8 bytes; counts before lists and lengths
before names have 8 bytes. An array is a header (`ARRAY_HEADER`, shape, size in bytes) and its values in C order.

Tensor file: mark, count, count; then for each tensor its name and the array.

Graph file: a header of 4096 bytes (mark, version, kind of graphs, count); the place of the first graph; tensors of the
user's own, by name; the graphs; at the end the places of the graphs, between two copies of the size of this table. A
graph is its types' own graph (types of nodes joined by types of edges), its relations, numbers of nodes, fields of
nodes and of edges by type and name, and the types' names. A relation has a graph of its types too, once for each of
the sparse formats in which its edges are saved: mark, numbers of columns and of rows, three arrays, and bytes that say
whether they are sorted.
"""

from typing import Final

TENSOR_FILE_MARK: Final = 0xDD5A9FBE3FA2443F
GRAPH_FILE_MARK: Final = 0xDD2E4FF046B4A13F
HETEROGRAPH_MARK: Final = 0xDD589FBE35224ABF
META_GRAPH_MARK: Final = 0xDD3C5FFE20046ABF
RELATION_MARK: Final = 0xDD2E60F0F6B4A127
COO_MARK: Final = 0xDD61FFD305DFF127
CSR_MARK: Final = 0xDD6CD31205DFF127
ARRAY_MARK: Final = 0xDD5E40F096B4A13F

GRAPH_FILE_VERSION: Final = 2
HETEROGRAPHS: Final = 2
GRAPH_FILE_HEADER_BYTES: Final = 4096

ARRAY_HEADER: Final = "QQiiiBBH"
"""Mark, 8 reserved bytes, kind and number of device, dimensions, and the dtype: code, bits, lanes (as in DLPack)."""
CPU: Final = 1

COO: Final = 1
CSR: Final = 2
CSC: Final = 4
"""Bits of the sparse formats that a relation is saved in; they follow each other in this order."""
