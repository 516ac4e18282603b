// A libnccl.so.2 that writes down its calls. The environment changes it:
//   FAKE_NCCL_VERSION   its version code
//   FAKE_NCCL_FAIL      the function that fails
//   FAKE_NCCL_TEAM      ranks that reach each other by load and store
//   FAKE_NCCL_NO_WINDOW symmetric windows are not supported
#include <nccl.h>
#include <nccl_device.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

int number(const char* name, int otherwise) {
    const char* value = getenv(name);
    return value ? atoi(value) : otherwise;
}

ncclResult_t called(const char* name) {
    printf("%s\n", name);
    const char* failing = getenv("FAKE_NCCL_FAIL");
    return failing && !strcmp(failing, name) ? ncclSystemError : ncclSuccess;
}

alignas(4096) unsigned char memory[4096];
int ranks_connected;

ncclComm_t const kComm = reinterpret_cast<ncclComm_t>(0x10);
ncclWindow_t const kWindow = reinterpret_cast<ncclWindow_t>(0x20);

void expect(bool holds, const char* what) {
    if (!holds) printf("unexpected: %s\n", what);
}

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
    *version = number("FAKE_NCCL_VERSION", NCCL_VERSION_CODE);
    return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
    return result == ncclSystemError ? "system error" : "another error";
}

const char* ncclGetLastError(ncclComm_t) { return "the fake was told to"; }

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    for (int i = 0; i < NCCL_UNIQUE_ID_BYTES; ++i) id->internal[i] = static_cast<char>(i);
    return called("ncclGetUniqueId");
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
    for (int i = 0; i < NCCL_UNIQUE_ID_BYTES; ++i)
        expect(id.internal[i] == static_cast<char>(i), "ncclUniqueId");
    expect(ranks == 4 && rank == 1, "rank and ranks");
    ranks_connected = ranks;
    const ncclResult_t result = called("ncclCommInitRank");
    *comm = result == ncclSuccess ? kComm : nullptr;
    return result;
}

ncclTeam_t ncclTeamLsa(ncclComm_t comm) {
    expect(comm == kComm, "comm of ncclTeamLsa");
    return {number("FAKE_NCCL_TEAM", ranks_connected), 1, 1};
}

ncclResult_t ncclMemAlloc(void** p, size_t bytes) {
    expect(bytes == sizeof memory, "bytes");
    memset(memory, 255, sizeof memory);
    const ncclResult_t result = called("ncclMemAlloc");
    *p = result == ncclSuccess ? memory : nullptr;
    return result;
}

ncclResult_t ncclMemFree(void* p) {
    expect(p == memory, "memory");
    return called("ncclMemFree");
}

ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* p, size_t bytes, ncclWindow_t* window,
                                    int flags) {
    expect(comm == kComm && p == memory && bytes == sizeof memory, "window");
    expect(flags == NCCL_WIN_COLL_SYMMETRIC, "flags");
    for (const unsigned char byte : memory) expect(byte == 0, "memory is not zero yet");
    const ncclResult_t result = called("ncclCommWindowRegister");
    *window = result == ncclSuccess && !getenv("FAKE_NCCL_NO_WINDOW") ? kWindow : nullptr;
    return result;
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
    expect(comm == kComm && window == kWindow, "window to deregister");
    return called("ncclCommWindowDeregister");
}

ncclResult_t ncclDevCommCreate(ncclComm_t comm, const ncclDevCommRequirements_t* needed,
                               ncclDevComm_t* device_comm) {
    expect(comm == kComm && needed->lsaBarrierCount == 1, "requirements");
    expect(needed->resourceRequirementsList == nullptr, "resourceRequirementsList");
#if defined(NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER)
    expect(needed->size == sizeof *needed && needed->version == NCCL_VERSION_CODE, "initializer");
#endif
    device_comm->lsaSize = 17;
    return called("ncclDevCommCreate");
}

ncclResult_t ncclDevCommDestroy(ncclComm_t comm, const ncclDevComm_t* device_comm) {
    expect(comm == kComm && device_comm->lsaSize == 17, "device communicator");
    return called("ncclDevCommDestroy");
}

}  // extern "C"
