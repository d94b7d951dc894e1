"""The fault campaign: random configurations meet faults; an oracle that knows nothing of the library judges what came.

    python -m benchmarks.faults --cases 1000          # prints counts; every violation with the seed that repeats it
    python -m benchmarks.faults --seed 417            # one case again

Laws: every sample of an epoch once over all ranks and restarts; equally many steps on all ranks; batches within their
budget; updates weighed, and their gradients summed, as one process would; results on disk complete and right, and what was
finished not done again; errors are the library's own (or the user's). A hang is a case that does not end in ten minutes.

``oracle`` imports nothing of the library; ``case`` draws the configurations; the other files are the faults.
"""
