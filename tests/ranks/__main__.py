"""One rank: runs a script, then leaves at once. usage: torchrun ... tests/ranks/__main__.py SCRIPT [ARGUMENTS]

DistributedDataParallel keeps its gloo group alive beyond ``destroy_process_group`` (seen with torch 2.13: its threads still
run), and a thread that lets go of a tensor while the interpreter is torn down aborts the process: "terminate called
without an active exception" (pytorch issue 190489, pull request 179291). So a rank that has finished skips the tearing down.
"""

from __future__ import annotations

import os
import runpy
import sys

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
