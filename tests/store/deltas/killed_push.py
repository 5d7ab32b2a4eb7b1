"""Pushes rows in a thread, and blocks where that thread writes a file with the given ending.

    python killed_push.py STORE ENDING before|after

Prints a line once the thread blocks, before or after it wrote the file, and waits to be killed.
"""

import sys
import threading

from store.deltas.conftest import rows

from embedserve_store import DeltaWriter

if __name__ == "__main__":
    store, ending, moment = sys.argv[1:]
    writer = DeltaWriter(store, model="m")
    real = writer._line.write

    def write(name: str, data: bytes) -> bool:
        is_there = name.endswith(ending)
        is_new = real(name, data) if not is_there or moment == "after" else False
        if is_there:
            print("there", flush=True)
            threading.Event().wait()
        return is_new

    writer._line.write = write
    writer.push_rows({"tag": ([1], rows("tag", 1))}, wait=False)
