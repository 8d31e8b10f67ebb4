// Runs the blocks (or clusters) of a launch one after another, the threads of one as fibers.
#include "fibers.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "guarded.h"
#include "launch.h"
#include "switch.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// Static shared memory: the linker's names for the ends of the section that build.py renames the kernel's .bss to.
extern unsigned char __start_cuda_shared[] __attribute__((weak, visibility("hidden")));
extern unsigned char __stop_cuda_shared[] __attribute__((weak, visibility("hidden")));

namespace emulation {

Fiber* current;
Index grid, threads;
int poison;

namespace {

// NaN; since fmaxf and fminf ignore that, 3.4e38 and -1.7e38 as well: blocks take turns.
constexpr int POISONS[] = {0xff, 0x7f, 0xfe};
constexpr size_t GUARD = 4096;    // on either side of dynamic shared memory
constexpr int GUARD_BYTE = 0xf9;
#ifdef __SANITIZE_ADDRESS__
constexpr size_t STACK = 512 << 10;  // its frames are larger
#else
constexpr size_t STACK = 128 << 10;
#endif

const Launch* launch;
Fiber scheduler;
std::vector<Fiber> fibers;
std::vector<Warp> warps;
std::vector<Block> blocks;  // those of the cluster under way, or the one block
Barrier whole_cluster;
std::vector<Fiber*> order;    // position -> fiber
std::vector<uint64_t> ready;  // a bit per position
size_t cursor;                // in `ready`
std::vector<Fiber*> patient;  // those that go on when nobody else can
unsigned char *stacks, *shared_memory;
size_t shared_stride;
uint64_t random_state;
std::string error;

size_t static_shared() { return size_t(__stop_cuda_shared - __start_cuda_shared); }

// Goes on in `to`; returns when somebody comes back to `from`.
void switch_to(Fiber& from, Fiber& to) {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(&from.shadow, to.stack, to.stack_size);
#endif
    current = &to;
    emulation_switch(&from.stack_pointer, to.stack_pointer);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(from.shadow, nullptr, nullptr);
#endif
}

void make_ready(const Fiber& fiber) { ready[fiber.position / 64] |= uint64_t(1) << fiber.position % 64; }

Fiber* next_ready() {
    for (size_t tried = 0; tried <= ready.size(); ++tried) {
        uint64_t& word = ready[cursor];
        if (word) {
            const int bit = __builtin_ctzll(word);
            word &= word - 1;
            return order[cursor * 64 + size_t(bit)];
        }
        cursor = cursor + 1 == ready.size() ? 0 : cursor + 1;
    }
    return nullptr;
}

// Leaves the current fiber until it is made ready.
void wait() {
    Fiber* next = next_ready();
    if (!next && !patient.empty()) {
        next = patient.front();
        patient.erase(patient.begin());
    }
    if (next != current) switch_to(*current, next ? *next : scheduler);  // who gave way to nobody goes on
}

// Lets all others go first, as far as they get.
void give_way() {
    patient.push_back(current);
    wait();
}

// What every fiber does: one thread of one block after another.
void body() {
#ifdef __SANITIZE_ADDRESS__
    const void* from;
    size_t size;
    __sanitizer_finish_switch_fiber(nullptr, &from, &size);
    if (!scheduler.stack) {  // the first fiber comes from there
        scheduler.stack = static_cast<unsigned char*>(const_cast<void*>(from));
        scheduler.stack_size = size;
    }
#endif
    for (;;) {
        launch->entry->call(launch->values);
        if (current->pending) fail("the end of a thread: copies are on their way that nobody waited for");
        if (current->holds) fail("the end of a thread: products are under way that nobody waited for");
        current->exited = true;
        ++current->block->exited;
        wait();
    }
}

std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));
std::string text(const char* format, ...) {
    char line[500];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    return line;
}

std::string place(const Block& block) {
    return text(" in %s, block (%u, %u, %u)", launch->entry->name, block.index.x, block.index.y, block.index.z);
}

std::string place(const Fiber& fiber) {
    return place(*fiber.block) + text(", thread (%u, %u, %u)", fiber.thread.x, fiber.thread.y, fiber.thread.z);
}

// All are to meet in one line: where they do not, a GPU may hang or mix up two barriers.
unsigned meet(Barrier& barrier, const char* where, int line, unsigned vote) {
    Fiber& self = *current;
    self.where = where;
    self.line = line;
    if (!barrier.arrived) barrier.line = line;
    if (barrier.line != line) fail("divergent %s: lines %d and %d", where, barrier.line, line);
    barrier.votes += vote;
    if (++barrier.arrived < barrier.expected) {
        wait();
        return barrier.counted;
    }
    barrier.counted = barrier.votes;
    barrier.arrived = barrier.votes = 0;
    for (Fiber* fiber = barrier.first; fiber < barrier.first + barrier.expected; ++fiber)
        if (fiber != &self) make_ready(*fiber);
    return barrier.counted;
}

// As late as CUDA allows: when somebody waits for it.
void land(Landing& landing) {
    for (const Bulk& copy : landing.copies) memcpy(copy.to, copy.bytes.data(), copy.bytes.size());
    landing.copies.clear();
    landing.closed = 0;
    ++landing.turns;
}

}  // namespace

void fail(const char* format, ...) {
    char line[500];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    error = line + place(*current);
    switch_to(*current, scheduler);
    __builtin_unreachable();  // a fiber that failed is never gone on with
}

unsigned block_barrier(const char* where, int line, unsigned vote) {
    return meet(current->block->barrier, where, line, vote);
}

bool in_shared(const void* pointer, size_t bytes) {
    const auto at = static_cast<const unsigned char*>(pointer);
    const unsigned char* dynamic = current->block->shared;
    return (at >= dynamic && at + bytes <= dynamic + launch->shared) ||
           (at >= __start_cuda_shared && at + bytes <= __stop_cuda_shared);
}

void named_barrier(const char* where, int id, int count, bool waits, int line) {
    if (id < 1 || id >= NAMED || count < 32 || count % 32 || count > int(launch->threads))
        fail("%s in line %d: barrier %d for %d threads", where, line, id, count);
    Named& barrier = current->block->named[id];
    if (!barrier.arrived) barrier.expected = unsigned(count);
    if (barrier.expected != unsigned(count))
        fail("%s in line %d: barrier %d is for %u threads, not for %d", where, line, id, barrier.expected, count);
    if (++barrier.arrived == barrier.expected) {
        for (; barrier.waiting; barrier.waiting = barrier.waiting->before) make_ready(*barrier.waiting);
        barrier.arrived = 0;
        return waits ? void() : give_way();
    }
    if (!waits) return give_way();
    current->before = barrier.waiting;
    barrier.waiting = current;
    current->where = where;
    current->line = line;
    wait();
}

void landing_wait(const void* at, int turn, int line) {
    if (turn != 0 && turn != 1) fail("landing_wait in line %d: there is no turn %d", line, turn);
    Landing& landing = opened(at, "landing_wait");
    if (landing.turns % 2 != unsigned(turn)) return;  // that turn is over
    if (landing.closed == landing.threads) return land(landing);
    current->before = landing.waiting;
    landing.waiting = current;
    current->where = "landing_wait";
    current->line = line;
    wait();
}

void landing_close(const void* at) {
    Landing& landing = opened(at, "landing_close");
    if (landing.closed == landing.threads) fail("landing_close: the last turn is not over");
    if (++landing.closed < landing.threads) return;
    if (landing.waiting) {
        land(landing);
        for (; landing.waiting; landing.waiting = landing.waiting->before) make_ready(*landing.waiting);
    }
    give_way();
}

void cluster_barrier(int line) { meet(whole_cluster, "cluster_barrier", line, 0); }

void collective(Complete complete, const char* where, unsigned mask, int line) {
    Fiber& self = *current;
    Warp& warp = *self.warp;
    self.complete = complete;
    self.where = where;
    self.line = line;
    self.mask = mask;
    if (!(mask >> self.lane & 1)) fail("%s in line %d: its mask %#x lacks the calling lane", where, line, mask);
    const unsigned lanes = mask & warp.lanes;
    warp.arrived |= 1u << self.lane;
    if ((warp.arrived & lanes) != lanes) return wait();
    for (unsigned rest = lanes; rest; rest &= rest - 1) {
        const Fiber& other = warp.first[__builtin_ctz(rest)];
        if (other.complete != complete || other.mask != mask)
            fail("divergent warp: %s in line %d and %s in line %d", other.where, other.line, where, line);
    }
    warp.arrived &= ~lanes;
    complete(warp, lanes);
    for (unsigned rest = lanes & ~(1u << self.lane); rest; rest &= rest - 1)
        make_ready(warp.first[__builtin_ctz(rest)]);
}

const void* remote(const void* own, size_t bytes, unsigned rank) {
    const Block& block = *current->block;
    const ptrdiff_t offset = static_cast<const unsigned char*>(own) - block.shared;
    if (offset < 0 || size_t(offset) + bytes > launch->shared) fail("cluster_load: outside dynamic shared memory");
    if (rank >= launch->cluster) fail("cluster_load: rank %u of a cluster of %u", rank, launch->cluster);
    const Block& other = blocks[rank];
    if (other.exited) fail("cluster_load: threads of block %u have exited, its memory may be another's", rank);
    return other.shared + offset;
}

namespace {

uint64_t random_below(uint64_t bound) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state % bound;
}

template <typename T>
void arrange(std::vector<T>& items) {
    if (launch->order == Order::reverse) std::reverse(items.begin(), items.end());
    if (launch->order == Order::shuffled)
        for (size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[random_below(i)]);
}

void build() {
    const size_t per_block = launch->threads, count = per_block * launch->cluster;
    const size_t warps_per_block = (per_block + 31) / 32;
    stacks = static_cast<unsigned char*>(mmap(nullptr, count * STACK, PROT_READ | PROT_WRITE,
                                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (stacks == MAP_FAILED) abort();
    shared_stride = (launch->shared + 15) / 16 * 16 + 2 * GUARD;
    const size_t bytes = (shared_stride * launch->cluster + 1023) / 1024 * 1024;
    shared_memory = static_cast<unsigned char*>(aligned_alloc(1024, bytes));
    memset(shared_memory, GUARD_BYTE, shared_stride * launch->cluster);
    fibers.assign(count, {});
    warps.assign(warps_per_block * launch->cluster, {});
    blocks.assign(launch->cluster, {});
    order.assign(count, nullptr);
    ready.assign((count + 63) / 64, 0);
    scheduler = {};
    for (size_t b = 0; b < launch->cluster; ++b) {
        blocks[b].rank = unsigned(b);
        blocks[b].barrier = {&fibers[b * per_block], unsigned(per_block), 0, 0, 0, 0};
        blocks[b].shared = shared_memory + b * shared_stride + GUARD;
#ifdef __SANITIZE_ADDRESS__
        ASAN_POISON_MEMORY_REGION(blocks[b].shared - GUARD, GUARD);
        ASAN_POISON_MEMORY_REGION(blocks[b].shared + launch->shared, shared_stride - GUARD - launch->shared);
#endif
    }
    for (size_t w = 0; w < warps.size(); ++w) {
        const size_t first = w % warps_per_block * 32, lanes = std::min<size_t>(32, per_block - first);
        warps[w] = {&fibers[w / warps_per_block * per_block + first], unsigned((uint64_t(1) << lanes) - 1), 0};
    }
    for (size_t f = 0; f < count; ++f) {
        Fiber& fiber = fibers[f];
        const size_t thread = f % per_block;
        fiber.stack = stacks + f * STACK;
        fiber.stack_size = STACK;
        fiber.stack_pointer = prepare(fiber.stack, STACK, body);
        fiber.thread = {unsigned(thread), 0, 0};
        fiber.lane = unsigned(thread % 32);
        fiber.block = &blocks[f / per_block];
        fiber.warp = &warps[f / per_block * warps_per_block + thread / 32];
    }
}

void destroy() {
#ifdef __SANITIZE_ADDRESS__
    ASAN_UNPOISON_MEMORY_REGION(shared_memory, shared_stride * launch->cluster);
    ASAN_UNPOISON_MEMORY_REGION(stacks, fibers.size() * STACK);
#endif
    for (Fiber& fiber : fibers) free(fiber.copies), free(fiber.held);
    munmap(stacks, fibers.size() * STACK);
    free(shared_memory);
}

// What the threads that did not come to an end wait for.
std::string deadlock() {
    std::string message = "deadlock" + place(blocks[0]);
    std::vector<const Fiber*> waiting;
    size_t exited = 0;
    for (const Fiber& fiber : fibers) {
        exited += fiber.exited;
        const auto same = [&](const Fiber* f) { return f->line == fiber.line && !strcmp(f->where, fiber.where); };
        if (!fiber.exited && std::none_of(waiting.begin(), waiting.end(), same)) waiting.push_back(&fiber);
    }
    for (const Fiber* fiber : waiting)
        message += text("; thread (%u, 0, 0) of block %u waits in %s, line %d", fiber->thread.x, fiber->block->rank,
                        fiber->where, fiber->line);
    return message + text("; %zu of %zu threads have exited", exited, fibers.size());
}

void check_guards([[maybe_unused]] const Block& block) {
#ifndef __SANITIZE_ADDRESS__
    const auto intact = [](const unsigned char* from, const unsigned char* to) {
        return std::all_of(from, to, [](unsigned char byte) { return byte == GUARD_BYTE; });
    };
    const unsigned char* end = block.shared + launch->shared;
    if (!intact(block.shared - GUARD, block.shared) || !intact(end, block.shared - GUARD + shared_stride))
        error = text("wrote outside the %zu bytes of dynamic shared memory", launch->shared) + place(block);
#endif
}

// Byte by byte, since AddressSanitizer has its own zones between the variables.
__attribute__((no_sanitize("address"))) void poison_static_shared() {
#ifdef __SANITIZE_ADDRESS__
    for (volatile unsigned char* at = __start_cuda_shared; at < __stop_cuda_shared; ++at) *at = poison;
#else
    if (static_shared()) memset(__start_cuda_shared, poison, static_shared());
#endif
}

void run_cluster(Index first) {
    poison = POISONS[(unsigned(launch->order) + launch->seed + first.x + first.y + first.z) % 3];
    for (Block& block : blocks) {
        block.index = {first.x + block.rank, first.y, first.z};
        block.exited = 0;
        std::fill(block.named, block.named + NAMED, Named{});
        block.landings.clear();
        memset(block.shared, poison, launch->shared);
    }
    poison_static_shared();
    for (size_t f = 0; f < fibers.size(); ++f) {
        fibers[f].exited = false;
        fibers[f].pending = fibers[f].holds = 0;
        order[f] = &fibers[f];
    }
    arrange(order);
    for (unsigned p = 0; p < order.size(); ++p) {
        order[p]->position = p;
        make_ready(*order[p]);
    }
    whole_cluster = {fibers.data(), unsigned(fibers.size()), 0, 0, 0, 0};
    cursor = 0;
    patient.clear();
    switch_to(scheduler, *next_ready());
    if (!error.empty()) return;
    for (const Block& block : blocks) {
        check_guards(block);
        if (block.exited < launch->threads) {
            error = deadlock();
            return;
        }
        for (const Landing& landing : block.landings)
            if (!landing.copies.empty()) error = "copies are on their way that nobody waited for" + place(block);
        for (int id = 0; id < NAMED; ++id)
            if (block.named[id].arrived) error = text("barrier %d is left to others", id) + place(block);
    }
}

void run_clusters() {
    const unsigned across = launch->grid.x / launch->cluster;
    std::vector<uint64_t> clusters(uint64_t(across) * grid.y * grid.z);
    std::iota(clusters.begin(), clusters.end(), 0);
    arrange(clusters);
    for (size_t c = 0; c < clusters.size() && error.empty(); ++c)
        run_cluster({unsigned(clusters[c] % across) * launch->cluster, unsigned(clusters[c] / across % grid.y),
                     unsigned(clusters[c] / across / grid.y)});
}

}  // namespace

const char* run(const Launch& given) {
    launch = &given;
    grid = given.grid;
    threads = {given.threads, 1, 1};
    random_state = given.seed * 0x9e3779b97f4a7c15 + 0x2545f4914f6cdd1d;
    error.clear();
#ifndef __SANITIZE_ADDRESS__  // which has things of its own in .bss
    if (given.cluster > 1 && static_shared()) return "a cluster's blocks have static shared memory: use dynamic";
#endif
    build();
#ifndef __SANITIZE_ADDRESS__
    Guarded guarded;
    if (const int signal = sigsetjmp(crash, 1))
        error = (signal == SIGVTALRM ? "no end in sight" : "memory fault (sanitize=True tells more)") + place(*current);
    else
#endif
        run_clusters();
    destroy();
    return error.empty() ? nullptr : error.c_str();
}

}  // namespace emulation
