"""The settings of allocators with which a worker's resident memory stays near that of its live tensors.

By default glibc gives large blocks mappings of their own, which go back to the kernel when they are freed, but raises
the size from which it does so to that of any such block freed (up to 32 MB). After one epoch nearly all tensors
come from the heaps, one for each thread, where freed blocks stay. A fixed size keeps that from happening, and huge
pages make fresh mappings cheap. `docs/memory.md` has figures.

Setting the size stops it from rising. glibc reads the variable when a process starts, so it is set for processes about
to be started, and never by `import sar`. Other C libraries do not know it, nor old versions of glibc huge pages.

MKL, which multiplies torch's matrices, keeps its work space: three blocks of 5 MB, of which it uses little, but which
huge pages fill with 10 MB for each worker. It can free them after each product, at no cost that could be measured.
"""

ENVIRONMENT: dict[str, str] = {
    "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=4194304:glibc.malloc.hugetlb=1",
    "MKL_DISABLE_FAST_MM": "1",
}
"""Environment variables by name; what a user has set already goes before them."""
