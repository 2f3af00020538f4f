/* Stands for AMX, which few machines have: its instructions in C, as Intel's manual, volume 2, describes them. Counts
   products, and faults: uses for which the CPU would raise #GP or #UD. The compiler includes it before everything else. */

#include <immintrin.h>
#include <stdint.h>
#pragma clang diagnostic ignored "-Wmacro-redefined"
#define _tile_loadconfig(config) tile_loadconfig((const uint8_t *)(config))
#define _tile_zero(tile) __builtin_memset(tiles[tile].rows, 0, sizeof tiles[tile].rows)
#define _tile_loadd(tile, from, stride) (_tile_zero(tile), tile_copy(tile, (uint8_t *)(from), stride, 1))
#define _tile_dpbusd tile_dpbusd
#define _tile_stored(tile, to, stride) tile_copy(tile, (uint8_t *)(to), stride, 0)
#define _tile_release() __builtin_memset(tiles, 0, sizeof tiles)
#define FAULT_UNLESS(is_allowed) (num_tile_faults += !(is_allowed))
__attribute__((visibility("default"))) int64_t num_tile_products, num_tile_faults;
static struct {
    int num_rows, row_bytes;
    uint8_t rows[16][64];
} tiles[8];

/* 64 bytes: palette, row to start with, 14 zeros, 16 · 16 bits for bytes of a row, 16 · 8 bits for rows. */
static inline void tile_loadconfig(const uint8_t *config) {
    _tile_release();
    for (int i = 0; i < 16; i++) {
        const int row_bytes = config[16 + 2 * i] + 256 * config[17 + 2 * i], num_rows = config[48 + i];
        FAULT_UNLESS(config[i] == (i == 0) && (i < 8 ? row_bytes <= 64 && num_rows <= 16 : !row_bytes && !num_rows));
        if (i < 8) tiles[i].row_bytes = row_bytes, tiles[i].num_rows = num_rows;
    }
}

static inline void tile_copy(int tile, uint8_t *memory, int64_t stride, int is_load) {
    for (int row = 0; row < tiles[tile].num_rows; row++, memory += stride) {
        uint8_t *own = tiles[tile].rows[row];
        __builtin_memcpy(is_load ? own : memory, is_load ? memory : own, tiles[tile].row_bytes);
    }
}

/* sums[m][n] += Σ x[m][4k + i] · weights[k][4n + i] over k and i; x unsigned, weights signed. */
static inline void tile_dpbusd(int sums, int x, int weights) {
    const int num_rows = tiles[sums].num_rows, num_sums = tiles[sums].row_bytes / 4, num_fours = tiles[x].row_bytes / 4;
    FAULT_UNLESS(sums != x && sums != weights && x != weights && num_rows && num_rows == tiles[x].num_rows);
    FAULT_UNLESS(tiles[weights].num_rows == num_fours && tiles[weights].row_bytes == 4 * num_sums);
    num_tile_products++;
    for (int m = 0; m < num_rows; m++)
        for (int k = 0; k < num_fours; k++)
            for (int n = 0; n < num_sums; n++) {
                int32_t *sum = (int32_t *)tiles[sums].rows[m] + n;
                for (int i = 0; i < 4; i++)
                    *sum += tiles[x].rows[m][4 * k + i] * (int8_t)tiles[weights].rows[k][4 * n + i];
            }
}
