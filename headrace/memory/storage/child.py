"""The process of a remote store: ``python -m headrace.memory.storage.child``, started by `IsolatedStore` with a socket
as its standard input. It ends when that is closed, as it is when the engine dies.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from multiprocessing.connection import Connection

import msgspec

from headrace.base.errors import ConfigError
from headrace.base.spawn import continue_when_orphaned
from headrace.memory.storage import PAGE_STORES, PageStore, StoreOptions
from headrace.memory.storage.isolated import Answer, Call, Setup
from headrace.memory.transfer.contract import Region

CLOSE_S = 2.0
"""A store that takes longer to close is left."""


def serve(store: PageStore, line: Connection, memory: memoryview) -> None:
    """Carry out the calls of one slot, until its line is closed. ``memory``: the slot's bytes."""
    while True:
        try:
            call = msgspec.msgpack.decode(line.recv_bytes(), type=Call)
        except (EOFError, OSError):
            return
        try:
            answer = Answer([bool(has) for has in _carry_out(store, call, memory)])
        except Exception as error:  # whatever a plug-in raises: the call has failed
            answer = Answer(error=f"{type(error).__name__}: {error}")
        try:
            line.send_bytes(msgspec.msgpack.encode(answer))
        except OSError:
            return


def _carry_out(store: PageStore, call: Call, memory: memoryview) -> list[bool]:
    if call.verb == "exists":
        return store.exists(call.names)
    pages, begin = [], 0
    for size in call.sizes:
        pages.append(memory[begin : begin + size])
        begin += size
    return store.get(call.names, pages) if call.verb == "get" else store.put(call.names, pages)


def open_store(setup: Setup) -> PageStore:
    """Raises what the store raises."""
    PAGE_STORES.add(setup.name, setup.target, is_out_of_tree=setup.is_out_of_tree)
    return PAGE_STORES.load(setup.name)(StoreOptions(setup.place, setup.num_places, config=setup.config))


def _end_with(line: Connection, opened: list[PageStore]) -> None:
    """End the process when its engine has closed ``line`` or died, also while the store is being made: joining a
    cluster may take for ever. Closes what is in ``opened``."""
    line.poll(None)  # nothing is sent any more: its end is what comes
    threading.Timer(CLOSE_S, os._exit, (1,)).start()
    try:
        for store in opened:
            store.close()
    finally:
        os._exit(0)  # threads that are in a native library must not hold up the end


def main() -> None:
    continue_when_orphaned()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the engine ends this process
    line = Connection(os.dup(sys.stdin.fileno()))
    setup = msgspec.msgpack.decode(line.recv_bytes(), type=Setup)
    opened: list[PageStore] = []
    threading.Thread(target=_end_with, args=(line, opened), name="end", daemon=True).start()
    try:
        store = open_store(setup)
    except Exception as error:  # the engine tells the user
        is_config = isinstance(error, ConfigError)
        text = str(error) if is_config else f"{type(error).__name__}: {error}"
        line.send_bytes(msgspec.msgpack.encode(Answer(error=text, is_config=is_config)))
        return
    opened.append(store)
    region = Region(setup.memory, len(setup.lines) * setup.slot_bytes)
    for slot, descriptor in enumerate(setup.lines):
        memory = region.data.data[slot * setup.slot_bytes : (slot + 1) * setup.slot_bytes]
        threading.Thread(target=serve, args=(store, Connection(descriptor), memory), daemon=True).start()
    line.send_bytes(msgspec.msgpack.encode(Answer()))
    threading.Event().wait()  # `_end_with` ends the process


if __name__ == "__main__":
    main()
