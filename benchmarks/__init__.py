r"""Ratios, side by side: the library against what a researcher writes, peers, and the machine.

``python -m benchmarks`` (or ``make bench``) runs everything and writes ``results/benchmarks/``.
Each row compares two ways to do one piece of work. Their results are compared before any clock
starts, then they take turns in one process, and a ratio is formed within each turn. The library
knows nothing of this package.
"""
