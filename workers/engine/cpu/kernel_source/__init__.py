"""The source of the compiled kernels, in numba: what a forward step computes on a CPU between and within its layers.

The modules: `ir` (LLVM helpers), `exponential`, `norms`, `activations`, `kv_store`, `attention`, `int8` (products),
`sampling`, `partition` (work stealing, barrier), `program`, `linking` and `build` (from objects to a kernel image).
They know rows of numbers and where these lie in memory (`workers.engine.cpu.layouts`); they know no sequences,
schedules and models. Only `build` runs them, in a process of its own: a worker loads the image
(`workers.engine.cpu.kernels`) and neither numba nor LLVM.

Same seed, same text, in any batch: a row must have the same bits whatever is computed with it, and wherever the keys
and values that it reads are stored. So the order of every floating-point operation depends on the row alone; threads
divide rows, heads and outputs, never a sum. Each kernel's docstring gives its order.

A kernel takes the address of a CALL and the number of the calling thread. It raises nothing and allocates nothing.
Inner loops of attention, 8-bit products and exp are written as vector instructions, because no compiler vectorizes them
as well.
"""
