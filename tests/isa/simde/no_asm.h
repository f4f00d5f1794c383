// The kernels hold registers in place with `asm volatile("" : "+v"(register))`. SIMDe's registers are ordinary memory, and
// holding them in place is a matter of speed alone: with these, such a line is nothing.
#define asm
#define volatile(...) static_assert(true)
