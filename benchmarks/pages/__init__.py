"""The figures that README and docs show, made from the files in ``benchmarks/results``."""
