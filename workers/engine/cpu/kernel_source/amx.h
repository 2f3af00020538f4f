/* Products by AMX: tile registers of 16 rows of 64 bytes. Included by int8.c. */

#pragma once

/* What `_tile_loadconfig` reads: Intel's manual, volume 1, 18.2. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t num_rows[16];
} TileConfig;

INLINE void prefetch_rows(const int8_t *weights) {
    for (int row = 0; row < AMX_ROWS; row++) __builtin_prefetch(weights + 4 * BLOCK * row, 0, 2);
}

/* As `dot_products`, bit for bit, for 1 to 2 · AMX_ROWS rows; `num_inputs` is a multiple of AMX_BYTES.

   A tile has: of x, 64 inputs of 16 rows; of the weights, 64 inputs of 16 outputs, four inputs in a row, as they lie in
   memory; of the sums, 16 rows of 16 outputs. There are eight tiles: one group of 16 rows meets all outputs of a block
   at once, two groups meet half of them. Tiles 0 to 3 are sums, the others inputs and weights; the instructions take
   their numbers as constants.

   ahead: bytes, the distance of prefetching; 0 where the weights are in a cache already. */
static void amx_products(int64_t num_rows, const Block *block, const uint8_t *x, int64_t num_inputs, float *out,
                         int64_t num_outputs, int64_t ahead) {
    const int num_groups = num_rows > AMX_ROWS ? 2 : 1, num_columns = 4 / num_groups;
    const int64_t last_rows = num_rows - AMX_ROWS * (num_groups - 1);
    const uint8_t *x2 = x + AMX_ROWS * num_inputs;
    TileConfig config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        const int is_of_last_rows = num_groups == 1 ? tile <= 4 : tile == 2 || tile == 3 || tile == 5;
        config.row_bytes[tile] = AMX_BYTES;
        config.num_rows[tile] = (uint8_t)(is_of_last_rows ? last_rows : AMX_ROWS);
    }
    _tile_loadconfig(&config);
#define LOAD_WEIGHTS(tile, column)                                                                                     \
    prefetch_rows(weights + AMX_BYTES * (column) + ahead);                                                             \
    _tile_loadd(tile, weights + AMX_BYTES * (column), 4 * BLOCK);
    for (int first = 0; first < 4; first += num_columns) {
        const int8_t *weights = block->weights + AMX_BYTES * first;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t input = 0; input < num_inputs; input += AMX_BYTES, weights += AMX_BYTES * BLOCK) {
            _tile_loadd(4, x + input, num_inputs);
            if (num_groups == 1) {
                LOAD_WEIGHTS(5, 0) _tile_dpbusd(0, 4, 5);
                LOAD_WEIGHTS(6, 1) _tile_dpbusd(1, 4, 6);
                LOAD_WEIGHTS(7, 2) _tile_dpbusd(2, 4, 7);
                LOAD_WEIGHTS(5, 3) _tile_dpbusd(3, 4, 5);
            } else {
                _tile_loadd(5, x2 + input, num_inputs);
                LOAD_WEIGHTS(6, 0) _tile_dpbusd(0, 4, 6);
                _tile_dpbusd(2, 5, 6);
                LOAD_WEIGHTS(7, 1) _tile_dpbusd(1, 4, 7);
                _tile_dpbusd(3, 5, 7);
            }
        }
#undef LOAD_WEIGHTS
        int32_t sums[4][AMX_ROWS][VECTOR];
        _tile_stored(0, sums[0], AMX_BYTES);
        _tile_stored(1, sums[1], AMX_BYTES);
        _tile_stored(2, sums[2], AMX_BYTES);
        _tile_stored(3, sums[3], AMX_BYTES);
        for (int64_t row = 0; row < num_rows; row++)
            for (int column = 0; column < num_columns; column++) {
                const int at = VECTOR * (first + column);
                int32_t *own = sums[row / AMX_ROWS * num_columns + column][row % AMX_ROWS];
                for (int lane = 0; lane < VECTOR; lane++) own[lane] += block->starts[at + lane];
                store_products(block, at, own, out + row * num_outputs);
            }
    }
}
