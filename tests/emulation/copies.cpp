// Asynchronous copies as late as CUDA allows: they land when waited for, and their place is poison until then.  What
// asynchronous products read must stay as it is until they are waited for.
#include <stdlib.h>
#include <string.h>

#include <algorithm>

#include "fibers.h"

namespace emulation {

void copy_begin(void* to, const void* from, int bytes, bool inside) {
    Fiber& self = *current;
    if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % unsigned(bytes))
        fail("copy_async<%d>: a misaligned address", bytes);
    if (!in_shared(to, size_t(bytes))) fail("copy_async<%d>: not to shared memory", bytes);
    if (self.pending == self.capacity) {
        self.capacity = std::max(16, 2 * self.capacity);
        self.copies = static_cast<Copy*>(realloc(self.copies, size_t(self.capacity) * sizeof(Copy)));
    }
    Copy& copy = self.copies[self.pending++];
    copy.to = static_cast<unsigned char*>(to);
    copy.size = bytes;
    copy.group = self.group;
    if (inside)
        memcpy(copy.bytes, from, size_t(bytes));
    else
        memset(copy.bytes, 0, size_t(bytes));
    memset(to, poison, size_t(bytes));  // nobody may read it, from now until the wait
}

void copy_commit() { ++current->group; }

void copy_wait(int pending) {
    Fiber& self = *current;
    int kept = 0;
    for (int i = 0; i < self.pending; ++i) {
        const Copy copy = self.copies[i];
        if (copy.group < self.group - pending)
            memcpy(copy.to, copy.bytes, size_t(copy.size));
        else
            self.copies[kept++] = copy;
    }
    self.pending = kept;
}

Landing& opened(const void* at, const char* where) {
    for (Landing& landing : current->block->landings)
        if (landing.at == at) return landing;
    fail("%s: nobody has opened the landing", where);
}

void landing_open(const void* at, int threads) {
    if (reinterpret_cast<uintptr_t>(at) % 8 || !in_shared(at, 8)) fail("landing_open: not a place in shared memory");
    if (threads < 1) fail("landing_open: for %d threads", threads);
    for (const Landing& landing : current->block->landings)
        if (landing.at == at) fail("landing_open: it is open");
    current->block->landings.push_back({at, 0, unsigned(threads), 0, {}, nullptr});
}

void copy_bulk(void* to, const void* from, int bytes, const void* at) {
    if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | unsigned(bytes)) % 16 || bytes <= 0)
        fail("copy_bulk: %d bytes, or misaligned addresses", bytes);
    if (!in_shared(to, size_t(bytes))) fail("copy_bulk: not to shared memory");
    Landing& landing = opened(at, "copy_bulk");
    if (landing.closed == landing.threads) fail("copy_bulk: the turn is closed");
    const auto first = static_cast<const unsigned char*>(from);
    landing.copies.push_back({to, {first, first + bytes}});
    memset(to, poison, size_t(bytes));
}

void hold(const void* at, int bytes) {
    Fiber& self = *current;
    if (self.holds == self.room) {
        self.room = std::max(256, 2 * self.room);
        self.held = static_cast<Held*>(realloc(self.held, size_t(self.room) * sizeof(Held)));
    }
    Held& held = self.held[self.holds++];
    held.at = at;
    held.count = bytes;
    held.group = self.commits;
    memcpy(held.bytes, at, size_t(bytes));
}

// Only products of one shape are added up in order: others that meet in a register have to be waited for in between.
void add_to(const float* at, int count) {
    Fiber& self = *current;
    for (int i = 0; i < self.adding; ++i) {
        Sums& sums = self.sums[i];
        if (sums.at == at && sums.count == count) {
            sums.group = self.commits;
            return;
        }
        if (sums.at < at + count && at < sums.at + sums.count)
            fail("wgmma: products of different shapes are added to the same registers");
    }
    if (self.adding == int(sizeof self.sums / sizeof *self.sums)) fail("wgmma: more sums than the emulator follows");
    self.sums[self.adding++] = {at, count, self.commits};
}

void settled(const float* at) {
    for (int i = 0; i < current->adding; ++i) {
        const Sums& sums = current->sums[i];
        if (sums.at <= at && at < sums.at + sums.count)
            fail("wgmma: a register is taken over before its products have been waited for");
    }
}

void products_commit() { ++current->commits; }

void products_wait(int pending) {
    Fiber& self = *current;
    int kept = 0;
    for (int i = 0; i < self.holds; ++i) {
        const Held& held = self.held[i];
        if (memcmp(held.at, held.bytes, size_t(held.count)))
            fail("warpgroup_wait: %s was written to while it was multiplied",
                 in_shared(held.at, 1) ? "shared memory" : "a register");
        if (held.group >= self.commits - pending) self.held[kept++] = held;
    }
    self.holds = kept;
    int added = 0;
    for (int i = 0; i < self.adding; ++i)
        if (self.sums[i].group >= self.commits - pending) self.sums[added++] = self.sums[i];
    self.adding = added;
}

}  // namespace emulation
