/* What all kernels share: their signature, and how threads divide their work. */

#pragma once
#include "functions.h"
#include "vectors.h"
#include INSTRUCTION_SET /* a header of sets/ */

/* A kernel is called by each thread; it raises nothing and allocates nothing. */
#define KERNEL(name) __attribute__((visibility("default"))) void name(Call *call, int64_t thread)

/* The items of a kernel are partitioned statically: the same thread gets the same part of them in each kernel, which
   keeps its data in its own caches and lets it read memory in one piece. A thread that has finished its share steals
   items from the next shares. One thread and many run the same code and give the same bits.

   Share s consists of the items from ⌊num_items · s / num_shares⌋ on; its counter, after the CALL, says how many are
   claimed.

   turn: 0 at first; how many shares are exhausted.

   Returns the next item for a thread; `num_items` if none is left. */
static int64_t claim(Call *call, int64_t thread, int64_t *turn, int64_t num_items) {
    const int64_t num_shares = call->num_shares;
    int64_t *counters = (int64_t *)(call + 1);
    for (; *turn < num_shares; ++*turn) {
        int64_t share = (thread + *turn) % num_shares;
        int64_t item = num_items * share / num_shares + __atomic_fetch_add(&counters[share], 1, __ATOMIC_SEQ_CST);
        if (item < num_items * (share + 1) / num_shares) return item;
    }
    return num_items;
}

#define FOR_ITEMS(item, number) for (int64_t turn = 0, item; (item = claim(call, thread, &turn, number)) < (number);)
