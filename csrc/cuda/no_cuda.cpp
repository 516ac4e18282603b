// The CUDA backend of builds without CUDA: says so.
#include "cuda/backend.h"

namespace coconet::cuda {

namespace {

constexpr const char* kWhy =
    "coconet_ops was built without CUDA; install it again where nvcc is found, or with "
    "COCONET_CUDA=1 to learn what is missing";

class NoCuda : public Backend {
  public:
    std::string version() const override { return ""; }
    std::string targets() const override { return ""; }
    int device_count(std::string* why) const override {
        *why = kWhy;
        return 0;
    }
    DeviceInfo device_info(int) const override { refuse(); }
    std::vector<std::shared_ptr<Communicator>> local(int, const Options&) const override {
        refuse();
    }
    std::shared_ptr<Communicator> peer(const PeerBuffers&, const Options&) const override {
        refuse();
    }
    int64_t buffer_bytes(int, const Options&) const override { refuse(); }

  private:
    [[noreturn]] static void refuse() { throw Error(ErrorKind::communicator, kWhy); }
};

}  // namespace

const Backend& backend() {
    static const NoCuda instance;
    return instance;
}

}  // namespace coconet::cuda
