"""The settings of glibc's allocator with which a worker's resident memory stays near that of its live tensors.

By default glibc gives large blocks mappings of their own, which go back to the kernel when they are freed, but raises
the size from which it does so to that of any such block freed (up to 32 MB). After one epoch nearly all tensors
come from the heap, which goes back only at its end and only when twice that size is free there. Training a GAT with two
workers, a worker then held 465 MB, against 250 to 262 MB with either threshold fixed.

Setting any of the thresholds stops all of them from rising. glibc reads them when a process starts, so they are set for
processes about to be started, and never by `import sar`. Other C libraries do not know these variables.
"""

ENVIRONMENT: dict[str, str] = {"MALLOC_TRIM_THRESHOLD_": "2000000"}
"""Environment variables by name; what a user has set already goes before them, as does `GLIBC_TUNABLES` in glibc."""
