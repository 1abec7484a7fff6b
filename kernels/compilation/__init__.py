"""Kernels compiled before they are needed: here (`ahead`) or in other processes (`process`), as values (`variant`)."""
