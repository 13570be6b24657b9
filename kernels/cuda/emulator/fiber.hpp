// Fibers: threads of execution that take turns on one system thread. Each has a stack, and gives up
// the processor only where it says so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace emulator {

/// A saved point of execution, to be resumed.
struct Context {
#if defined(__x86_64__)
    void *stack_pointer = nullptr;
#else
    ucontext_t saved;
#endif
};

#if defined(__x86_64__)
extern "C" void emulator_switch(void **save, void *load);

inline void switch_to(Context &from, Context &to) { emulator_switch(&from.stack_pointer, to.stack_pointer); }

/// Makes the next switch to `context` call `begin`, which never returns, on the stack that ends at
/// `stack + size`.
inline void prepare(Context &context, unsigned char *stack, size_t size, void (*begin)()) {
    uintptr_t top = (reinterpret_cast<uintptr_t>(stack) + size) & ~static_cast<uintptr_t>(15);
    void **slot = reinterpret_cast<void **>(top);
    // At a function's entry, the stack is aligned to 16 bytes below the pushed return address.
    *--slot = nullptr;
    *--slot = reinterpret_cast<void *>(begin);
    for (int i = 0; i < 6; i++) *--slot = nullptr;  // the registers that emulator_switch restores
    context.stack_pointer = slot;
}
#else
inline void switch_to(Context &from, Context &to) { swapcontext(&from.saved, &to.saved); }

inline void prepare(Context &context, unsigned char *stack, size_t size, void (*begin)()) {
    getcontext(&context.saved);
    context.saved.uc_stack.ss_sp = stack;
    context.saved.uc_stack.ss_size = size;
    context.saved.uc_link = nullptr;
    makecontext(&context.saved, begin, 0);
}
#endif

}  // namespace emulator
