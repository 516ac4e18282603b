#include "emulated_child.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

#include "cases.h"

namespace coconet::native {

std::string last_words(const std::function<void()>& body, const char* case_name) {
    const char* const kChild = "COCONET_CHILD_OF_TEST";
    if (getenv(kChild)) {
        const rlimit no_core{0, 0};
        setrlimit(RLIMIT_CORE, &no_core);
        body();
        exit(0);
    }
    char path[4096];
    const ssize_t length = readlink("/proc/self/exe", path, sizeof path);
    expect(length > 0, "no path of this program");
    const std::string command = std::string(kChild) + "=1 '" + std::string(path, length) +
                                "' --seed " + std::to_string(seed) + " " + case_name + " 2>&1";
    FILE* const pipe = popen(command.c_str(), "r");
    expect(pipe != nullptr, "no child process");
    std::string output;
    for (int c; (c = fgetc(pipe)) != EOF;) output += static_cast<char>(c);
    if (pclose(pipe) == 0) failed("a child process should not have survived this:\n" + output);
    return output;
}

}  // namespace coconet::native
