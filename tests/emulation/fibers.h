// Threads of a block as fibers: what the emulated CUDA names need of the scheduler in fibers.cpp.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <utility>
#include <vector>

namespace emulation {

struct Index {
    unsigned x, y, z;
};

struct Fiber;

// Where all of `expected` fibers, beginning with `first`, meet.
struct Barrier {
    Fiber* first;
    unsigned expected, arrived, votes, counted;
    int line;
};

// One that some of a block's threads meet at; some do not wait there.
struct Named {
    unsigned expected, arrived;
    Fiber* waiting;  // the last of them, who knows the one before
};
constexpr int NAMED = 16;  // the first is __syncthreads'

struct Warp {
    Fiber* first;
    unsigned lanes;    // those that exist
    unsigned arrived;  // those that wait in a collective
};

// An asynchronous copy under way: read when issued, written when waited for.
struct Copy {
    unsigned char* to;
    unsigned char bytes[16];
    int size, group;
};

// A copy of many bytes, likewise.
struct Bulk {
    void* to;
    std::vector<unsigned char> bytes;
};

// A place in shared memory, its turns so far, how many threads close each and have closed this one, and the bulk copies
// on their way in it.
struct Landing {
    const void* at;
    unsigned turns, threads, closed;
    std::vector<Bulk> copies;
    Fiber* waiting;
};

struct Block {
    Index index;
    unsigned rank, exited;
    unsigned char* shared;  // dynamic shared memory
    Barrier barrier;
    Named named[NAMED];
    std::vector<Landing> landings;
};

// 16 bytes of shared memory that tensor cores may still be reading, and what they were.
struct Held {
    const void* at;
    unsigned char bytes[16];
    int count;  // of bytes
    int group;  // commits before it
};

// Registers of a lane that tensor cores may still be adding to.
struct Sums {
    const float* at;
    int count;
    int group;  // commits before it
};

// Runs once all `lanes` of a warp have arrived, on behalf of each of them.
using Complete = void (*)(Warp& warp, unsigned lanes);

struct Fiber {
    void* stack_pointer;
    unsigned char* stack;
    size_t stack_size;
    void* shadow;  // AddressSanitizer's
    Index thread;
    Block* block;
    Warp* warp;
    unsigned lane, position;
    bool exited;
    // Where it waits.
    const char* where;
    int line;
    Fiber* before;  // who came to wait at the same named barrier
    // Its part in a collective of its warp.
    Complete complete;
    unsigned mask, argument;
    int width;
    uint64_t value, result;
    void* operands[3];
    // Its asynchronous copies.
    Copy* copies;
    int pending, capacity, group;
    // What its products read.
    Held* held;
    int holds, room, commits;
    // What they are added to.
    Sums sums[256];
    int adding;
};

extern Fiber* current;
extern Index grid, threads;
extern int poison;  // the byte that unwritten memory is full of

[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char* format, ...);
unsigned block_barrier(const char* where, int line, unsigned vote);
void cluster_barrier(int line);
void named_barrier(const char* where, int id, int count, bool waits, int line);
void collective(Complete complete, const char* where, unsigned mask, int line);
bool in_shared(const void* pointer, size_t bytes);
void copy_begin(void* to, const void* from, int bytes, bool inside);
void copy_commit();
void copy_wait(int pending);
Landing& opened(const void* at, const char* where);  // the landing there, which somebody has to have opened
void landing_open(const void* at, int threads);
void copy_bulk(void* to, const void* from, int bytes, const void* at);
void landing_close(const void* at);
void landing_wait(const void* at, int turn, int line);
void hold(const void* at, int bytes);
void add_to(const float* at, int count);
void settled(const float* at);
void products_commit();
void products_wait(int pending);
// The place in the dynamic shared memory of block `rank` of the cluster that `own` is in this one's.
const void* remote(const void* own, size_t bytes, unsigned rank);

// One parameter of a kernel, as a launch passes it.
union Value {
    void* pointer;
    int number;
    long long large;
};

struct Entry {
    const char* name;
    const char* kinds;  // of its parameters: p(ointer), i(nt), l(ong), or ? for what no launch passes
    void (*call)(const Value*);
};

template <typename T>
struct Parameter {
    static constexpr char kind = T(0.5) != T(0) ? '?' : sizeof(T) == 4 ? 'i' : sizeof(T) == 8 ? 'l' : '?';
    static T of(const Value& value) { return T(sizeof(T) == 4 ? value.number : value.large); }
};
template <typename T>
struct Parameter<T*> {
    static constexpr char kind = 'p';
    static T* of(const Value& value) { return static_cast<T*>(value.pointer); }
};

template <auto function, typename... P>
struct Caller {
    static constexpr char kinds[] = {Parameter<P>::kind..., 0};
    template <size_t... I>
    static void unpacked(const Value* values, std::index_sequence<I...>) {
        function(Parameter<P>::of(values[I])...);
    }
    static void call(const Value* values) { unpacked(values, std::index_sequence_for<P...>()); }
};

// A constant, since the kernel's .bss is poisoned.
template <auto function, typename... P>
constexpr Entry entry(const char* name, void (*)(P...)) {
    return {name, Caller<function, P...>::kinds, Caller<function, P...>::call};
}

}  // namespace emulation

// A kernel's file ends with these.
extern const emulation::Entry emulation_entries[];
extern const int emulation_entry_count;
