#include "nccl/nccl_peers.h"

#include <cstring>
#include <string>

#include "common/errors.h"
#include "nccl/library.h"
#include "nccl/nccl_kernels.h"

namespace coconet::cuda {

static_assert(NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 9), "headers of NCCL 2.28.9 or newer");

namespace {

// The functions of NCCL's that are used here. The device API's other half is inlined in kernels.
struct Api {
    const NcclLibrary library{NCCL_VERSION_CODE};

#define COCONET_NCCL(name) decltype(&::name) const name = library.function<decltype(::name)>(#name)
    COCONET_NCCL(ncclGetErrorString);
    COCONET_NCCL(ncclGetLastError);
    COCONET_NCCL(ncclGetUniqueId);
    COCONET_NCCL(ncclCommInitRank);
    COCONET_NCCL(ncclMemAlloc);
    COCONET_NCCL(ncclMemFree);
    COCONET_NCCL(ncclCommWindowRegister);
    COCONET_NCCL(ncclCommWindowDeregister);
    COCONET_NCCL(ncclDevCommCreate);
    COCONET_NCCL(ncclDevCommDestroy);
#undef COCONET_NCCL
    // Overloaded: the other one is a device function.
    ncclTeam_t (*const ncclTeamLsa)(ncclComm_t) =
        library.function<ncclTeam_t(ncclComm_t)>("ncclTeamLsa");
};

// Loaded on first use, then kept.
const Api& api() {
    static const Api loaded;
    return loaded;
}

void check(ncclResult_t result, const char* call, int device) {
    if (result == ncclSuccess) return;
    std::string text = std::string("NCCL: ") + call + " on device " + std::to_string(device) +
                       " failed: " + api().ncclGetErrorString(result);
    const char* details = api().ncclGetLastError(nullptr);
    if (details && *details) text += std::string(" (") + details + ")";
    throw Error(ErrorKind::communicator, text);
}

ncclDevCommRequirements requirements() {
#if defined(NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER)
    // Holds the headers' version, from which NCCL knows how this program sees its structures.
    ncclDevCommRequirements needed = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
#else
    ncclDevCommRequirements needed{};  // 2.28
#endif
    needed.lsaBarrierCount = 1;
    return needed;
}

}  // namespace

std::string nccl_build_version() { return nccl_version_text(NCCL_VERSION_CODE); }

struct NcclPeers::Impl {
    const int device;
    const int64_t bytes;
    int ranks = 0;
    void* memory = nullptr;
    ncclComm_t comm = nullptr;
    ncclWindow_t window = nullptr;
    ncclDevComm device_comm{};
    bool has_device_comm = false;
    std::vector<void*> pointers;

    Impl(int device, int64_t bytes) : device(device), bytes(bytes) {
        const DeviceGuard guard(device);
        check(api().ncclMemAlloc(&memory, bytes), "ncclMemAlloc", device);
        try {
            zero_async(memory, bytes, nullptr);
            synchronize(nullptr);
        } catch (...) {
            api().ncclMemFree(memory);
            throw;
        }
    }

    // The communicator itself is left to the end of the process: recent releases of NCCL wait for
    // all ranks in ncclCommDestroy and even in ncclCommAbort, and a peer may be gone.
    ~Impl() {
        try {
            const DeviceGuard guard(device);
            if (has_device_comm) api().ncclDevCommDestroy(comm, &device_comm);
            if (window) api().ncclCommWindowDeregister(comm, window);
            api().ncclMemFree(memory);
        } catch (const Error&) {
            // No device any more, as when the process ends: then its memory is gone as well.
        }
    }
};

NcclPeers::NcclPeers(int device, int64_t bytes) : impl_(std::make_unique<Impl>(device, bytes)) {}
NcclPeers::~NcclPeers() = default;

std::string NcclPeers::new_meeting() {
    ncclUniqueId id;
    const ncclResult_t result = api().ncclGetUniqueId(&id);
    if (result != ncclSuccess)
        throw Error(ErrorKind::communicator, std::string("NCCL: ncclGetUniqueId failed: ") +
                                                 api().ncclGetErrorString(result));
    return {id.internal, sizeof id.internal};
}

void NcclPeers::connect(const std::string& meeting, int rank, int ranks) {
    ncclUniqueId id;
    if (meeting.size() != sizeof id.internal)
        throw Error(ErrorKind::communicator, "NCCL: the meeting has " +
                                                 std::to_string(meeting.size()) + " bytes, not " +
                                                 std::to_string(sizeof id.internal));
    memcpy(id.internal, meeting.data(), sizeof id.internal);
    const DeviceGuard guard(impl_->device);
    check(api().ncclCommInitRank(&impl_->comm, ranks, id, rank), "ncclCommInitRank", impl_->device);
    impl_->ranks = ranks;
    const ncclTeam_t team = api().ncclTeamLsa(impl_->comm);
    if (team.nRanks < ranks)
        throw Error(ErrorKind::communicator,
                    "NCCL: of " + std::to_string(ranks) + " ranks only " +
                        std::to_string(team.nRanks) + " can reach rank " + std::to_string(rank) +
                        "'s memory by load and store; this needs NVLink or peer access over PCIe");
}

void NcclPeers::map() {
    Impl& impl = *impl_;
    const DeviceGuard guard(impl.device);
    check(api().ncclCommWindowRegister(impl.comm, impl.memory, impl.bytes, &impl.window,
                                       NCCL_WIN_COLL_SYMMETRIC),
          "ncclCommWindowRegister", impl.device);
    if (!impl.window)  // how NCCL says so, with a result of success
        throw Error(ErrorKind::communicator,
                    "NCCL: symmetric windows are not supported here; they need NCCL_CUMEM_ENABLE "
                    "and a driver with virtual memory management");
    const ncclDevCommRequirements needed = requirements();
    check(api().ncclDevCommCreate(impl.comm, &needed, &impl.device_comm), "ncclDevCommCreate",
          impl.device);
    impl.has_device_comm = true;
    impl.pointers = window_pointers(impl.window, impl.ranks);
}

const std::vector<void*>& NcclPeers::pointers() const { return impl_->pointers; }

void NcclPeers::barrier(Stream stream) {
    const DeviceGuard guard(impl_->device);
    launch_barrier(impl_->device_comm, stream);
}

}  // namespace coconet::cuda
