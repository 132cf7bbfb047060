"""Mappings of shared memory, on which NUMA node their pages lie, and that they are there at all.

Calls of the kernel by ctypes, which gives up the GIL for as long as they take: a large mapping
takes milliseconds to come and to go. Addresses are of this process's own mappings.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import struct
from pathlib import Path

PIN_THREADS = 4
"""Chunks that a copier touches and pins at a time, unless it is told otherwise."""
POPULATE_STEP = 2 << 20
"""Bytes touched in one call. It keeps every other mapping of the process from coming or going."""
_LIBC = ctypes.CDLL(None, use_errno=True)
_MADV_POPULATE_WRITE = 23
"""linux/mman.h since 5.14; `mmap` names it only in newer Pythons."""
_MADV_HUGEPAGE = 14
"""linux/mman.h, also on machines whose Python was built without it."""
_MBIND = {"x86_64": 237, "aarch64": 235}
"""Number of the system call; libc has no function for it."""
_MPOL_PREFERRED = 1
_PROT_READ_WRITE, _MAP_SHARED = 0x3, 0x1
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MAP_FAILED = ctypes.c_void_p(-1).value
_PAGEMAP_SCAN, _PAGE_IS_HUGE = 0xC0606610, 1 << 6
"""linux/fs.h since 6.7: asks a process's page tables which parts of a range are what."""
_SCAN = struct.Struct("<12Q")
"""`pm_scan_arg`: size, flags, start, end, walk_end, vec, vec_len, max_pages, category_inverted,
category_mask, category_anyof_mask, return_mask."""
_REGIONS = 64


def map_shared(fd: int, size: int) -> int:
    """Map a file's first bytes, shared and writable; returns the address.

    Raises: OSError: it cannot be mapped.
    """
    address = _LIBC.mmap(None, size, _PROT_READ_WRITE, _MAP_SHARED, fd, 0)
    if address is None or address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(address)


def unmap(address: int, size: int) -> None:
    """Undo `map_shared`. Nothing may use the memory any more.

    Raises: OSError: there was no such mapping.
    """
    if _LIBC.munmap(address, size) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def node_of_gpu(pci_bus_id: str, root: Path = Path("/")) -> int | None:
    """The NUMA node that a PCI device is attached to, such as "0000:1B:00.0".

    None: there is only one node here, or the firmware does not say.
    """
    if len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) < 2:
        return None
    try:
        text = (root / f"sys/bus/pci/devices/{pci_bus_id.lower()}/numa_node").read_text()
    except OSError:
        return None
    return int(text) if int(text) >= 0 else None


def prefer_node(address: int, size: int, node: int) -> None:
    """Have pages of a shared mapping that nobody has touched yet come from a node while it has
    any, whoever touches them.

    Raises: OSError: the kernel refuses. They then come from wherever the toucher runs.
    """
    number = _MBIND.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, "the number of mbind is not known on this architecture")
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (node // bits + 1))()
    mask[node // bits] = 1 << node % bits
    arguments = (address, size, _MPOL_PREFERRED, ctypes.addressof(mask), len(mask) * bits + 1, 0)
    if _LIBC.syscall(ctypes.c_long(number), *map(ctypes.c_ulong, arguments)) != 0:
        raise OSError(ctypes.get_errno(), "mbind: " + os.strerror(ctypes.get_errno()))


def prefer_huge(address: int, size: int) -> None:
    """Have the kernel put a shared mapping that nobody has touched yet into huge pages where it has
    any to make, if its policy for shared memory lets processes ask (`hugepages.joined_pages`).
    Otherwise nothing changes."""
    _LIBC.madvise(address, size, _MADV_HUGEPAGE)


def populate(address: int, size: int) -> None:
    """Touch every page. An older kernel cannot (before 5.14): they are then touched as they are
    first used.

    Raises: OSError: there is no memory left.
    """
    for first in range(address, address + size, POPULATE_STEP):
        step = min(POPULATE_STEP, address + size - first)
        while _LIBC.madvise(first, step, _MADV_POPULATE_WRITE) != 0:
            error = ctypes.get_errno()
            if error == errno.EINVAL:
                return
            if error not in (errno.EINTR, errno.EAGAIN):
                raise OSError(error, f"no memory for {size >> 20} MiB: {os.strerror(error)}")


def joined_bytes(address: int, size: int) -> int:
    """How much of a mapping lies in huge pages right now, reserved ones or such that the kernel
    has made; 0 also where the kernel cannot say (before 6.7), or does not.

    Looks at each page-table entry once: half a millisecond for a chunk.
    """
    found, at, end = 0, address, address + size
    regions = (ctypes.c_uint64 * (3 * _REGIONS))()  # of `page_region`: start, end, categories
    try:
        pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        while at < end:
            vec, wanted = ctypes.addressof(regions), (0, _PAGE_IS_HUGE, 0, _PAGE_IS_HUGE)
            scan = bytearray(_SCAN.pack(_SCAN.size, 0, at, end, 0, vec, _REGIONS, 0, *wanted))
            count = fcntl.ioctl(pagemap, _PAGEMAP_SCAN, scan)
            found += sum(regions[3 * i + 1] - regions[3 * i] for i in range(count))
            at = _SCAN.unpack(scan)[4]
    except OSError:
        return 0
    finally:
        os.close(pagemap)
    return found
