// The backend of csrc/cuda over the emulator, as a library that tests load: C functions, for
// _C.load_backend and for ctypes.
#include "cuda/device_backend.h"
#include "emulator/emulator.h"

using coconet::cuda::Backend;
using coconet::cuda::DeviceBackend;
using coconet::emulator::Graph;

#define COCONET_EXPORT extern "C" __attribute__((visibility("default")))

COCONET_EXPORT const Backend* coconet_backend() {
    static const DeviceBackend instance;
    return &instance;
}

// Of the null stream, which tests launch on.
COCONET_EXPORT void coconet_begin_capture() { coconet::emulator::begin_capture(nullptr); }
COCONET_EXPORT Graph* coconet_end_capture() {
    return new Graph(coconet::emulator::end_capture(nullptr));
}
COCONET_EXPORT void coconet_replay(const Graph* graph) { graph->replay(); }
COCONET_EXPORT void coconet_destroy_graph(Graph* graph) { delete graph; }

// The names of dtypes are those of the layer above.
COCONET_EXPORT void coconet_set_other_dtype_name(const char* (*name)(int)) {
    coconet::other_dtype_name = name;
}

COCONET_EXPORT void coconet_set_seed(uint64_t seed) { coconet::emulator::set_seed(seed); }
