"""How fast are we? Measured in one run, against a plain torch loop and the machine's limits."""

from polytempo.bench.suite import PARTS, run_bench

__all__ = ["PARTS", "run_bench"]
