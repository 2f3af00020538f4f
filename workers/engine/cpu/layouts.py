"""Memory layouts that the CPU backend and its compiled kernels share: records, block sizes, quantization modes.

NumPy only. `kernel_source.build` writes the numbers and the records as a header for the kernels' C.

Kernels take addresses. A field that ends in `_at` holds the address of an array, 0 where there is none; the comment
gives the array's shape and dtype.
"""

from __future__ import annotations

import numpy as np

VECTOR = 16  # float32 lanes of a vector instruction; positions in a block of keys; a value's width is a multiple of it
LANES = 32  # partial sums of a reduction over a row's width, and their distance in it
TILE = 4  # rows of the batch that read a prefix-cache entry's keys and values together
ROW_GROUP = 8  # rows whose keys and values a thread stores together
NUM_CANDIDATES = 64  # most tokens that the sampling kernel can choose among (`sampling.NUM_CANDIDATES`)
MIN_WIDTH = 2.0**-6  # of an arithmetic code whose point is not replaced (`arithmetic_code.MIN_WIDTH`)
NUM_GROUPS = 1024  # groups of the vocabulary whose maxima preselect the candidates
TOTALS = VECTOR  # floats after a row's weighted values: the first is the sum of its weights
DOT_ROWS = 6  # rows multiplied with a block of packed 8-bit weights at once: their sums fill the vector registers
AMX_ROWS, AMX_BYTES = 16, 64  # of a tile register

# How a row is handed to a matrix product: as float32, or as `norms.c` quantizes it.
PLAIN, INT8 = range(2)

# Kinds of norm (`step.norm`).
LAYER_NORM, RMS_NORM = range(2)

# Codes of `step.activation`, by the names that `config.json` uses.
GELU_TANH, GELU, RELU, SILU, TANH = range(5)
ACTIVATIONS = {
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), GELU_TANH),
    "gelu": GELU,
    "relu": RELU,
    **dict.fromkeys(("silu", "swish"), SILU),
    "tanh": TANH,
}


def _record(*fields: str, **typed: str) -> np.dtype[np.void]:
    """A structured dtype: `fields` are int64, `typed` have the dtype given."""
    return np.dtype([*((name, "i8") for name in fields), *typed.items()], align=True)


# What the kernels of a forward step share.
STEP = _record(
    "num_rows",
    "num_tiles",
    "mode",  # PLAIN or INT8: how the next product takes its rows
    "norm",  # LAYER_NORM or RMS_NORM
    "width",  # n_embd
    "inner",  # n_inner
    "is_gated",  # 1: a product before an activation has the gate's outputs, then as many others to multiply with
    "num_heads",  # of queries
    "num_kv_heads",  # of keys and values; `num_heads` is a multiple
    "head_size",
    "activation",  # a code of ACTIVATIONS
    "token_embedding_at",  # [vocab, width] float32
    "position_embedding_at",  # [positions, width] float32; 0: none
    "rotations_at",  # [positions, 2, head_size / 2] float32, cosines and sines; 0: none
    "stream_at",  # [rows, width] float32, the residual stream
    "prepared_at",  # [rows, inputs] float32 or 8 bits, input of the next product
    "scales_at",  # [rows] float32, factors of the next product's rows
    "scales_in_at",  # [rows] float32, factors of the product that is added to the stream
    "sources_at",  # [rows] int64, rows of the stream and of that product to read; 0: row i reads row i
    "query_at",  # [rows, heads · head_size] float32
    "mean_at",  # [rows, heads · head_size] float32, result of attention
    "rows_at",  # [rows] ROW
    "tiles_at",  # [tiles] ROW_TILE
    "heads_done_at",  # [tiles] int64, heads that attention has finished, modulo num_heads
    "scratch_at",  # [threads, scratch_stride] float32
    "scratch_stride",  # floats
    "score_stride",  # floats between the scores of two rows
    "entry_key_bytes",  # from a prefix-cache entry's keys to the next one's
    "entry_value_bytes",
    "suffix_key_bytes",  # from a KV suffix's keys to the next one's
    "suffix_value_bytes",
    "item_bytes",  # of a cached number: 4 is float32, 2 float16
    "num_end_ids",
    "end_ids_at",  # [num_end_ids] int64, tokens that end a text
    epsilon="f4",  # of the norms
)

# A row of the batch: the token to compute, and what its attention reads, itself included.
ROW = _record(
    "token_id",
    "position",
    "entry",
    "num_in_entry",  # positions read from the prefix-cache entry
    "suffix",  # -1: none, the row is a prompt token and is stored in the entry
    "num_in_suffix",
)

# Rows that read the same prefix-cache entry.
ROW_TILE = np.dtype([("num_rows", "i8"), ("rows", "i8", (TILE,))], align=True)

# A layer's norm. `bias_in` belongs to the product that is added to the stream before the norm.
NORM = _record(
    "bias_in_at",  # [width] float32; 0: none
    "weight_at",  # [width] float32
    "bias_at",  # [width] float32; 0: none
)

# A layer's attention and activation.
LAYER = _record(
    "qkv_bias_at",  # [(heads + 2 · KV heads) · head_size] float32; 0: none
    "query_norm_at",  # [head_size] float32, weights of the norm of each query; 0: none
    "key_norm_at",  # the same of each key
    "up_bias_at",  # [inner, with a gate twice as many] float32; 0: none
    "entry_keys_at",  # [entries, KV heads, blocks, head_size, VECTOR] float32 or float16
    "entry_values_at",  # [entries, KV heads, positions, value_width] float32 or float16
    "suffix_keys_at",  # as `entry_keys_at`
    "suffix_values_at",  # as `entry_values_at`
)

# A packed 8-bit product. BLOCK is the instruction set's; the last block is padded with zeros.
PRODUCT = _record(
    "num_inputs",  # a multiple of 4: rows are padded, too
    "num_outputs",
    "weights_at",  # [blocks, inputs / 4, BLOCK, 4] int8
    "starts_at",  # [blocks · BLOCK] int32, initial value of each sum
    "factors_at",  # [blocks · BLOCK] float32, factor of each sum
    "max_dot_rows",  # more rows than this are multiplied by AMX
    "prefetches_all",  # 1: each block prefetches the next; 0: the CPU does it better by itself, for few rows
    "next_at",  # the PRODUCT that follows in the step, for prefetching; 0: none
)

# The sampling kernel.
SAMPLER = _record(
    "num_draws",
    "vocab_size",
    "draws_at",  # [draws] DRAW
)

# One draw; the kernel writes `token_id` and `logprob`, and replaces the code by that of the sequence's next draw.
DRAW = _record(
    "row",  # of the logits
    "rank",  # greedy: which of the likeliest tokens
    "token_id",  # -1: to be drawn; otherwise only its log-probability is computed
    "allowed_at",  # [num_allowed + num_if_likeliest] int32, the constraint's tokens
    "num_allowed",  # 0: any token may be drawn
    "num_if_likeliest",  # tokens after the allowed ones that may be drawn if no token is likelier
    temperature="f8",  # 0: greedy
    top_k="f8",  # infinity: off
    top_p="f8",  # above 1: off
    point="f8",  # from 0 to 1, of the arithmetic code
    width="f8",  # of the arithmetic code
    next_point="f8",  # the point after the draw if the width is below MIN_WIDTH then
    logprob="f8",
)

# The arguments of one kernel call. The counters of the shares follow it: [shares] int64.
CALL = _record(
    "step_at",  # STEP, PRODUCT or SAMPLER
    "layer_at",  # NORM or LAYER; other kernels say what they take here
    "product_at",  # result of a matrix product; other kernels say what they take here
    "num_rows",  # of a matrix product
    "num_shares",  # parts that the work is divided into, one for each thread
)

# A program: this head, then its entries.
PROGRAM = _record(
    "num_entries",
    "entry_bytes",
    "num_times",  # how often all entries are to run; after an interrupt, how often they ran
    "num_started",  # threads that have started
    "num_arrivals",  # at the barrier, of all threads since the start
    "num_asleep",  # threads that sleep at the barrier
    "team_size_at",  # the function `omp_get_num_threads`; 0: one thread
    "interrupt_at",  # int64; a value other than 0 stops the program after the current run of its entries
)

# One entry of a program; a CALL and its counters follow.
ENTRY = _record(
    "kernel_at",  # the compiled function
    "is_shared",  # 1: all threads run it; 0: the thread that arrives first
    "num_arrivals",
)
