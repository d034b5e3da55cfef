"""A process that has prepared what a rank needs, and waits to be told which rank it is.

``python -m eep.control.launch.spare_process DESCRIPTOR WARM MODULE...`` speaks over one end of a socket pair that it was born
with: no other process can reach it. It imports the modules, calls the function ``WARM`` ("module:function"; empty for none),
and says that it is ready. Then it waits for one message, a JSON object in one packet:

    {"run": "module:function", "arguments": {...}, "environment": {...}}

and becomes that rank: the same process, in the session that it has led from the beginning. It follows an early order
before it imports the next module. A process that finds its order when it starts prepares nothing, like one that was
started for the rank. ``WARM`` may also be the rank itself up to some point, and wait for the order there
(:func:`eep.control.launch.spare_order.await_order`): then it need not return before the rank ends, and nothing else is run.

Exit status 0 means a rank that is done. A process that ends before it has its order never ends with 0, since it may have
been taken for a rank by then.
"""

from __future__ import annotations

import gc
import importlib
import sys

from eep.control.launch import spare_order
from eep.control.launch.entry_point import find
from eep.control.launch.spare_order import NO_ORDER

ENTRY = "eep.control.launch.spare_process:main"


def prepare(warm: str, modules: list[str]) -> None:
    """As far as it goes before the order comes."""
    for module in modules:
        if not spare_order.has_come():
            importlib.import_module(module)
    if warm and not spare_order.has_come():
        find(warm)()
    if not spare_order.was_taken() and not spare_order.has_come():
        gc.collect()
        gc.freeze()  # what is there by now stays: the collections of the rank need not visit it


def main(descriptor: int, warm: str, modules: list[str]) -> None:
    spare_order.expect(descriptor)
    try:
        prepare(warm, modules)
        if spare_order.was_taken():
            return
        order = spare_order.await_order()
    except SystemExit as ended:
        if spare_order.was_taken():
            raise
        sys.exit(ended.code or NO_ORDER)  # raised by what it imported or called
    find(order["run"])(**order["arguments"])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
