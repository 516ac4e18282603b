#include "native.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <chrono>
#include <exception>
#include <mutex>
#include <thread>

#include "cpu/kernels.h"
#include "cpu/system.h"

namespace coconet {

namespace {

struct Delays {
    uint64_t state = 0;
    uint32_t per_mille = 0;
};
thread_local Delays delays;

}  // namespace

void perturb() {
    if (delays.per_mille == 0) return;
    delays.state = delays.state * 6364136223846793005u + 1442695040888963407u;
    const auto random = static_cast<uint32_t>(delays.state >> 33);
    if (random % 1000 >= delays.per_mille) return;
    if (random & 1)
        std::this_thread::yield();
    else
        std::this_thread::sleep_for(std::chrono::microseconds(random % 400));
}

namespace native {

std::string program() { return std::string("native, kernels ") + kernels().isa; }

CommunicatorOptions options(uint32_t first_epoch) {
    // The timeout turns a hang into a failure.
    const char* seconds = getenv("COCONET_TEST_TIMEOUT");
    return {0, 8 << 20, seconds ? atof(seconds) : 60.0, true, first_epoch};
}

void run_ranks(const Ranks& ranks, const std::function<void(Communicator&)>& body) {
    static uint32_t runs = 0;
    const uint32_t slow = ++runs % ranks.size();
    std::mutex mutex;
    std::string problems;
    std::vector<std::thread> threads;
    for (const auto& comm : ranks)
        threads.emplace_back([&, rank = static_cast<uint32_t>(comm->rank)] {
            delays = {seed * 1000003ull + runs * 64 + rank, rank == slow ? 200u : 20u};
            try {
                body(*comm);
            } catch (const std::exception& error) {
                const std::lock_guard<std::mutex> lock(mutex);
                problems += "\n  rank " + std::to_string(rank) + ": " + error.what();
                comm->close();
            }
        });
    for (auto& thread : threads) thread.join();
    if (!problems.empty()) failed("of " + std::to_string(ranks.size()) + " ranks:" + problems);
}

void run_ranks(int world, const std::function<void(Communicator&)>& body) {
    run_ranks(local_communicators(world, options()), body);
}

Tensor::Tensor(Communicator& comm, int64_t itemsize, std::vector<int64_t> sizes)
    : heap_(comm.heap().get()), itemsize_(itemsize), sizes_(std::move(sizes)) {}

Tensor::Tensor(Communicator& comm, int64_t itemsize, std::vector<int64_t> sizes, Place place,
               int64_t room)
    : Tensor(comm, itemsize, std::move(sizes)) {
    const int64_t shift = comm.rank % 4;
    const int64_t bytes = (numel() + shift) * itemsize;
    if (place != Place::own) block_ = comm.empty((max64(numel(), room) + 4) * itemsize);
    if (block_ && place == Place::mixed && comm.rank % 2 == 1) {
        heap_->mark_freed(block_->slot);
        block_.reset();
    }
    if (!block_) own_.resize(bytes + 1);
    data_ = (block_ ? heap_->data() + block_->offset : own_.data()) + shift * itemsize;
}

Tensor::~Tensor() {
    if (!block_) return;
    // A peer that still uses the block, or got it too early, collides with this.
    memset(heap_->data() + block_->offset, 0xff, block_->bytes);
    heap_->mark_freed(block_->slot);
}

int64_t Tensor::numel() const {
    int64_t n = 1;
    for (const int64_t size : sizes_) n *= size;
    return n;
}

NewOutput Tensor::new_output(int64_t dim) {
    return [this, dim](int64_t size) -> void* {
        if (!sizes_.empty() && sizes_[dim] != size)
            failed("an output of another size was asked for");
        own_.assign(numel() * itemsize_ + 1, static_cast<char>(0xff));
        return data_ = own_.data();
    };
}

void Tensor::adopt(const Output& block) {
    block_ = block;
    if (block_) data_ = heap_->data() + block_->offset;
}

uint64_t Tensor::checksum() const {
    uint64_t hash = 14695981039346656037u;
    for (int64_t i = 0; i < numel() * itemsize_; ++i)
        hash = (hash ^ static_cast<unsigned char>(data_[i])) * 1099511628211u;
    return hash;
}

namespace {

// Small enough that 16-bit floats hold the sum over all ranks.
int value(int rank, int64_t i, uint32_t salt) {
    return static_cast<int>((static_cast<uint64_t>(i) * 7 + rank * 5 + salt) % 15) - 7;
}

double expected(const Communicator& comm, const Reduction& r, int64_t i) {
    int sum = 0;
    for (int rank = 0; rank < comm.world; ++rank) sum += value(rank, i, r.salt);
    const double scale = r.averages() ? 1.0 / comm.world : 1.0;
    const double scaled = r.dtype == DType::f64 || is_integer(r.dtype)
                              ? sum * scale
                              : static_cast<float>(sum) * static_cast<float>(scale);
    alignas(8) char rounded[8];
    put(r.dtype, rounded, 0, scaled);
    return get(r.dtype, rounded, 0);
}

std::unique_ptr<Tensor> input(Communicator& comm, const Reduction& r) {
    auto x = std::make_unique<Tensor>(comm, itemsize(r.dtype), r.sizes, r.place);
    for (int64_t i = 0; i < x->numel(); ++i)
        put(r.dtype, x->data(), i, value(comm.rank, i, r.salt));
    return x;
}

void expect_element(const char* op, const Reduction& r, const Tensor& y, int64_t i, double want) {
    const double found = get(r.dtype, y.data(), i);
    if (found != want)
        failed(std::string(op) + " of " + std::to_string(y.numel()) + " " + dtype_name(r.dtype) +
               ": element " + std::to_string(i) + " is " + std::to_string(found) + ", not " +
               std::to_string(want));
}

void expect_input(const Communicator& comm, const Reduction& r, const Tensor& x) {
    for (int64_t i = 0; i < x.numel(); ++i)
        expect_element("the input", r, x, i, value(comm.rank, i, r.salt));
}

unsigned char byte(int rank, int64_t i, uint32_t salt) {
    return static_cast<unsigned char>(i * 3 + rank * 41 + salt);
}

}  // namespace

std::unique_ptr<Tensor> check_all_reduce(Communicator& comm, const Reduction& r, bool in_place) {
    auto x = input(comm, r);
    auto y = in_place ? nullptr : std::make_unique<Tensor>(comm, itemsize(r.dtype), r.sizes);
    if (in_place)
        all_reduce_(comm, x->operand(r.dtype), r.averages());
    else
        y->adopt(all_reduce(comm, x->operand(r.dtype), r.averages(), y->new_output()));
    if (y) expect_input(comm, r, *x);
    auto& result = y ? y : x;
    for (int64_t i = 0; i < result->numel(); ++i)
        expect_element("all_reduce", r, *result, i, expected(comm, r, i));
    return std::move(result);
}

std::unique_ptr<Tensor> check_reduce_scatter(Communicator& comm, const Reduction& r, int64_t dim,
                                             Split split) {
    const auto x = input(comm, r);
    const Operand operand = x->operand(r.dtype);
    const DimSlices slices = dim_slices(operand, dim, split, comm.world);
    std::vector<int64_t> sizes = r.sizes;
    sizes[dim] = slices.rows(comm.rank);
    auto y = std::make_unique<Tensor>(comm, itemsize(r.dtype), sizes);
    y->adopt(reduce_scatter(comm, operand, dim, r.averages(), split, slices, y->new_output(dim)));
    expect_input(comm, r, *x);
    const int64_t length = slices.rows(comm.rank) * slices.inner;
    for (int64_t i = 0; i < y->numel(); ++i) {
        const int64_t from = i / length * slices.dim * slices.inner +
                             slices.begins[comm.rank] * slices.inner + i % length;
        expect_element("reduce_scatter", r, *y, i, expected(comm, r, from));
    }
    return y;
}

std::unique_ptr<Tensor> check_all_gather(Communicator& comm, DType dtype, int64_t itemsize,
                                         int64_t outer, const std::vector<int64_t>& rows,
                                         int64_t inner, Place place, uint32_t salt) {
    int64_t total = 0;
    for (const int64_t n : rows) total += n;
    Tensor shard(comm, itemsize, {outer, rows[comm.rank], inner}, place, outer * total * inner);
    const int64_t bytes = shard.numel() * itemsize;
    for (int64_t i = 0; i < bytes; ++i)
        shard.data()[i] = static_cast<char>(byte(comm.rank, i, salt));
    auto y = std::make_unique<Tensor>(comm, itemsize, std::vector<int64_t>{outer, total, inner});
    int64_t begins[kMaxRanks + 1];
    y->adopt(
        all_gather(comm, shard.operand(dtype), 1, salt % 2 ? total : -1, y->new_output(1), begins));
    expect(begins[comm.world] == total, "all_gather: another number of rows in total");
    const auto* at = reinterpret_cast<const unsigned char*>(y->data());
    for (int64_t o = 0; o < outer; ++o)
        for (int rank = 0; rank < comm.world; ++rank) {
            const int64_t length = rows[rank] * inner * itemsize;
            for (int64_t i = 0; i < length; ++i)
                if (*at++ != byte(rank, o * length + i, salt))
                    failed("all_gather: a byte from rank " + std::to_string(rank) + " is wrong");
        }
    return y;
}

}  // namespace native

}  // namespace coconet
