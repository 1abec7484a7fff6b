"""GPU kernels in the Triton language, each beside the torch reference that defines it. Never imports `engine`.

Importing the package imports no torch, for the sake of `kernels.compilation`.
"""
