// A libnccl.so.2 with nothing but its version, as told by the environment.
#include <cstdlib>

extern "C" int ncclGetVersion(int* version) {
    *version = atoi(getenv("FAKE_NCCL_VERSION"));
    return atoi(getenv("FAKE_NCCL_RESULT"));
}
