"""GPU kernels in the Triton language, each beside the torch reference that defines it. Never imports `engine`."""

from kernels.registry import Case, Op, Tolerance, registry
from kernels.select import Ops, select
from kernels.workspace import Workspace

__all__ = ["Case", "Op", "Ops", "Tolerance", "Workspace", "registry", "select"]
