/* Attention of a step's rows over the KV cache.

       score[t] = q · k[t];  w[t] = exp(score[t] − max score);  mean = Σₜ w[t] · v[t] / Σₜ w[t]

   for each row and head, over the positions t that the row reads: those of its prefix-cache entry, then those of its KV
   suffix. Queries arrive scaled. Sums over d run from 0 on and sums over t from the first position on, with one rounding
   for product and sum, whether a position lies in the entry or the suffix: a row's bits depend on neither its tile nor
   the place of its keys.

   The layout of keys and values is kv_store.c's: a vector instruction computes the scores of VECTOR positions. All sums
   are float32. */

#include "kernels.h"

/* How many vectors to sum at once for each of `num_rows` rows, at most `limit`, so that the registers hold them. */
#define VECTORS_FOR(num_rows, limit)                                                                                   \
    ((num_rows) * 4 <= SUM_VECTORS && (limit) >= 4 ? 4 : (num_rows) * 2 <= SUM_VECTORS ? 2 : 1)

/* out[row, t] = Σ over d of query[row, d] · keys[d, t], d ascending, fused.

   num_rows, num_blocks, item_bytes: constants; of queries, 1 to TILE; of keys; of a key, 4 or 2.
   query [rows, size] and out [rows, stride] float32, keys [blocks, size, VECTOR].
   ahead: as many bytes as are read of the keys are prefetched from there. */
INLINE void block_scores(int num_rows, int num_blocks, int item_bytes, const float *query, const char *keys, float *out,
                         int64_t stride, int64_t size, const char *ahead) {
    const int vector_bytes = item_bytes * VECTOR;
    floats sums[TILE][2];
    UNROLLED(row, num_rows)
        UNROLLED(block, num_blocks) sums[row][block] = 0.0f;
    for (int64_t d = 0; d < size; d++) {
        floats lanes[2];
        prefetch(ahead + vector_bytes * num_blocks * d, vector_bytes * num_blocks);
        UNROLLED(block, num_blocks) lanes[block] = load_item(keys + vector_bytes * (size * block + d), item_bytes);
        UNROLLED(row, num_rows) {
            const floats number = query[row * size + d];
            UNROLLED(block, num_blocks) sums[row][block] = fma(number, lanes[block], sums[row][block]);
        }
    }
    UNROLLED(row, num_rows)
        UNROLLED(block, num_blocks) store(out + stride * row + VECTOR * block, sums[row][block]);
}

INLINE void scores_of(int num_rows, int item_bytes, int64_t num_blocks, const float *query, const char *keys,
                      float *out, int64_t stride, int64_t size, const char *ahead) {
    const int together = VECTORS_FOR(num_rows, 2);
    const int64_t block_bytes = VECTOR * size * item_bytes;
    int64_t block = 0;
    for (; block + together <= num_blocks; block += together)
        block_scores(num_rows, together, item_bytes, query, keys + block * block_bytes, out + VECTOR * block, stride,
                     size, ahead + block * block_bytes);
    for (; block < num_blocks; block++)
        block_scores(num_rows, 1, item_bytes, query, keys + block * block_bytes, out + VECTOR * block, stride, size,
                     ahead + block * block_bytes);
}

/* sums[row, column] += Σ over t of weights[row, t] · values[t, column], t ascending, fused.

   If totals is not 0, totals[row · sums_stride] += Σ weights[row, t], in the same order.

   num_rows, vectors, item_bytes: constants; of weights, 1 to TILE; VECTOR columns each; of a value, 4 or 2.
   weights [rows, stride] float32, values [num_positions, width], sums [rows, sums_stride] float32.
   ahead: what is prefetched as the values are read, with their strides. */
INLINE void add_values(int num_rows, int vectors, int item_bytes, const float *weights, int64_t stride,
                       const char *values, int64_t width, int64_t num_positions, float *sums, int64_t sums_stride,
                       float *totals, const char *ahead) {
    floats own[TILE][4];
    float own_totals[TILE] = {0};
    UNROLLED(row, num_rows) {
        UNROLLED(v, vectors) own[row][v] = load(sums + sums_stride * row + VECTOR * v);
        if (totals) own_totals[row] = totals[sums_stride * row];
    }
    for (int64_t t = 0; t < num_positions; t++) {
        floats columns[4];
        prefetch(ahead + item_bytes * width * t, item_bytes * VECTOR * vectors);
        UNROLLED(v, vectors) columns[v] = load_item(values + item_bytes * (width * t + VECTOR * v), item_bytes);
        UNROLLED(row, num_rows) {
            const float weight = weights[stride * row + t];
            UNROLLED(v, vectors) own[row][v] = fma(weight, columns[v], own[row][v]);
            if (totals) own_totals[row] += weight;
        }
    }
    UNROLLED(row, num_rows) {
        UNROLLED(v, vectors) store(sums + sums_stride * row + VECTOR * v, own[row][v]);
        if (totals) totals[sums_stride * row] = own_totals[row];
    }
}

/* The same for all columns; sums[row, width] are the totals. */
INLINE void weighted_values(int num_rows, int item_bytes, const float *weights, int64_t stride, const char *values,
                            int64_t width, int64_t num_positions, float *sums, int64_t sums_stride, const char *ahead) {
    const int together = VECTORS_FOR(num_rows, 4);
    int64_t first = VECTOR * together;
    if (first > width) {
        first = VECTOR;
        add_values(num_rows, 1, item_bytes, weights, stride, values, width, num_positions, sums, sums_stride,
                   sums + width, ahead);
    } else {
        add_values(num_rows, together, item_bytes, weights, stride, values, width, num_positions, sums, sums_stride,
                   sums + width, ahead);
    }
    for (; first + VECTOR * together <= width; first += VECTOR * together)
        add_values(num_rows, together, item_bytes, weights, stride, values + item_bytes * first, width, num_positions,
                   sums + first, sums_stride, 0, ahead + item_bytes * first);
    for (; first < width; first += VECTOR)
        add_values(num_rows, 1, item_bytes, weights, stride, values + item_bytes * first, width, num_positions,
                   sums + first, sums_stride, 0, ahead + item_bytes * first);
}

/* The numbers of a call as constants, so that the sums stay in registers. */
#define WITH_CONSTANTS(function, num_rows, item_bytes, ...)                                                            \
    switch ((num_rows) * 8 + (item_bytes)) {                                                                           \
    case 8 + 4: function(1, 4, __VA_ARGS__); break;                                                                    \
    case 16 + 4: function(2, 4, __VA_ARGS__); break;                                                                   \
    case 24 + 4: function(3, 4, __VA_ARGS__); break;                                                                   \
    case 32 + 4: function(4, 4, __VA_ARGS__); break;                                                                   \
    case 8 + 2: function(1, 2, __VA_ARGS__); break;                                                                    \
    case 16 + 2: function(2, 2, __VA_ARGS__); break;                                                                   \
    case 24 + 2: function(3, 2, __VA_ARGS__); break;                                                                   \
    default: function(4, 2, __VA_ARGS__);                                                                              \
    }

static void compute_scores(int64_t num_rows, int64_t item_bytes, int64_t num_blocks, const float *query,
                           const char *keys, float *out, int64_t stride, int64_t size, const char *ahead) {
    WITH_CONSTANTS(scores_of, num_rows, item_bytes, num_blocks, query, keys, out, stride, size, ahead);
}

static void add_weighted(int64_t num_rows, int64_t item_bytes, const float *weights, int64_t stride, const char *values,
                         int64_t width, int64_t num_positions, float *sums, int64_t sums_stride, const char *ahead) {
    WITH_CONSTANTS(weighted_values, num_rows, item_bytes, weights, stride, values, width, num_positions, sums,
                   sums_stride, ahead);
}

/* The largest of `number` float32; reads whole vectors. */
INLINE float largest_of(const float *numbers, int64_t number) {
    floats found = LOWEST;
    for (int64_t i = 0; i < number; i += VECTOR)
        found = larger(lanes_before(number - i) ? load(numbers + i) : LOWEST, found);
    return largest_lane(found);
}

/* scores[t] ← exp(scores[t] − largest) for t < `number`, 0 for the rest of the last vector. */
INLINE void scores_to_weights(float *scores, int64_t number, float largest) {
    for (int64_t i = 0; i < number; i += VECTOR)
        store(scores + i, lanes_before(number - i) ? exp_floats(load(scores + i) - largest) : 0.0f);
}

/* The formula for one head of a tile's rows, into `mean_at`.

   While keys are read, the values are prefetched; while those are read, what lies at `following`. */
static void attend_tile(const Step *step, const Layer *layer, const RowTile *tile, int64_t head, float *scratch,
                        const char *following) {
    const Row *rows = (const Row *)step->rows_at;
    const int64_t size = step->head_size, row_width = step->num_heads * size, num_rows = tile->num_rows;
    const int64_t stride = step->score_stride, item = step->item_bytes,
                  kv_head = head / (step->num_heads / step->num_kv_heads);
    const int64_t value_width = num_vectors(size) * VECTOR, sums_width = value_width + VECTOR;
    float *query = scratch, *sums = query + TILE * size, *scores = sums + TILE * sums_width;
    int64_t num_in_entry = 0;
    for (int64_t i = 0; i < num_rows; i++) {
        const float *from = (const float *)step->query_at + tile->rows[i] * row_width + head * size;
        num_in_entry = most(num_in_entry, rows[tile->rows[i]].num_in_entry);
        for (int64_t d = 0; d < size; d++) query[i * size + d] = from[d];
    }
    const KeysValues entry = in_entry(rows[tile->rows[0]].entry, kv_head, step, layer);
    const int64_t num_blocks = num_vectors(num_in_entry);
    compute_scores(num_rows, item, num_blocks, query, entry.keys, scores, stride, size, entry.values);
    for (int64_t i = 0; i < num_rows; i++) {
        const Row *row = &rows[tile->rows[i]];
        float *of_entry = scores + i * stride, *of_suffix = of_entry + num_blocks * VECTOR;
        float largest = row->num_in_entry ? largest_of(of_entry, row->num_in_entry) : LOWEST;
        if (row->num_in_suffix) {
            const char *keys = in_suffix(row->suffix, kv_head, step, layer).keys;
            /* A suffix is short: there is nothing to prefetch but itself. */
            compute_scores(1, item, num_vectors(row->num_in_suffix), query + i * size, keys, of_suffix, stride, size,
                           keys);
            const float found = largest_of(of_suffix, row->num_in_suffix);
            if (found > largest) largest = found;
            scores_to_weights(of_suffix, row->num_in_suffix, largest);
        }
        scores_to_weights(of_entry, row->num_in_entry, largest);
        /* Another row of the tile may read more of the entry. */
        for (int64_t t = num_vectors(row->num_in_entry) * VECTOR; t < num_blocks * VECTOR; t += VECTOR)
            store(of_entry + t, 0.0f);
        for (int64_t d = 0; d < sums_width; d += VECTOR) store(sums + i * sums_width + d, 0.0f);
    }
    add_weighted(num_rows, item, scores, stride, entry.values, value_width, num_in_entry, sums, sums_width, following);
    for (int64_t i = 0; i < num_rows; i++) {
        const Row *row = &rows[tile->rows[i]];
        float *own = sums + i * sums_width;
        if (row->num_in_suffix) {
            const char *values = in_suffix(row->suffix, kv_head, step, layer).values;
            add_weighted(1, item, scores + i * stride + num_blocks * VECTOR, stride, values, value_width,
                         row->num_in_suffix, own, sums_width, values);
        }
        float *mean = (float *)step->mean_at + tile->rows[i] * row_width + head * size,
              inverse = 1.0f / own[value_width];
        for (int64_t d = 0; d < size; d++) mean[d] = own[d] * inverse;
    }
}

/* mean [rows, heads · head_size] float32 by the formula, prepared for the next product.

   The thread that finishes a tile's last head prepares its rows. An item is one head of one tile, in ascending order of
   heads, as `store_kv` has it. The call has a STEP and a LAYER. */
KERNEL(attend) {
    const Step *step = (const Step *)call->step_at;
    const Layer *layer = (const Layer *)call->layer_at;
    const Row *rows = (const Row *)step->rows_at;
    const RowTile *tiles = (const RowTile *)step->tiles_at;
    const int64_t num_tiles = step->num_tiles, num_heads = step->num_heads, row_width = num_heads * step->head_size;
    const int64_t num_items = num_heads * num_tiles, queries_per_head = num_heads / step->num_kv_heads;
    int64_t *heads_done = (int64_t *)step->heads_done_at;
    float *scratch = (float *)step->scratch_at + thread * step->scratch_stride;
    FOR_ITEMS(item, num_items) {
        const RowTile *tile = &tiles[item % num_tiles];
        /* The next item is the next tile of this head or the first tile of the next head, unless another thread has
           it. */
        const int64_t after = least(item + 1, num_items - 1);
        const int64_t next_entry = rows[tiles[after % num_tiles].rows[0]].entry;
        const char *following = in_entry(next_entry, after / num_tiles / queries_per_head, step, layer).keys;
        attend_tile(step, layer, tile, item / num_tiles, scratch, following);
        const int64_t done = __atomic_fetch_add(&heads_done[item % num_tiles], 1, __ATOMIC_SEQ_CST);
        if (done % num_heads < num_heads - 1) continue;
        for (int64_t i = 0; i < tile->num_rows; i++)
            prepare((const float *)step->mean_at + tile->rows[i] * row_width, row_width, tile->rows[i], step);
    }
}
