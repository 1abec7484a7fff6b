"""How each kind of weight is held: its parameters, what fills them, and the value that kernels take. One file each."""
