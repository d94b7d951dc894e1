"""Runs the function of ``tests.torchrun.on_ranks`` and leaves what it returns in the folder. usage: function.py FOLDER"""

import os
import sys

import torch


def main(folder: str) -> None:
    torch.set_num_threads(1)
    function, args = torch.load(f"{folder}/job.pt", weights_only=False)
    torch.save(function(*args), f"{folder}/{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(sys.argv[1])
