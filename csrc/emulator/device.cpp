#include "emulator/device.h"

#include <stdio.h>
#include <stdlib.h>

#include <atomic>
#include <string>

namespace coconet::emulator {

void fence() { std::atomic_thread_fence(std::memory_order_seq_cst); }

void misaligned(const void* p, size_t bytes, const char* what) {
    char text[100];
    snprintf(text, sizeof text, "%s of %zu bytes at the address %p, which isn't a multiple of it",
             what, bytes, p);
    if (current) current->block.grid->fail(text);
    fprintf(stderr, "coconet emulator: %s\n", text);
    abort();
}

void copy_later(void* to, const void* from) {
    current->copies.push_back({to, from, current->groups});
}

void commit_copies() { ++current->groups; }

void finish_copies(unsigned n, void (*copy)(void* to, const void* from)) {
    auto& copies = current->copies;
    size_t done = 0;
    for (; done < copies.size() && copies[done].group + n < current->groups; ++done)
        copy(copies[done].to, copies[done].from);
    copies.erase(copies.begin(), copies.begin() + static_cast<std::ptrdiff_t>(done));
}

}  // namespace coconet::emulator
