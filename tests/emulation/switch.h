// A switch from one stack to another: void emulation_switch(void** save, void* next) keeps what a call must keep in
// *save, then goes on where `next` left off; prepare() makes the first such place of a new stack.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && !defined(EMULATION_UCONTEXT)
asm(R"(
.text
.globl emulation_switch
.hidden emulation_switch
.type emulation_switch, @function
emulation_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulation_switch, .-emulation_switch
)");
#elif defined(__aarch64__) && !defined(EMULATION_UCONTEXT)
asm(R"(
.text
.globl emulation_switch
.hidden emulation_switch
.type emulation_switch, %function
emulation_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size emulation_switch, .-emulation_switch
)");
#else
#include <ucontext.h>
#define EMULATION_UCONTEXT
#endif

namespace emulation {

#ifdef EMULATION_UCONTEXT
inline void emulation_switch(void** save, void* next) {
    static ucontext_t first;  // the stack that nobody prepared
    if (!*save) *save = &first;
    swapcontext(static_cast<ucontext_t*>(*save), static_cast<ucontext_t*>(next));
}

inline void* prepare(unsigned char* stack, size_t size, void (*body)()) {
    auto context = reinterpret_cast<ucontext_t*>(stack + size) - 1;
    getcontext(context);
    context->uc_stack.ss_sp = stack;
    context->uc_stack.ss_size = size - sizeof(ucontext_t);
    makecontext(context, body, 0);
    return context;
}
#else
extern "C" void emulation_switch(void** save, void* next);

// `size` is a multiple of 16; body never returns.
inline void* prepare(unsigned char* stack, size_t size, void (*body)()) {
#ifdef __x86_64__
    constexpr int words = 8, start = 6;  // six registers, where `ret` goes, and where body would return to
#else
    constexpr int words = 20, start = 11;  // x19 to x28, x29, x30, and eight of floating point
#endif
    auto saved = reinterpret_cast<uintptr_t*>(stack + size) - words;
    memset(saved, 0, words * sizeof *saved);
    saved[start] = reinterpret_cast<uintptr_t>(body);
    return saved;
}
#endif

}  // namespace emulation
