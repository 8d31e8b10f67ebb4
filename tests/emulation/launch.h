// What one launch gives the scheduler.
#pragma once
#include "fibers.h"

namespace emulation {

enum class Order { forward, reverse, shuffled };

struct Launch {
    const Entry* entry;
    Value values[64];
    Index grid;
    unsigned threads, cluster;
    size_t shared;
    Order order;
    uint64_t seed;
};

// Runs it; the text of what went wrong, or null.
const char* run(const Launch& launch);

}  // namespace emulation
