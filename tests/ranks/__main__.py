"""One rank: runs a script, or the job of ``tests.torchrun.on_ranks`` in a folder, then leaves at once.
usage: torchrun ... tests/ranks/__main__.py SCRIPT|FOLDER [ARGUMENTS]

Scripts leave their process groups alone. With torch 2.13, a DistributedDataParallel that outlives ``destroy_process_group``
waits for gloo's threads with the interpreter's lock held; torn down with the interpreter, it aborts (pytorch issue 190489).
"""

import faulthandler
import os
import runpy
import sys

import torch

PATIENCE_S = 900.0
"""A rank that hangs says where, before its test gives up."""

if __name__ == "__main__":
    faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
    del sys.argv[0]
    if os.path.isdir(sys.argv[0]):
        torch.set_num_threads(1)
        function, args = torch.load(f"{sys.argv[0]}/job.pt", weights_only=False)
        torch.save(function(*args), f"{sys.argv[0]}/{os.environ['RANK']}.pt")
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
