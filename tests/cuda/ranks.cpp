#include "ranks.h"

#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <exception>
#include <mutex>
#include <thread>

#include "emulator/emulator.h"

namespace coconet::native {

std::string program() { return "cuda, emulated"; }

namespace {

constexpr unsigned char kPattern = 0xcd;
constexpr int64_t kMargin = 64;  // bytes on both sides of a tensor in the heap

uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 31)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 29)) * 0x94d049bb133111ebu;
    return x ^ (x >> 32);
}

}  // namespace

Options options(uint32_t first_epoch) {
    Options o;
    o.heap_bytes = 1 << 20;
    const char* const seconds = getenv("COCONET_TEST_TIMEOUT");
    o.timeout_seconds = seconds != nullptr ? atof(seconds) : 30;
    o.first_epoch = first_epoch;
    o.blocks = 2;
    o.threads = kThorough ? 64 : 32;
    return o;
}

World::World(Kind kind, int size, const Options& options) : kind(kind), size(size) {
    const cuda::Backend& backend = cuda::backend();
    if (kind == Kind::local) {
        ranks = backend.local(size, options);
        return;
    }
    const int64_t bytes = backend.buffer_bytes(size, options);
    for (int r = 0; r < size; ++r) buffers_.push_back(cuda::allocate(0, bytes));
    for (int r = 0; r < size; ++r) ranks.push_back(backend.peer({r, buffers_, bytes}, options));
}

World::~World() {
    ranks.clear();
    for (void* const buffer : buffers_) cuda::release(0, buffer);
}

void World::run(const std::function<void(Communicator&)>& body) const {
    // In order, then in random orders.
    static uint32_t runs = 0;
    emulator::set_seed(runs++ % 4 == 0 ? 0 : mixed(seed * 1000003ull + runs) | 1);
    std::mutex mutex;
    std::string problems;
    std::vector<std::thread> threads;
    for (const auto& comm : ranks)
        threads.emplace_back([&] {
            try {
                body(*comm);
            } catch (const std::exception& error) {
                const std::lock_guard<std::mutex> lock(mutex);
                problems += "\n  rank " + std::to_string(comm->rank) + ": " + error.what();
                comm->close();
            }
        });
    for (auto& thread : threads) thread.join();
    if (!problems.empty())
        failed(std::string(kind == Kind::local ? "local" : "peer") + ", of " +
               std::to_string(size) + " ranks:" + problems);
}

Stream World::stream(int rank) const {
    return kind == Kind::local ? nullptr : reinterpret_cast<Stream>(intptr_t{rank + 1});
}

void for_each_world(const std::vector<int>& sizes, const std::function<void(Communicator&)>& body) {
    for (const Kind kind : kKinds)
        for (const int size : sizes) World(kind, size).run(body);
}

Tensor::Tensor(Communicator& comm, int64_t itemsize, std::vector<int64_t> sizes, Place place,
               Shift shift)
    : comm_(comm), itemsize_(itemsize), sizes_(std::move(sizes)) {
    const int64_t elements = shift == Shift::none ? 0 : shift == Shift::equal ? 3 : comm.rank % 4;
    const int64_t offset = elements * itemsize, bytes = numel() * itemsize;
    if (place == Place::own || (place == Place::mixed && comm.rank % 2 == 1)) {
        // To the end of the allocation, for AddressSanitizer.
        own_.assign(offset + max64(bytes, 1), static_cast<char>(kPattern));
        data_ = own_.data() + offset;
        return;
    }
    block_bytes_ = offset + bytes + 2 * kMargin;
    block_ = static_cast<char*>(comm.allocate(block_bytes_));
    if (block_ == nullptr) failed("the heap is too small for this test");
    memset(block_, kPattern, block_bytes_);
    data_ = block_ + kMargin + offset;
}

Tensor::~Tensor() {
    if (block_ == nullptr) return;
    // A peer that still uses the block collides with this.
    memset(block_, 0xff, block_bytes_);
    comm_.release(block_, block_bytes_);
}

int64_t Tensor::numel() const {
    int64_t n = 1;
    for (const int64_t size : sizes_) n *= size;
    return n;
}

void Tensor::expect_pattern(const char* from, const char* to) const {
    if (std::any_of(from, to, [](char c) { return static_cast<unsigned char>(c) != kPattern; }))
        failed("something was written where nothing should be");
}
void Tensor::expect_margins() const {
    if (block_ == nullptr) return;
    expect_pattern(block_, data_);
    expect_pattern(data_ + numel() * itemsize_, block_ + block_bytes_);
}
void Tensor::expect_untouched() const {
    expect_margins();
    expect_pattern(data_, data_ + numel() * itemsize_);
}

uint64_t Tensor::checksum() const {
    uint64_t hash = 14695981039346656037u;
    for (int64_t i = 0; i < numel() * itemsize_; ++i)
        hash = (hash ^ static_cast<unsigned char>(data_[i])) * 1099511628211u;
    return hash;
}

namespace {

template <class T>
T value(int rank, int64_t i, uint32_t salt) {
    using Sum = SumOf<T>;
    const uint64_t bits = mixed(static_cast<uint64_t>(i) * 64 + rank + (uint64_t{salt} << 40));
    if constexpr (std::is_integral_v<Sum>) {
        return static_cast<T>(salt % 2 ? bits : bits % 15 - 7);
    } else {
        // Sums of integers up to 7 are exact in every dtype.
        if (salt % 2 == 0) return rounded<T>(static_cast<Sum>(static_cast<int>(bits % 15) - 7));
        return rounded<T>(static_cast<Sum>(static_cast<double>(bits >> 11) * 0x1p-52 - 1));
    }
}

template <class T>
T expected(const Communicator& comm, const Reduction& r, int64_t i) {
    auto sum = widen(value<T>(0, i, r.salt));
    for (int rank = 1; rank < comm.world; ++rank) sum += widen(value<T>(rank, i, r.salt));
    if (r.averages()) sum *= static_cast<SumOf<T>>(1.0 / comm.world);
    return rounded<T>(sum);
}

template <class T>
void expect_element(const char* what, const Reduction& r, T found, int64_t i, T want) {
    if (memcmp(&found, &want, sizeof found) == 0) return;
    std::string shape;
    for (const int64_t size : r.sizes) shape += (shape.empty() ? "" : " x ") + std::to_string(size);
    failed(std::string(what) + " of " + shape + " " + dtype_name(r.dtype) + " (place " +
           std::to_string(static_cast<int>(r.place)) + ", output " +
           std::to_string(static_cast<int>(r.output)) + ", salt " + std::to_string(r.salt) +
           "): element " + std::to_string(i) + " is " + std::to_string(widen(found)) + ", not " +
           std::to_string(widen(want)));
}

void fill_input(const Communicator& comm, const Reduction& r, const Tensor& x) {
    with_type(r.dtype, [&](auto t) {
        using T = decltype(t);
        for (int64_t i = 0; i < x.numel(); ++i) x.data<T>()[i] = value<T>(comm.rank, i, r.salt);
    });
}
void expect_input(const Communicator& comm, const Reduction& r, const Tensor& x) {
    with_type(r.dtype, [&](auto t) {
        using T = decltype(t);
        for (int64_t i = 0; i < x.numel(); ++i)
            expect_element("the input", r, x.data<T>()[i], i, value<T>(comm.rank, i, r.salt));
    });
    x.expect_margins();
}

unsigned char byte(int rank, int64_t i, uint32_t salt) {
    return static_cast<unsigned char>(i * 3 + (i >> 8) + rank * 41 + salt);
}

}  // namespace

AllReduce::AllReduce(Communicator& comm, const Reduction& r, bool in_place)
    : comm_(comm), r_(r), input_(comm, itemsize(r.dtype), r.sizes, r.place, r.shift()) {
    if (!in_place)
        output_ = std::make_unique<Tensor>(comm, itemsize(r.dtype), r.sizes, r.output,
                                           shift_of(r.salt / 6));
    fill(r.salt);
}

void AllReduce::fill(uint32_t salt) {
    r_.salt = salt;
    fill_input(comm_, r_, input_);
}

void AllReduce::call(Stream stream) {
    comm_.all_reduce(input_.operand(r_.dtype), result().data(), r_.averages(), !output_, stream);
}

void AllReduce::check() const {
    if (output_) expect_input(comm_, r_, input_);
    with_type(r_.dtype, [&](auto t) {
        using T = decltype(t);
        for (int64_t i = 0; i < result().numel(); ++i)
            expect_element("all_reduce", r_, result().data<T>()[i], i, expected<T>(comm_, r_, i));
    });
    result().expect_margins();
}

uint64_t check_all_reduce(Communicator& comm, const Reduction& r, bool in_place) {
    AllReduce call(comm, r, in_place);
    call.call(nullptr);
    call.check();
    return call.checksum();
}

uint64_t check_reduce_scatter(Communicator& comm, const Reduction& r, int64_t dim, Split split) {
    const Tensor x(comm, itemsize(r.dtype), r.sizes, r.place, r.shift());
    fill_input(comm, r, x);
    const Operand operand = x.operand(r.dtype);
    DimSlices slices;
    if (split == Split::rows) {  // given by the caller: the first rank has most
        int64_t begins[kMaxRanks + 1] = {};
        for (int i = 1; i <= comm.world; ++i)
            begins[i] = i == comm.world ? r.sizes[dim] : r.sizes[dim] - r.sizes[dim] / (1 << i);
        slices = dim_slices(operand, dim, begins, comm.world);
    } else {
        slices = dim_slices(operand, dim, split, comm.world);
    }
    std::vector<int64_t> sizes = r.sizes;
    sizes[dim] = slices.rows(comm.rank);
    const Tensor y(comm, itemsize(r.dtype), sizes, r.output, shift_of(r.salt / 6));
    comm.reduce_scatter(operand, y.data(), dim, r.averages(), split, slices, nullptr);
    expect_input(comm, r, x);
    const int64_t length = slices.rows(comm.rank) * slices.inner;
    with_type(r.dtype, [&](auto t) {
        using T = decltype(t);
        for (int64_t i = 0; i < y.numel(); ++i) {
            const int64_t from = i / length * slices.dim * slices.inner +
                                 slices.begins[comm.rank] * slices.inner + i % length;
            expect_element("reduce_scatter", r, y.data<T>()[i], i, expected<T>(comm, r, from));
        }
    });
    y.expect_margins();
    return y.checksum();
}

uint64_t check_all_gather(Communicator& comm, DType dtype, int64_t itemsize, int64_t outer,
                          const std::vector<int64_t>& rows, int64_t inner, Place place,
                          Place output, uint32_t salt) {
    int64_t total = 0;
    for (const int64_t n : rows) total += n;
    const Tensor shard(comm, itemsize, {outer, rows[comm.rank], inner}, place, shift_of(salt));
    const int64_t bytes = shard.numel() * itemsize;
    for (int64_t i = 0; i < bytes; ++i)
        shard.data()[i] = static_cast<char>(byte(comm.rank, i, salt));
    const Operand operand = shard.operand(dtype);
    int64_t begins[kMaxRanks + 1];
    comm.find_rows(operand, 1, total, begins, nullptr);
    int64_t begin = 0;
    for (int r = 0; r < comm.world; ++r) {
        expect(begins[r] == begin, "all_gather: another first row");
        begin += rows[r];
    }
    expect(begins[comm.world] == total, "all_gather: another number of rows in total");

    const Tensor y(comm, itemsize, {outer, total, inner}, output, shift_of(salt / 3));
    comm.all_gather(operand, y.data(), 1, total, total, nullptr);
    const auto* at = y.data<const unsigned char>();
    for (int64_t o = 0; o < outer; ++o)
        for (int rank = 0; rank < comm.world; ++rank) {
            const int64_t length = rows[rank] * inner * itemsize;
            for (int64_t i = 0; i < length; ++i)
                if (*at++ != byte(rank, o * length + i, salt))
                    failed("all_gather: byte " + std::to_string(i) + " from rank " +
                           std::to_string(rank) + " is wrong");
        }
    y.expect_margins();
    shard.expect_margins();
    return y.checksum();
}

}  // namespace coconet::native
