// runtime.h and launch.cuh on the CPU: device memory is memory, a stream runs what it is given at
// once, unless it is being captured.
#include "cuda/runtime.h"

#include <string.h>

#include <functional>
#include <map>
#include <mutex>
#include <new>
#include <vector>

#include "common/base.h"
#include "common/errors.h"
#include "cuda/launch.cuh"
#include "emulator/emulator.h"
#include "emulator/grid.h"
#include "emulator/limits.h"
#include "emulator/sanitizers.h"
#include "emulator/settings.h"

namespace coconet {

namespace emulator {

struct Graph::Content {
    std::vector<std::function<void()>> steps;
};

namespace {

std::mutex captures_mutex;
std::map<cuda::Stream, std::unique_ptr<Graph::Content>> captures;

[[noreturn]] void raise(const std::string& what, const char* why) {
    throw Error(ErrorKind::communicator, "CUDA: " + what + " failed: " + why);
}

void expect_device(int device) {
    if (device != 0) raise("the device " + std::to_string(device), "invalid device ordinal");
}

// Keeps the step for later if the stream is being captured.
bool captured(cuda::Stream stream, const std::function<void()>& step) {
    const Unseen unseen;
    const std::lock_guard<std::mutex> lock(captures_mutex);
    const auto found = captures.find(stream);
    if (found == captures.end()) return false;
    found->second->steps.push_back(step);
    return true;
}

void run(const cuda::KernelCall& call, const cuda::LaunchShape& shape) {
    const auto blocks = shape.blocks_x * shape.blocks_y;
    const auto resident = static_cast<unsigned>(
        emulator::resident_blocks(shape.threads, shape.shared_bytes, settings().multiprocessors));
    Grid(call, shape).run(blocks < resident ? blocks : resident);
}

void run_or_capture(cuda::Stream stream, const std::function<void()>& step) {
    if (!captured(stream, step)) step();
}

constexpr std::align_val_t kAlign{256};

void* zeroed(int64_t bytes) {
    const auto size = static_cast<size_t>(max64(bytes, 1));
    void* const p = ::operator new(size, kAlign);
    memset(p, 0, size);
    return p;
}

}  // namespace

Graph::Graph() : content_(std::make_unique<Content>()) {}
Graph::Graph(Graph&&) noexcept = default;
Graph& Graph::operator=(Graph&&) noexcept = default;
Graph::~Graph() = default;

void Graph::replay() const {
    for (const auto& step : content_->steps) step();
}

void begin_capture(cuda::Stream stream) {
    const std::lock_guard<std::mutex> lock(captures_mutex);
    auto& content = captures[stream];
    if (content) raise("begin_capture", "the stream is already being captured");
    content = std::make_unique<Graph::Content>();
}

Graph end_capture(cuda::Stream stream) {
    const std::lock_guard<std::mutex> lock(captures_mutex);
    const auto found = captures.find(stream);
    if (found == captures.end()) raise("end_capture", "the stream is not being captured");
    Graph graph;
    graph.content_ = std::move(found->second);
    captures.erase(found);
    return graph;
}

}  // namespace emulator

namespace cuda {

using namespace emulator;

int device_count(std::string*) { return 1; }

DeviceInfo device_info(int device) {
    expect_device(device);
    return {"emulated", 8, 0, settings().multiprocessors, int64_t{1} << 30};
}

DeviceGuard::DeviceGuard(int device) { expect_device(device); }
DeviceGuard::~DeviceGuard() = default;

void* allocate(int device, int64_t bytes) {
    expect_device(device);
    return zeroed(bytes);
}
void release(int, void* p) { ::operator delete(p, kAlign); }
void* allocate_host_visible(int64_t bytes) { return zeroed(bytes); }
void release_host_visible(void* p) { ::operator delete(p, kAlign); }

void copy_async(void* to, const void* from, int64_t bytes, Stream stream) {
    if (bytes > 0) run_or_capture(stream, [=] { memmove(to, from, static_cast<size_t>(bytes)); });
}
void zero_async(void* p, int64_t bytes, Stream stream) {
    if (bytes > 0) run_or_capture(stream, [=] { memset(p, 0, static_cast<size_t>(bytes)); });
}
void synchronize(Stream stream) {
    if (capturing(stream)) raise("synchronize", "operation not permitted when stream is capturing");
}
bool capturing(Stream stream) {
    const Unseen unseen;
    const std::lock_guard<std::mutex> lock(captures_mutex);
    return captures.count(stream) > 0;
}

void order(Stream, Stream) {}  // every stream runs what it is given at once

void launch(const KernelCall& call, const LaunchShape& shape, Stream stream) {
    if (const char* why = refused(shape, settings().multiprocessors))
        raise("a launch of " + to_string(shape), why);
    if (!capturing(stream)) return run(call, shape);
    // A graph keeps a copy of the parameters.
    const auto* const bytes = static_cast<const unsigned char*>(call.params);
    captured(stream,
             [call, shape, params = std::vector<unsigned char>(bytes, bytes + call.params_bytes)] {
                 KernelCall again = call;
                 again.params = params.data();
                 run(again, shape);
             });
}

int resident_blocks(int device, const void*, unsigned threads, size_t shared_bytes) {
    expect_device(device);
    return emulator::resident_blocks(threads, shared_bytes, settings().multiprocessors);
}

const char* runtime_version() { return "emulated"; }
const char* runtime_targets() { return ""; }

}  // namespace cuda

}  // namespace coconet
