#include "cuda/backend.h"

#include "cuda/device_backend.h"

namespace coconet::cuda {

const Backend& backend() {
    static const DeviceBackend instance;
    return instance;
}

}  // namespace coconet::cuda
