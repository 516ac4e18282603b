// The pool: OS threads that sleep until a launch hands them work, and keep their block, with its
// fibers and stacks, from launch to launch. A cooperative launch takes one for each block, another
// one a few, which run its blocks in order.
//
// Not with std::mutex and friends: ThreadSanitizer would take them for an order between launches
// that run at the same time, and miss races of their kernels.
#include "emulator/launch.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <string>
#include <thread>
#include <vector>

#include "common/errors.h"
#include "emulator/block.h"
#include "emulator/settings.h"

namespace coconet::emulator {

namespace {

constexpr unsigned kThreadsOfMultiprocessor = 2048;
constexpr unsigned kBlocksOfMultiprocessor = 32;
constexpr size_t kSharedOfMultiprocessor = 164 << 10;
constexpr size_t kSharedOfBlock = 163 << 10;
constexpr size_t kSharedReserved = 1 << 10;  // of each block, by the system

using Word = std::atomic<uint32_t>;
static_assert(sizeof(Word) == 4);

void wait_while(Word& word, uint32_t value) {
    while (word == value)
        syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
void wake(Word& word) { syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0); }

class SpinLock {
  public:
    void lock() {
        while (held_.exchange(true, std::memory_order_acquire)) sched_yield();
    }
    void unlock() { held_.store(false, std::memory_order_release); }

  private:
    std::atomic<bool> held_{false};
};

class Worker;

class Pool {
  public:
    Worker* take();
    void put(Worker* worker);

  private:
    SpinLock lock_;
    std::vector<Worker*> idle_;
};

Pool& pool() {
    static auto* const pool = new Pool;  // workers may outlive main()
    return *pool;
}

class Worker {
  public:
    void start(Launch& launch, unsigned slot) {
        launch_ = &launch;
        slot_ = slot;
        busy_ = 1;
        wake(busy_);
    }

    void loop() {
        Block block;
        for (;;) {
            wait_while(busy_, 0);
            Launch& launch = *launch_;
            launch.on[slot_] = &block;
            for (unsigned number; (number = launch.next++) < launch.blocks();)
                block.run(launch, number);
            busy_ = 0;
            pool().put(this);
            // The launch may be gone as soon as its caller sees 0; waking an address is harmless.
            Word& workers = launch.workers;
            if (--workers == 0) wake(workers);
        }
    }

  private:
    Word busy_{0};
    Launch* launch_ = nullptr;
    unsigned slot_ = 0;
};

Worker* Pool::take() {
    lock_.lock();
    Worker* worker = nullptr;
    if (!idle_.empty()) {
        worker = idle_.back();
        idle_.pop_back();
    }
    lock_.unlock();
    if (!worker) {
        worker = new Worker;
        std::thread([worker] { worker->loop(); }).detach();
    }
    return worker;
}

void Pool::put(Worker* worker) {
    lock_.lock();
    idle_.push_back(worker);
    lock_.unlock();
}

}  // namespace

int resident_blocks(unsigned threads, size_t shared_bytes) {
    if (threads == 0 || threads > kMaxThreads || shared_bytes > kSharedOfBlock) return 0;
    const unsigned warps = (threads + kWarp - 1) / kWarp;
    const size_t by_shared = kSharedOfMultiprocessor / (shared_bytes + kSharedReserved);
    const unsigned blocks =
        std::min({kThreadsOfMultiprocessor / (warps * kWarp), kBlocksOfMultiprocessor,
                  static_cast<unsigned>(by_shared)});
    return static_cast<int>(blocks) * settings().multiprocessors;
}

void check_shape(const cuda::LaunchShape& shape) {
    const char* why = nullptr;
    if (shape.blocks_x == 0 || shape.blocks_x > INT_MAX || shape.blocks_y == 0 ||
        shape.blocks_y > 65535 || shape.threads == 0 || shape.threads > kMaxThreads)
        why = "invalid configuration argument";
    else if (shape.shared_bytes > kSharedOfBlock)
        why = "invalid argument";
    else if (shape.cooperative && uint64_t{shape.blocks_x} * shape.blocks_y >
                                      static_cast<uint64_t>(resident_blocks(
                                          shape.threads, shape.shared_bytes)))
        why = "too many blocks in cooperative launch";
    if (why)
        throw Error(ErrorKind::communicator,
                    "CUDA: a launch of " + cuda::to_string(shape) + " failed: " + why);
}

void run(const cuda::KernelCall& call, const cuda::LaunchShape& shape) {
    static std::atomic<unsigned> launches{0};
    const unsigned blocks = shape.blocks_x * shape.blocks_y;
    const unsigned workers =
        shape.cooperative ? blocks
                          : std::min(blocks, 2u * static_cast<unsigned>(settings().multiprocessors));
    Launch launch{call, shape, launches++};
    launch.on = std::vector<std::atomic<const Block*>>(workers);
    launch.workers = workers;
    release(launch.begin);
    for (unsigned i = 0; i < workers; ++i) pool().take()->start(launch, i);
    for (uint32_t left; (left = launch.workers) != 0;) wait_while(launch.workers, left);
    acquire(launch.end);
}

}  // namespace coconet::emulator
