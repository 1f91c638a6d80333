"""The settings of allocators with which workers are started: `ENVIRONMENT`, or `KEPT` for those who prefer time.

By default glibc gives large blocks mappings of their own, which go back to the kernel when they are freed, but raises
the size from which it does so to that of any such block freed (up to 32 MB). After one epoch nearly all tensors
come from the heaps, one for each thread, where freed blocks stay. A fixed size keeps that from happening, and huge
pages make fresh mappings cheap. `docs/memory.md` has figures.

`ENVIRONMENT` keeps resident memory near that of live tensors. Mini-batches ask for such blocks over and over, though:
for these `KEPT` does the opposite: what is freed stays with the process, and no page is mapped twice.

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

KEPT: dict[str, str] = {
    "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=4294967296:"
    "glibc.malloc.hugetlb=1"
}
"""Instead, where freed memory is to be kept: only blocks of 1 GiB and more get mappings of their own."""
