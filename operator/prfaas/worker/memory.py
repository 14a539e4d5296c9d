"""Memory goes back to the machine: twenty workers share it.

With glibc. Prompts of half a megabyte come and go beside small things that stay, the prefix cache's books; on one heap
every such prompt would leave a hole that nothing fits. So large pieces get pages of their own, which are gone when they
are freed. glibc does so too, until it has seen one freed.
"""

from __future__ import annotations

import ctypes
import gc

_M_MMAP_THRESHOLD = -3
_LARGE = 64 * 1024


def keep_small() -> None:
    """Called once, after everything is loaded that is needed only for the start."""
    gc.collect()
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt") and hasattr(library, "malloc_trim"):
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE)
        library.malloc_trim(0)
