"""The engine: in-flight batcher, paged KV cache, prefix tree, decoder and the serving side that meets Triton.

Importing this package imports no torch; the runner does.
"""
