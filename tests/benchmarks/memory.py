"""What an operation takes of Python's memory."""

import gc
import tracemalloc

from tests.benchmarks.harness import Operation


async def peak_memory(operation: Operation) -> int:
    """Bytes of Python's that were in use at once, at most, and were not before."""
    gc.collect()
    tracemalloc.start()
    try:
        result = await operation()
        most = tracemalloc.get_traced_memory()[1]
        del result
        return most
    finally:
        tracemalloc.stop()
