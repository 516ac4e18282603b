// The cases of a native test program, and its main(). Shared with tests/emulator.
#pragma once

#include <cstdint>
#include <string>

namespace coconet::native {

struct Case {
    Case(const char* name, void (*run)());
    const char* name;
    void (*run)();
};

#define CASE(name)                              \
    static void name();                         \
    static const Case case_##name(#name, name); \
    static void name()

// Ends the case.
[[noreturn]] void failed(const std::string& text);
inline void expect(bool ok, const char* text) {
    if (!ok) failed(text);
}
void expect_in(const std::string& part, const std::string& text);

// Of this run of the program (--seed); printed when a case fails.
extern uint32_t seed;

// The program's name in its last line; each program defines it.
std::string program();

}  // namespace coconet::native
