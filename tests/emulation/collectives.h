// What the lanes of a warp do together, and a few helpers: out of the way of a kernel's own names.
#pragma once
#include "fibers.h"

namespace emulation {
namespace {

constexpr unsigned WHOLE_WARP = 0xffffffffu;

inline void completed_nothing(Warp&, unsigned) {}

inline void completed_ballot(Warp& warp, unsigned lanes) {
    uint64_t votes = 0;
    for (int lane = 0; lane < 32; ++lane)
        if (lanes >> lane & 1) votes |= warp.first[lane].value << lane;
    for (int lane = 0; lane < 32; ++lane)
        if (lanes >> lane & 1) warp.first[lane].result = votes;
}

// Which lane each one reads, by PTX's definition of shfl: its own where that would leave the segment.
struct Indexed {
    static int source(int, int first, int width, int lane) { return first | (lane & (width - 1)); }
};
struct Up {
    static int source(int lane, int first, int, int by) { return lane - by < first ? lane : lane - by; }
};
struct Down {
    static int source(int lane, int first, int width, int by) { return lane + by < first + width ? lane + by : lane; }
};
struct Xor {
    static int source(int lane, int first, int width, int by) { return (lane ^ by) < first + width ? lane ^ by : lane; }
};

template <typename Kind>
void completed_shuffle(Warp& warp, unsigned lanes) {
    for (int lane = 0; lane < 32; ++lane) {
        if (!(lanes >> lane & 1)) continue;
        Fiber& fiber = warp.first[lane];
        const int from = Kind::source(lane, lane & ~(fiber.width - 1), fiber.width, int(fiber.argument));
        fiber.result = lanes >> from & 1 ? warp.first[from].value : ~uint64_t(0);  // undefined: poison
    }
}

template <typename Kind, typename T>
inline T shuffle(const char* where, unsigned mask, T value, unsigned argument, int width, int line) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "no such shuffle");
    Fiber& self = *current;
    __builtin_memcpy(&self.value, &value, sizeof value);
    self.argument = argument;
    self.width = width;
    collective(completed_shuffle<Kind>, where, mask, line);
    __builtin_memcpy(&value, &self.result, sizeof value);
    return value;
}
// A type that is not deduced from its own argument, but from others.
template <typename T> struct Same { using type = T; };

template <typename To, typename From>
inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "not the same size");
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
}

template <typename A, typename B> using Common = decltype(true ? A() : B());

}  // namespace
}  // namespace emulation
