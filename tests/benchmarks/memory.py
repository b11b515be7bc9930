"""The peak memory of an operation."""

import gc
import tracemalloc

from tests.benchmarks.harness import Operation


async def peak_memory(operation: Operation) -> int:
    """Return the peak number of bytes that Python allocated during *operation*."""
    gc.collect()
    tracemalloc.start()
    try:
        result = await operation()
        most = tracemalloc.get_traced_memory()[1]
        del result
        return most
    finally:
        tracemalloc.stop()
