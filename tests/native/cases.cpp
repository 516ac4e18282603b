#include "cases.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <chrono>
#include <exception>
#include <stdexcept>
#include <vector>

namespace coconet::native {

uint32_t seed = 1;

namespace {

struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

std::vector<const Case*>& cases() {
    static std::vector<const Case*> all;
    return all;
}

}  // namespace

Case::Case(const char* name, void (*run)()) : name(name), run(run) { cases().push_back(this); }

void failed(const std::string& text) { throw Failure(text); }

void expect_in(const std::string& part, const std::string& text) {
    if (text.find(part) == std::string::npos) failed("\"" + part + "\" isn't in: " + text);
}

namespace {

// Arguments: --seed N, and parts of the names of the cases to run. Returns the number of failures.
int run_cases(int argc, char** argv) {
    std::vector<std::string> wanted;
    for (int i = 1; i < argc; ++i) {
        if (strcmp(argv[i], "--seed") == 0 && i + 1 < argc)
            seed = static_cast<uint32_t>(strtoul(argv[++i], nullptr, 10));
        else
            wanted.emplace_back(argv[i]);
    }
    int passes = 0, failures = 0;
    const auto start = Clock::now();
    for (const Case* c : cases()) {
        bool chosen = wanted.empty();
        for (const auto& part : wanted)
            chosen = chosen || std::string(c->name).find(part) != std::string::npos;
        if (!chosen) continue;
        printf("%s ", c->name);
        fflush(stdout);
        const auto begin = Clock::now();
        try {
            c->run();
            ++passes;
            printf("passed (%.2f s)\n", seconds_since(begin));
        } catch (const std::exception& error) {
            ++failures;
            printf("FAILED (seed %u): %s\n", seed, error.what());
        }
    }
    printf("== %s: %d failed, %d passed in %.2f s ==\n", program().c_str(), failures, passes,
           seconds_since(start));
    return passes > 0 ? failures : 1;
}

}  // namespace

}  // namespace coconet::native

int main(int argc, char** argv) { return coconet::native::run_cases(argc, argv) == 0 ? 0 : 1; }
