// Kernels that must end the process, or that a sanitizer must stop: run in a child process.
#pragma once

#include <functional>
#include <string>

namespace coconet::native {

// Called once in a case, whose name is the default. Runs the case again in a child, where this runs
// body; fails if the child succeeds, else returns what it has printed.
std::string last_words(const std::function<void()>& body,
                       const char* case_name = __builtin_FUNCTION());

}  // namespace coconet::native
