"""Which kernel runs for a shape, why the others do not, and what was measured: `python -m kernels.explain`."""
