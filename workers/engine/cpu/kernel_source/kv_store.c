/* Stores the keys and values of a step's rows in the KV cache; addresses in the KV cache.

   Keys lie in blocks of VECTOR positions, [blocks, head_size, VECTOR], values in [positions, value_width], value_width
   being head_size rounded up to VECTOR; for each KV head of each prefix-cache entry and KV suffix. Both are float32 or
   float16. */

#include "kernels.h"

typedef struct {
    char *keys, *values;
} KeysValues;

/* A KV head's keys and values in a prefix-cache entry. */
INLINE KeysValues in_entry(int64_t entry, int64_t head, const Step *step, const Layer *layer) {
    const int64_t heads = step->num_kv_heads, key_bytes = step->entry_key_bytes, value_bytes = step->entry_value_bytes;
    return (KeysValues){
        (char *)layer->entry_keys_at + key_bytes * entry + key_bytes / heads * head,
        (char *)layer->entry_values_at + value_bytes * entry + value_bytes / heads * head,
    };
}

/* A KV head's keys and values in a KV suffix. */
INLINE KeysValues in_suffix(int64_t suffix, int64_t head, const Step *step, const Layer *layer) {
    const int64_t heads = step->num_kv_heads;
    const int64_t key_bytes = step->suffix_key_bytes, value_bytes = step->suffix_value_bytes;
    return (KeysValues){
        (char *)layer->suffix_keys_at + key_bytes * suffix + key_bytes / heads * head,
        (char *)layer->suffix_values_at + value_bytes * suffix + value_bytes / heads * head,
    };
}

/* Of the position that a row computes: its key, whose numbers are VECTOR items apart, and its value. */
INLINE KeysValues own_place(const Row *row, int64_t head, const Step *step, const Layer *layer, int64_t *lane) {
    const int64_t size = step->head_size, item = step->item_bytes;
    const int is_in_suffix = row->suffix >= 0;
    const int64_t position = (is_in_suffix ? row->num_in_suffix : row->num_in_entry) - 1;
    KeysValues place =
        is_in_suffix ? in_suffix(row->suffix, head, step, layer) : in_entry(row->entry, head, step, layer);
    *lane = position % VECTOR;
    place.keys += item * (position / VECTOR * size * VECTOR + *lane);
    place.values += item * position * num_vectors(size) * VECTOR;
    return place;
}

/* to [size] ← numbers · scale + bias, fused. */
INLINE void scale_head(const float *numbers, float scale, const float *bias, float *to, int64_t size) {
    for (int64_t i = 0; i < size; i += VECTOR) {
        floats bias_i = bias ? load_some(bias + i, size - i) : 0.0f;
        store_some(to + i, fma(load_some(numbers + i, size - i), scale, bias_i), size - i);
    }
}

/* head [size] ← its RMS norm times `gain`, then rotated: number i with number i + size / 2; either may be absent.

   gain [size] or 0; turn [2, size / 2], cosines and sines of the position, or 0. */
INLINE void norm_and_rotate(float *head, const float *gain, const float *turn, int64_t size, float epsilon) {
    const int64_t half = size / 2;
    if (gain) {
        const float inverse = 1.0f / __builtin_sqrtf(sum_row(head, size, 1) / (float)size + epsilon);
        for (int64_t i = 0; i < size; i += VECTOR)
            store_some(head + i, load_some(head + i, size - i) * inverse * load_some(gain + i, size - i), size - i);
    }
    if (!turn) return;
    for (int64_t i = 0; i < half; i += VECTOR) {
        floats first = load_some(head + i, half - i), second = load_some(head + half + i, half - i);
        floats cosines = load_some(turn + i, half - i), sines = load_some(turn + half + i, half - i);
        store_some(head + i, first * cosines - second * sines, half - i);
        store_some(head + half + i, second * cosines + first * sines, half - i);
    }
}

/* Stores a key and a value [size]; overwrites the key. */
INLINE void store_head(float *key, const float *value, KeysValues place, int64_t size, int64_t item_bytes) {
    if (item_bytes == 4) {
        float *column = (float *)place.keys, *stored = (float *)place.values;
        for (int64_t i = 0; i < size; i++) column[i * VECTOR] = key[i];
        for (int64_t i = 0; i < size; i++) stored[i] = value[i];
        return;
    }
    uint16_t *column = (uint16_t *)place.keys, *converted = (uint16_t *)key;
    for (int64_t i = 0; i < size; i += VECTOR) {
        shorts keys = to_halves(load_some(key + i, size - i)), values = to_halves(load_some(value + i, size - i));
        __builtin_memcpy(place.values + 2 * i, &values, sizeof values); /* a value's width is a multiple of VECTOR */
        if (size - i >= VECTOR)
            __builtin_memcpy(converted + i, &keys, sizeof keys);
        else
            for (int64_t lane = 0; lane < size - i; lane++) converted[i + lane] = keys[lane];
    }
    for (int64_t i = 0; i < size; i++) column[i * VECTOR] = converted[i];
}

/* qkv · scale + bias, queries and keys normed and rotated where the model does so; the queries to `query_at`, keys and
   values into the KV cache.

   qkv [rows, heads + 2 · KV heads, head_size] float32: queries, keys, values; the keys are overwritten. scales [rows], bias
   [(heads + 2 · KV heads) · head_size] float32 or absent; product and sum are fused. float16 is rounded to nearest, ties to
   even, and saturates.
   An item is one KV head, with the query heads that read it, of ROW_GROUP rows: neighbours in a prompt share the cache
   lines of their keys.
   The call has a STEP, a LAYER, and qkv. */
KERNEL(store_kv) {
    const Step *step = (const Step *)call->step_at;
    const Layer *layer = (const Layer *)call->layer_at;
    const Row *rows = (const Row *)step->rows_at;
    const float *bias = (const float *)layer->qkv_bias_at, *scales = (const float *)step->scales_at;
    const int64_t size = step->head_size, num_heads = step->num_heads, num_kv_heads = step->num_kv_heads;
    const int64_t num_rows = step->num_rows, num_groups = (num_rows + ROW_GROUP - 1) / ROW_GROUP;
    const int64_t queries_per_head = num_heads / num_kv_heads, row_width = (num_heads + 2 * num_kv_heads) * size;
    FOR_ITEMS(item, num_kv_heads * num_groups) {
        const int64_t head = item / num_groups, first = item % num_groups * ROW_GROUP;
        const int64_t end = least(first + ROW_GROUP, num_rows);
        const int64_t query_at = head * queries_per_head * size, query_size = queries_per_head * size;
        const int64_t key_at = (num_heads + head) * size, value_at = (num_heads + num_kv_heads + head) * size;
        int64_t lane;
        /* Prefetched all at once: each piece is too short for the CPU's own prefetchers. */
        for (int64_t number = first; number < end; number++) {
            const float *row = (const float *)call->product_at + number * row_width;
            prefetch(row + query_at, 4 * query_size);
            prefetch(row + key_at, 4 * size);
            prefetch(row + value_at, 4 * size);
            KeysValues place = own_place(&rows[number], head, step, layer, &lane);
            if (number == first || lane == 0 || rows[number].suffix >= 0)
                prefetch(place.keys, step->item_bytes * size * VECTOR);
            prefetch(place.values, step->item_bytes * size);
        }
        for (int64_t number = first; number < end; number++) {
            float *row = (float *)call->product_at + number * row_width, scale = scales[number];
            float *query = (float *)step->query_at + number * num_heads * size + query_at;
            float *key = row + key_at, *value = row + value_at;
            scale_head(row + query_at, scale, bias ? bias + query_at : 0, query, query_size);
            scale_head(key, scale, bias ? bias + key_at : 0, key, size);
            scale_head(value, scale, bias ? bias + value_at : 0, value, size);
            const float *turn = step->rotations_at ? (float *)step->rotations_at + rows[number].position * size : 0;
            for (int64_t i = 0; i < queries_per_head; i++)
                norm_and_rotate(query + i * size, (float *)layer->query_norm_at, turn, size, step->epsilon);
            norm_and_rotate(key, (float *)layer->key_norm_at, turn, size, step->epsilon);
            store_head(key, value, own_place(&rows[number], head, step, layer, &lane), size, step->item_bytes);
        }
    }
}
