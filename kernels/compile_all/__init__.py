"""Compiles every case of the registry for GPUs that are not there: `python -m kernels.compile_all`.

Each op's launcher runs as it would on the GPU, over tensors without memory. Every launch is compiled by Triton and
ptxas in the place of being run, and its shared memory is compared with what the GPU has.
"""

from kernels.compile_all.launches import Failure, Report, walk
from kernels.compile_all.targets import TARGETS, Target

__all__ = ["TARGETS", "Failure", "Report", "Target", "walk"]
