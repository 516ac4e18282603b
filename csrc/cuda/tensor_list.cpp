#include "cuda/tensor_list.h"

#include <string.h>

#include <stdexcept>
#include <utility>

namespace coconet::cuda {

namespace {

// The arrays of `fixed_`, for n tensors.
struct Fixed {
    int64_t *starts, *numels, *steps;
    AdamStep* constants;
    ResolvedTensor* resolved;
    AdamPlan* plan;

    Fixed(char* base, int n)
        : starts(reinterpret_cast<int64_t*>(base)),
          numels(starts + n),
          steps(numels + n),
          constants(reinterpret_cast<AdamStep*>(steps + n)),
          resolved(reinterpret_cast<ResolvedTensor*>(constants + n)),
          plan(reinterpret_cast<AdamPlan*>(resolved + n)) {}
    static int64_t bytes(int n) {
        const Fixed end(nullptr, n);
        return static_cast<int64_t>(reinterpret_cast<uintptr_t>(end.plan + 1));
    }
};

}  // namespace

DeviceTensorList::DeviceTensorList(std::shared_ptr<Rank> rank, const std::vector<int64_t>& n,
                                   Stream stream)
    : TensorList(n, rank->world),
      rank_(std::move(rank)),
      fixed_bytes_(Fixed::bytes(size())),
      table_bytes_(size() *
                   static_cast<int64_t>(sizeof(TensorEntry) + sizeof(void*) + sizeof(void*))) {
    fixed_ = take(fixed_bytes_);
    try {
        tables_.push_back(std::make_unique<Table>(Table{{}, take(table_bytes_)}));
    } catch (...) {
        rank_->release(fixed_, fixed_bytes_);
        throw;
    }
    const Fixed fixed(fixed_, size());
    const auto bytes = static_cast<int64_t>(size() * sizeof(int64_t));
    copy_async(fixed.starts, starts.data(), bytes, stream);
    copy_async(fixed.numels, numels.data(), bytes, stream);
    zero_async(fixed.steps, fixed_bytes_ - 2 * bytes, stream);
    synchronize(stream);
}

DeviceTensorList::~DeviceTensorList() {
    rank_->release(fixed_, fixed_bytes_);
    for (const auto& table : tables_) rank_->release(table->place, table_bytes_);
}

char* DeviceTensorList::take(int64_t bytes) {
    void* block = rank_->allocate(bytes);
    if (block == nullptr)
        throw Error(ErrorKind::heap_exhausted,
                    "rs_adam_ag_: the heap of rank " + std::to_string(rank_->rank) +
                        " has no room for the tables of " + std::to_string(size()) + " tensors");
    return static_cast<char*>(block);
}

std::vector<int64_t> DeviceTensorList::steps(Stream stream) const {
    std::vector<int64_t> steps(size());
    const DeviceGuard guard(rank_->device);
    copy_async(steps.data(), Fixed(fixed_, size()).steps, size() * sizeof(int64_t), stream);
    synchronize(stream);
    return steps;
}

void DeviceTensorList::set_steps(const std::vector<int64_t>& steps, Stream stream) {
    if (steps.size() != numels.size())
        throw std::invalid_argument("rs_adam_ag_: there are " + std::to_string(steps.size()) +
                                    " step counts for " + std::to_string(size()) + " tensors");
    const DeviceGuard guard(rank_->device);
    copy_async(Fixed(fixed_, size()).steps, steps.data(), size() * sizeof(int64_t), stream);
    synchronize(stream);
}

RankTensors DeviceTensorList::upload(int64_t itemsize, const std::vector<void*>& weights,
                                     const std::vector<const void*>& gradients, Stream stream) {
    std::vector<char> content(table_bytes_);
    auto* entries = reinterpret_cast<TensorEntry*>(content.data());
    auto** own_weights = reinterpret_cast<void**>(entries + size());
    auto** own_gradients = const_cast<const void**>(own_weights + size());
    bool in_heap = true;
    const auto place = [&](const void* p, int64_t bytes) {
        return p == nullptr ? kAbsent : bytes == 0 ? 0 : rank_->offset_of(p, bytes);
    };
    for (int t = 0; t < size(); ++t) {
        const int64_t bytes = numels[t] * itemsize;
        entries[t] = {numels[t], place(weights[t], bytes), place(gradients[t], bytes)};
        in_heap = in_heap && entries[t].weight != kPrivate && entries[t].gradient != kPrivate;
        own_weights[t] = weights[t];
        own_gradients[t] = gradients[t];
    }

    const bool captured = capturing(stream);
    if (captured) tables_.push_back(std::make_unique<Table>(Table{{}, take(table_bytes_)}));
    Table& table = captured ? *tables_.back() : *tables_.front();
    if (table.content != content) {
        table.content = std::move(content);
        copy_async(table.place, table.content.data(), table_bytes_, stream);
    }

    const Fixed fixed(fixed_, size());
    auto* entries_there = reinterpret_cast<TensorEntry*>(table.place);
    auto** weights_there = reinterpret_cast<void**>(entries_there + size());
    RankTensors result{};
    result.mail.operands[0] = rank_->offset_of(table.place, table_bytes_);
    result.mail.operands[1] = in_heap;
    result.starts = fixed.starts;
    result.numels = fixed.numels;
    result.weights = weights_there;
    result.gradients = const_cast<const void**>(weights_there + size());
    result.plan = fixed.plan;
    result.resolved = fixed.resolved;
    result.steps = fixed.steps;
    result.constants = fixed.constants;
    return result;
}

}  // namespace coconet::cuda
