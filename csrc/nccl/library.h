// NCCL's shared library, found at run time: an extension that was built with its headers loads
// where there is no NCCL, and uses the copy that torch has loaded where there is one. No NCCL types
// here.
#pragma once

#include <string>

namespace coconet::cuda {

class NcclLibrary {
  public:
    // built_for: the version code of the headers that the caller was compiled with.
    // Raises Error(communicator) if the library can't be loaded or its version doesn't fit.
    explicit NcclLibrary(int built_for, const char* file = "libnccl.so.2");

    int version() const { return version_; }

    // Raises Error(communicator) if the library lacks it.
    template <class Function>
    Function* function(const char* name) const {
        return reinterpret_cast<Function*>(find(name));
    }

  private:
    void* find(const char* name) const;

    void* handle_;  // stays open: torch's threads may be inside
    std::string place_;
    int version_ = 0;
};

// "2.28.9" of 22809.
std::string nccl_version_text(int code);

}  // namespace coconet::cuda
