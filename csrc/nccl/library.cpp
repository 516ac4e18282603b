#include "nccl/library.h"

#include <dlfcn.h>

#include "common/errors.h"

namespace coconet::cuda {

namespace {

// From 2.29 on, NCCL keeps the device structures of programs that were compiled with older headers.
// Before, it promised nothing, not even between patches.
constexpr int kFirstCompatible = 22900;

bool fits(int built_for, int version) {
    return version == built_for || (version > built_for && built_for >= kFirstCompatible);
}

}  // namespace

std::string nccl_version_text(int code) {
    const int major = code < 10000 ? 1000 : 10000;  // up to 2.8: 2708 is 2.7.8
    return std::to_string(code / major) + "." + std::to_string(code % major / 100) + "." +
           std::to_string(code % 100);
}

NcclLibrary::NcclLibrary(int built_for, const char* file)
    : handle_(dlopen(file, RTLD_NOW | RTLD_LOCAL)), place_(file) {
    if (!handle_)
        throw Error(ErrorKind::communicator,
                    std::string("NCCL: can't be loaded: ") + dlerror() +
                        "; it comes with a CUDA build of torch, or with pip's nvidia-nccl-cu13");
    const auto get_version = function<int(int*)>("ncclGetVersion");
    Dl_info info;
    if (dladdr(reinterpret_cast<void*>(get_version), &info) && info.dli_fname)
        place_ = info.dli_fname;
    if (const int result = get_version(&version_); result != 0)
        throw Error(ErrorKind::communicator, "NCCL: ncclGetVersion of " + place_ +
                                                 " failed with code " + std::to_string(result));
    if (!fits(built_for, version_))
        throw Error(ErrorKind::communicator,
                    "NCCL: " + place_ + " is version " + nccl_version_text(version_) +
                        ", but coconet_ops was built for " + nccl_version_text(built_for) +
                        (built_for >= kFirstCompatible ? " or newer" : " exactly") +
                        "; build it again with that version's headers");
}

void* NcclLibrary::find(const char* name) const {
    if (void* found = dlsym(handle_, name)) return found;
    throw Error(ErrorKind::communicator, "NCCL: " + place_ + " has no function " + name +
                                             "; the device API needs NCCL 2.28 or newer");
}

}  // namespace coconet::cuda
