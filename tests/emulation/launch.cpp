// Reads a call (emulate.py writes it) and runs its launches: as a library on the caller's memory, or, with sanitizers,
// as a program on files, so that every array has its own guarded place on the heap.
#include "launch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <sstream>
#include <string>
#include <vector>

namespace emulation {
namespace {

std::string failure(const std::string& name, const std::string& why) { return why + " in the launch of " + name; }

// "entry gridx gridy gridz threads shared cluster count", then `count` times "kind value".
std::string parse(std::istringstream& line, void** buffers, Launch& launch) {
    std::string name;
    size_t count;
    line >> name >> launch.grid.x >> launch.grid.y >> launch.grid.z >> launch.threads >> launch.shared;
    line >> launch.cluster >> count;
    for (int i = 0; i < emulation_entry_count; ++i)
        if (name == emulation_entries[i].name) launch.entry = &emulation_entries[i];
    const std::string kinds = launch.entry->kinds;
    if (count != kinds.size() || count > 64)
        return failure(name, "it takes " + std::to_string(kinds.size()) + " parameters, not " + std::to_string(count));
    for (size_t i = 0; i < count; ++i) {
        char kind;
        long long value;
        line >> kind >> value;
        if (kind != kinds[i]) {
            const std::string what = "parameter " + std::to_string(i + 1) + " is of kind '" + kinds[i];
            return failure(name, what + "', not '" + kind + "',");
        }
        if (kind == 'p') launch.values[i].pointer = buffers[value];
        if (kind == 'i') launch.values[i].number = int(value);
        if (kind == 'l') launch.values[i].large = value;
    }
    return "";
}

std::string run_all(const char* text, void** buffers, int order, uint64_t seed) {
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
        Launch launch = {};
        launch.order = Order(order);
        launch.seed = seed;
        std::istringstream words(line);
        const std::string wrong = parse(words, buffers, launch);
        if (!wrong.empty()) return wrong;
        if (const char* message = run(launch)) return message;
    }
    return "";
}

}  // namespace
}  // namespace emulation

#ifndef EMULATION_PROGRAM
extern "C" __attribute__((visibility("default"))) int emulation_run(const char* text, void** buffers, int order,
                                                                    unsigned long long seed,
                                                                    char* message, size_t size) {
    const std::string wrong = emulation::run_all(text, buffers, order, seed);
    snprintf(message, size, "%s", wrong.c_str());
    return !wrong.empty();
}
#else
// program CALL ORDER SEED BUFFER...: every buffer is a file, read before and written after.
int main(int count, char** arguments) {
    std::string text;
    std::vector<void*> buffers;
    std::vector<size_t> sizes;
    for (int i = 1; i < count; i += i == 1 ? 3 : 1) {
        FILE* file = fopen(arguments[i], "rb");
        fseek(file, 0, SEEK_END);
        const size_t size = size_t(ftell(file));
        rewind(file);
        void* memory = nullptr;
        if (posix_memalign(&memory, 256, size ? size : 1) || fread(memory, 1, size, file) != size) return 2;
        fclose(file);
        if (i == 1) {
            text.assign(static_cast<char*>(memory), size);
            continue;
        }
        buffers.push_back(memory);
        sizes.push_back(size);
    }
    const uint64_t seed = strtoull(arguments[3], nullptr, 10);
    const std::string wrong = emulation::run_all(text.c_str(), buffers.data(), atoi(arguments[2]), seed);
    if (!wrong.empty()) {
        fprintf(stderr, "%s\n", wrong.c_str());
        return 3;
    }
    for (size_t i = 0; i < buffers.size(); ++i) {
        FILE* file = fopen(arguments[4 + i], "wb");
        if (fwrite(buffers[i], 1, sizes[i], file) != sizes[i] || fclose(file)) return 2;
    }
    return 0;
}
#endif
