/* A program: kernels that the threads of a team run one after another, with a barrier after each. */

#include "kernels.h"

#ifdef __linux__
#if defined(__x86_64__)
#define SYS_FUTEX 202
#else
#define SYS_FUTEX 98 /* the table of system calls that newer architectures share */
#endif
enum { FUTEX_WAIT = 128, FUTEX_WAKE = 129 }; /* within a process */
long syscall(long number, ...);
#else
int sched_yield(void);
#endif

#define NUM_SPINS 4000 /* a thread looks this often, about 50 ns each time, before it sleeps */

/* Tells the CPU that the thread spins, which frees execution units for the core's other thread. */
INLINE void pause_cpu(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* The barrier: returns when the threads of a program have called it `target` times in total.

   OpenMP's own barrier puts a thread to sleep at once where a process has more computing threads than there are cores;
   waking it takes as long as a kernel runs. */
static void wait_for_all(Program *program, int64_t target) {
    int64_t *arrivals = &program->num_arrivals;
    if (__atomic_add_fetch(arrivals, 1, __ATOMIC_SEQ_CST) == target) {
#ifdef __linux__
        if (__atomic_load_n(&program->num_asleep, __ATOMIC_SEQ_CST))
            syscall(SYS_FUTEX, arrivals, FUTEX_WAKE, 1 << 30, 0L);
#endif
        return;
    }
    for (int spin = 0; spin < NUM_SPINS; spin++) {
        if (__atomic_load_n(arrivals, __ATOMIC_SEQ_CST) >= target) return;
        pause_cpu();
    }
#ifdef __linux__
    __atomic_fetch_add(&program->num_asleep, 1, __ATOMIC_SEQ_CST);
    for (int64_t seen; (seen = __atomic_load_n(arrivals, __ATOMIC_SEQ_CST)) < target;)
        syscall(SYS_FUTEX, arrivals, FUTEX_WAIT, (int)seen, 0L);
    __atomic_fetch_sub(&program->num_asleep, 1, __ATOMIC_SEQ_CST);
#else
    while (__atomic_load_n(arrivals, __ATOMIC_SEQ_CST) < target) sched_yield();
#endif
}

/* Runs all entries `num_times` times, each thread of the team; after each entry a barrier.

   A parallel region for each entry would cost some 50 µs: OpenMP's threads sleep between two of them. If the last
   entry runs on one thread, that thread then reads the interrupt flag. */
__attribute__((visibility("default"))) void run_program(Program *program) {
    typedef void Kernel(Call *, int64_t);
    typedef int TeamSize(void);
    const int64_t num_threads = program->team_size_at ? ((TeamSize *)program->team_size_at)() : 1;
    const int64_t thread = __atomic_fetch_add(&program->num_started, 1, __ATOMIC_SEQ_CST);
    const int64_t num_entries = program->num_entries;
    for (int64_t time = 0; time < __atomic_load_n(&program->num_times, __ATOMIC_SEQ_CST); time++)
        for (int64_t number = 0; number < num_entries; number++) {
            Entry *entry = (Entry *)((char *)(program + 1) + number * program->entry_bytes);
            Call *call = (Call *)(entry + 1);
            const int is_first = entry->is_shared || /* or the first to arrive */
                                 __atomic_fetch_add(&entry->num_arrivals, 1, __ATOMIC_SEQ_CST) == time * num_threads;
            if (is_first) {
                ((Kernel *)entry->kernel_at)(call, thread);
                if (number == num_entries - 1 && !entry->is_shared &&
                    __atomic_load_n((int64_t *)program->interrupt_at, __ATOMIC_SEQ_CST))
                    __atomic_store_n(&program->num_times, time + 1, __ATOMIC_SEQ_CST);
            }
            if (num_threads > 1) wait_for_all(program, (time * num_entries + number + 1) * num_threads);
            ((int64_t *)(call + 1))[thread] = 0;
        }
}
