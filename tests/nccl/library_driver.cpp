// library_driver BUILT_FOR FUNCTION: loads libnccl.so.2 and looks for a function in it.
#include <cstdio>
#include <cstdlib>

#include "common/errors.h"
#include "nccl/library.h"

int main(int, char** arguments) {
    try {
        const coconet::cuda::NcclLibrary library(atoi(arguments[1]));
        library.function<void()>(arguments[2]);
        printf("loaded %s\n", coconet::cuda::nccl_version_text(library.version()).c_str());
    } catch (const coconet::Error& error) {
        printf("%s: %s\n", error.kind == coconet::ErrorKind::communicator ? "error" : "wrong kind",
               error.what());
    }
}
