// Crashes and endless loops of a kernel become errors, so that the process that runs it lives on.
#pragma once
#include <setjmp.h>
#include <signal.h>
#include <sys/time.h>

namespace emulation {

inline sigjmp_buf crash;  // where to go on; the signal's number arrives there
constexpr int PATIENCE = 100;  // seconds of the processor, after which a kernel counts as hanging
constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGVTALRM};

inline void on_signal(int signal) {
    ::signal(signal, SIG_DFL);  // a second one would be ours
    siglongjmp(crash, signal);
}

// Makes errors of crashes and endless loops while it lives.
struct Guarded {
    Guarded() {
        handling.ss_sp = stack;
        handling.ss_size = sizeof stack;
        sigaltstack(&handling, &stack_before);
        struct sigaction action = {};
        action.sa_handler = on_signal;
        action.sa_flags = SA_ONSTACK;
        for (int i = 0; i < 3; ++i) sigaction(SIGNALS[i], &action, &before[i]);
        const itimerval patience = {{0, 0}, {PATIENCE, 0}};
        setitimer(ITIMER_VIRTUAL, &patience, nullptr);
    }
    ~Guarded() {
        const itimerval off = {};
        setitimer(ITIMER_VIRTUAL, &off, nullptr);
        for (int i = 0; i < 3; ++i) sigaction(SIGNALS[i], &before[i], nullptr);
        sigaltstack(&stack_before, nullptr);
    }
    stack_t handling = {}, stack_before;
    struct sigaction before[3];
    alignas(16) static inline char stack[1 << 16];
};

}  // namespace emulation
