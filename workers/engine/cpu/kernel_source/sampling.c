/* Drawing tokens from logits: candidates, temperature, top-k, top-p, log-probabilities, and the next step's input.

   The draw itself is `sampling.pick`'s, number by number in its order, in float64. What differs is how the candidates
   are found: a kernel needs at most NUM_CANDIDATES of them, which a threshold selects without sorting the vocabulary. */

#include "kernels.h"

/* Likeliest first, equal ones by id. */
typedef struct {
    int64_t number, ids[NUM_CANDIDATES];
    float values[NUM_CANDIDATES];
} Candidates;

/* log Σ exp(logits[i]); `largest` is the largest logit.

   Order: LANES chains in float32 over the whole pieces of LANES; then, in float64, the chains and the rest of the
   logits, ascending. */
static double log_sum_exp(const float *logits, int64_t vocab, float largest) {
    floats sums[LANES / VECTOR] = {0};
    int64_t i = 0;
    for (; i + LANES <= vocab; i += LANES)
        UNROLLED(v, LANES / VECTOR) sums[v] += exp_floats(load(logits + i + VECTOR * v) - largest);
    double total = 0;
    for (int lane = 0; lane < LANES; lane++) total += (double)sums[lane / VECTOR][lane % VECTOR];
    for (; i < vocab; i += VECTOR) {
        floats rest = exp_floats(load_some(logits + i, vocab - i) - largest);
        for (int64_t lane = 0; lane < least(VECTOR, vocab - i); lane++) total += (double)rest[lane];
    }
    return (double)largest + log_double(total);
}

/* maxima[g] = max of logits[i], i ≡ g modulo NUM_GROUPS; LOWEST for an empty group. NaN counts as nothing. */
static void group_maxima(const float *logits, int64_t vocab, float *maxima) {
    for (int64_t g = 0; g < NUM_GROUPS; g++) maxima[g] = LOWEST;
    for (int64_t first = 0; first < vocab; first += NUM_GROUPS)
        for (int64_t g = 0; g < least(NUM_GROUPS, vocab - first); g++)
            maxima[g] = logits[first + g] > maxima[g] ? logits[first + g] : maxima[g];
}

/* A float32's bits as an int32 of the same order; the function is its own inverse. */
INLINE int32_t sortable(int32_t bits) { return bits ^ (bits >> 31 & 0x7fffffff); }

/* A float32 that at least `number` of the NUM_GROUPS numbers reach, and at most ¼ more unless numbers are equal.

   By bisection over all float32: counting takes less time than sorting. */
static float threshold_of(const float *numbers, int64_t number) {
    int32_t keys[NUM_GROUPS];
    __builtin_memcpy(keys, numbers, sizeof keys);
    for (int g = 0; g < NUM_GROUPS; g++) keys[g] = sortable(keys[g]);
    int64_t low = INT32_MIN, high = INT32_MAX;
    while (low < high) {
        const int32_t middle = (int32_t)((low + high + 1) >> 1);
        int32_t count = 0;
        for (int g = 0; g < NUM_GROUPS; g++) count += keys[g] >= middle;
        if (count < number) {
            high = (int64_t)middle - 1;
        } else {
            low = middle;
            if (count <= number + number / 4) break;
        }
    }
    return __builtin_bit_cast(float, sortable((int32_t)low));
}

static void insert(Candidates *found, float value, int64_t token) {
    float *values = found->values;
    int64_t *ids = found->ids, last = found->number;
    if (last == NUM_CANDIDATES) {
        last--;
        if (value < values[last] || (value == values[last] && token > ids[last])) return;
    } else {
        found->number++;
    }
    for (; last > 0 && (values[last - 1] < value || (values[last - 1] == value && ids[last - 1] > token)); last--) {
        values[last] = values[last - 1];
        ids[last] = ids[last - 1];
    }
    values[last] = value;
    ids[last] = token;
}

/* The NUM_CANDIDATES likeliest tokens: at least as many groups have a maximum that reaches the threshold, so all
   candidates reach it. */
static void find_candidates(Candidates *found, const float *logits, int64_t vocab, const float *maxima) {
    const float threshold = threshold_of(maxima, least(NUM_CANDIDATES, vocab));
    for (int64_t group = 0; group < least(NUM_GROUPS, vocab); group++) {
        if (maxima[group] < threshold) continue;
        for (int64_t token = group; token < vocab; token += NUM_GROUPS)
            if (logits[token] >= threshold) insert(found, logits[token], token);
    }
}

/* The likeliest of the tokens that the draw's constraint allows; `largest` is the largest logit of all tokens. */
static void find_allowed(Candidates *found, const float *logits, float largest, const Draw *draw) {
    const int32_t *listed = (const int32_t *)draw->allowed_at;
    for (int64_t i = 0; i < draw->num_allowed + draw->num_if_likeliest; i++)
        if (i < draw->num_allowed || logits[listed[i]] >= largest) insert(found, logits[listed[i]], listed[i]);
}

/* The index of the chosen candidate, and the draw's next code: `sampling.pick` in its order of operations, float64.

   p[i] = exp((v[i] − v[0]) / temperature) / Σ of these over the top_k first
   the candidates before which Σ p < top_p are kept; the result is the first i with Σ p[0…i] > point · Σ p[kept] */
static int64_t pick(const Candidates *found, Draw *draw) {
    if (draw->temperature == 0) return draw->rank;
    const int64_t kept = draw->top_k > (double)found->number ? found->number : (int64_t)draw->top_k;
    double probs[NUM_CANDIDATES], total = 0, mass = 0, after = 0;
    for (int64_t i = 0; i < kept; i++) {
        probs[i] = exp_double(((double)found->values[i] - (double)found->values[0]) / draw->temperature);
        total += probs[i];
    }
    int64_t end = 0;
    for (; end < kept && (end == 0 || mass < draw->top_p); end++)
        mass += probs[end] / total; /* the first is always kept */
    const double target = draw->point * mass;
    int64_t choice = end - 1;
    for (int64_t i = 0; i < end; i++) {
        after += probs[i] / total;
        if (after > target || after == mass) { /* rounding must not step past the end */
            choice = i;
            break;
        }
    }
    const double interval = probs[choice] / total;
    draw->width = draw->width * interval / mass;
    if (draw->width < MIN_WIDTH) {
        draw->point = draw->next_point;
    } else {
        const double point = (target - (after - interval)) / interval;
        draw->point = point < 0 ? 0 : point > 1 ? 1 : point;
    }
    return choice;
}

/* Each draw's token, unless it has one, and log-probability: logits[token] − log Σ exp(logits); an item is a draw.

   logits [rows, vocab] float32 are not changed. Where logits are not numbers, the token is valid and its
   log-probability is NaN. The call has a SAMPLER in `step_at` and the logits in `product_at`. */
KERNEL(sample) {
    const Sampler *sampler = (const Sampler *)call->step_at;
    const int64_t vocab = sampler->vocab_size;
    FOR_ITEMS(number, sampler->num_draws) {
        Draw *draw = (Draw *)sampler->draws_at + number;
        const float *logits = (const float *)call->product_at + vocab * draw->row;
        float maxima[NUM_GROUPS], largest = LOWEST;
        group_maxima(logits, vocab, maxima);
        for (int g = 0; g < NUM_GROUPS; g++) largest = maxima[g] > largest ? maxima[g] : largest;
        if (draw->token_id < 0) {
            Candidates found;
            found.number = 0;
            if (draw->num_allowed)
                find_allowed(&found, logits, largest, draw);
            else
                find_candidates(&found, logits, vocab, maxima);
            const int64_t choice = found.number ? pick(&found, draw) : 0;
            if (choice >= found.number) { /* NaN is no candidate */
                draw->token_id = 0;
                draw->logprob = __builtin_nan("");
                continue;
            }
            draw->token_id = found.ids[choice];
        }
        draw->logprob = (double)logits[draw->token_id] - log_sum_exp(logits, vocab, largest);
    }
}

/* Makes each row the row of the token that was drawn from it, and the next draws those of the next step, with the
   codes that these leave.

   Draw i is row i's. Sets the interrupt flag if a token ends a text.
   The call has a STEP, the flag's address in `layer_at`, and the SAMPLER in `product_at`. */
KERNEL(advance) {
    (void)thread;
    const Step *step = (const Step *)call->step_at;
    Sampler *sampler = (Sampler *)call->product_at;
    Draw *draws = (Draw *)sampler->draws_at, *following = draws + step->num_rows;
    Row *rows = (Row *)step->rows_at;
    for (int64_t i = 0; i < step->num_rows; i++) {
        following[i].point = draws[i].point;
        following[i].width = draws[i].width;
        rows[i].token_id = draws[i].token_id;
        for (int64_t k = 0; k < step->num_end_ids; k++)
            if (rows[i].token_id == ((const int64_t *)step->end_ids_at)[k])
                __atomic_fetch_add((int64_t *)call->layer_at, 1, __ATOMIC_SEQ_CST);
        rows[i].position++;
        rows[i].num_in_suffix++;
    }
    sampler->draws_at = (int64_t)following;
}
