"""What Gluon kernels on Hopper are made of, one file an idea.

A kernel reads as schedule (`schedule`: which tiles a program takes), mainloop (`boxes` and `ring` bring tiles into
shared memory, `mma`, `softmax` and `attention` multiply them) and epilogue (`epilogue`: what becomes of a tile's sums).
`compat` names what changed between versions of Triton.
"""
