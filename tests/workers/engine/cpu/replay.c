/* Makes the kernels' library a program: it runs programs of kernels that another process prepares in shared memory.

   Standard input is a file, mapped at MEMORY_AT; standard output is a socket. Sends the addresses of the kernels; then
   receives addresses of programs, and sends each back once the program has run. Has neither C library nor loader. */

#include "layouts.h"
#pragma GCC visibility push(hidden) /* no addresses that a loader must fill in */
typedef void Kernel(Call *, int64_t);
Kernel activate, add_and_norm, advance, attend, multiply, sample, scale, store_kv;
void run_program(Program *program);
long syscall(long number, ...);
enum { READ = 63, WRITE = 64, EXIT = 93, MMAP = 222, READ_WRITE = 3, SHARED_FIXED = 0x11 };
/* An address that the compiler does not put in a table, for the same reason. */
static inline Kernel *at(Kernel *kernel) {
    __asm__("" : "+r"(kernel));
    return kernel;
}

__asm__("syscall: mov x8, x0\nmov x0, x1\nmov x1, x2\nmov x2, x3\nmov x3, x4\nmov x4, x5\nmov x5, x6\nsvc 0\nret\n"
        ".global syscall");
__attribute__((no_builtin("memcpy"))) void *memcpy(void *to, const void *from, unsigned long num_bytes) {
    for (unsigned long i = 0; i < num_bytes; i++) ((char *)to)[i] = ((const char *)from)[i];
    return to;
}

void _start(void) {
    Kernel *const kernels[] = {at(activate), at(add_and_norm), at(advance), at(attend),
                               at(multiply), at(sample),       at(scale),   at(store_kv)};
    if (syscall(MMAP, MEMORY_AT, MEMORY_BYTES, READ_WRITE, SHARED_FIXED, 0L, 0L) != MEMORY_AT) syscall(EXIT, 1L);
    syscall(WRITE, 1L, kernels, sizeof kernels);
    for (Program *program; syscall(READ, 1L, &program, sizeof program) == sizeof program;) {
        run_program(program);
        syscall(WRITE, 1L, &program, sizeof program);
    }
    syscall(EXIT, 0L);
}
