#include "cuda/communicator.h"

#include <string.h>

#include <algorithm>

#include "cuda/tensor_list.h"

namespace coconet::cuda {

namespace {

template <class L, void (*kLaunch)(const L&, const LaunchShape&, Stream)>
void launch_works(const Work* const* works, int count, const Segments& segments,
                  const LaunchConfig& config, Stream stream) {
    L launch{};
    launch.segments = segments;
    launch.descriptor = works[0]->descriptor;
    launch.common = *static_cast<const decltype(launch.common)*>(works[0]->common);
    using Operands = std::remove_reference_t<decltype(launch.ranks[0])>;
    for (int r = 0; r < count; ++r) launch.ranks[r] = *static_cast<Operands*>(works[r]->operands);
    const LaunchShape shape{static_cast<unsigned>(config.blocks), static_cast<unsigned>(count),
                            static_cast<unsigned>(config.threads), 0, true};
    kLaunch(launch, shape, stream);
}

}  // namespace

uint64_t hash_of(const Descriptor& d) {
    uint64_t hash = 14695981039346656037u;  // FNV-1a
    const auto add = [&](int64_t value) {
        hash = (hash ^ static_cast<uint64_t>(value)) * 1099511628211u;
        hash ^= hash >> 32;
    };
    add(static_cast<int64_t>(d.op));
    add(d.num_fields);
    const FieldSpec* spec = op_fields(d.op);
    bool shape = false;
    for (int f = 0; f < d.num_fields; ++f) {
        if (!shape && spec[f].may_differ) continue;
        shape = shape || spec[f].kind == FieldKind::shape;
        add(d.fields[f]);
    }
    return hash;
}

void start_counters(const Segment& segment, uint32_t first_epoch) {
    if (first_epoch == 0) return;
    const auto fresh = std::make_unique<ControlPad>();
    memset(static_cast<void*>(fresh.get()), 0, sizeof(ControlPad));
    for (BlockPad& pad : fresh->blocks)
        for (auto& phase : pad.signals)
            for (uint32_t& signal : phase) signal = first_epoch;
    for (Progress& progress : fresh->progress) progress = {first_epoch, first_epoch};
    copy_async(segment.base, fresh.get(), sizeof(ControlPad), nullptr);
    synchronize(nullptr);
}

Error report_error(const Report& report, int world, double timeout_seconds) {
    const auto op = static_cast<OpCode>(report.op);
    if (report.kind == static_cast<uint32_t>(FailureKind::timeout)) {
        char text[320];
        snprintf(text, sizeof text,
                 "%s on rank %d: waited %.1f s for rank %d in phase %s: expected %u, seen %u "
                 "(block %d). The rank is stuck or never made this call",
                 op_name(op), report.rank, timeout_seconds, report.peer, kPhaseNames[report.phase],
                 report.expected, report.seen, report.block);
        return Error(ErrorKind::timeout, text);
    }
    if (report.tensor >= 0) {
        const std::string values =
            by_value(world, [&](int r) { return std::to_string(report.values[r]); });
        const std::string tensor = std::to_string(report.tensor);
        return Error(ErrorKind::mismatch,
                     op == OpCode::all_gather
                         ? "all_gather: the result has " + tensor +
                               " rows along dim, but the shards have other numbers: " + values
                         : std::string(op_name(op)) +
                               ": ranks disagree on the number of elements of params[" + tensor +
                               "]: " + values);
    }
    const Descriptor* all[kMaxRanks];
    std::string rejected;
    for (int r = 0; r < world; ++r) {
        all[r] = &report.descriptors[r];
        if (all[r]->op == OpCode::rejected)
            rejected += (rejected.empty() ? "" : "; ") + std::string("rank ") + std::to_string(r) +
                        " was given bad arguments: " + all[r]->text;
    }
    return Error(ErrorKind::mismatch, rejected.empty() ? disagreement(all, world) : rejected);
}

Rank::Rank(int rank, int world, const Options& options, const LaunchConfig& config,
           const Segment& segment)
    : Communicator(rank, world, options.device),
      options_(options),
      config_(config),
      segment_(segment),
      free_(segment.heap_bytes) {}

int64_t Rank::offset_of(const void* p, int64_t bytes) const {
    const auto offset =
        static_cast<int64_t>(reinterpret_cast<uintptr_t>(p) - reinterpret_cast<uintptr_t>(heap()));
    return offset >= 0 && offset + max64(bytes, 1) <= segment_.heap_bytes ? offset : kPrivate;
}

void* Rank::allocate(int64_t bytes) {
    const int64_t size = round_up(max64(bytes, 1), kHeapAlign);
    const std::lock_guard<std::mutex> lock(heap_mutex_);
    const std::optional<int64_t> offset = free_.take(size);
    if (!offset) return nullptr;
    allocated_ += size;
    return heap() + *offset;
}

void Rank::release(void* block, int64_t bytes) {
    const int64_t size = round_up(max64(bytes, 1), kHeapAlign);
    const std::lock_guard<std::mutex> lock(heap_mutex_);
    free_.give_back(static_cast<char*>(block) - heap(), size);
    allocated_ -= size;
}

Error Rank::no_room(int rank, int64_t bytes) const {
    return Error(ErrorKind::heap_exhausted,
                 "empty: " + std::to_string(bytes) + " bytes don't fit into the heap of rank " +
                     std::to_string(rank) + ", which has " + std::to_string(heap_bytes()) +
                     " bytes; raise heap_bytes of the communicator");
}

bool Rank::fits_attachments(int64_t bytes, int64_t longest_slice, int sections,
                            int64_t itemsize) const {
    if (bytes > config_.one_shot_bytes) return false;
    const int64_t share =
        round_up(ceil_div(longest_slice, config_.blocks), config_.grain(itemsize));
    return sections * round_up(share, kSliceAlign) * itemsize <= config_.attachment_bytes;
}

void Rank::collective(const Descriptor& descriptor, const Operand& x, void* output, Work& work,
                      RankOperands& operands) {
    work.descriptor = descriptor;
    operands.mail.operands[0] = offset_of(x.data, x.bytes());
    operands.input = x.data;
    operands.output = output;
    work.operands = &operands;
    work.mail = &operands.mail;
    submit(work);
}

void Rank::submit_barrier(const Descriptor& descriptor, int64_t number, int64_t* numbers,
                          Stream stream) {
    BarrierCall call{};
    RankOperands operands{};
    operands.mail.operands[2] = number;
    operands.output = numbers;
    Work work{descriptor, stream,         &call,
              &operands,  &operands.mail, launch_works<BarrierLaunch, launch_barrier>};
    submit(work);
}

Descriptor Rank::describe_rejected(OpCode op, const std::string& text) {
    Descriptor d = DescriptorBuilder(OpCode::rejected).d;
    const std::string name = op_name(op);
    const bool names_op = op == OpCode::rejected || text.compare(0, name.size(), name) == 0;
    const std::string whole = names_op ? text : name + ": " + text;
    snprintf(d.text, sizeof d.text, "%s", whole.c_str());
    return d;
}

void Rank::all_reduce(const Operand& x, void* output, bool average, bool in_place, Stream stream) {
    const int64_t numel = x.numel();
    ReduceCall call{};
    call.dtype = x.dtype;
    call.scale = average ? 1.0 / world : 1.0;
    call.grain = config_.grain(x.itemsize);
    call.slices = {1, numel, 1, {}};
    const FlatSlices flat(numel, world);
    for (int r = 0; r <= world; ++r) call.slices.begins[r] = flat.begin(r);
    call.one_shot = fits_attachments(x.bytes(), numel, 1, x.itemsize);
    RankOperands operands{};
    operands.mail.operands[1] = offset_of(output, x.bytes());
    Work work{{}, stream, &call, nullptr, nullptr, launch_works<ReduceLaunch, launch_all_reduce>};
    collective(describe_all_reduce(x, average, in_place), x, output, work, operands);
}

void Rank::reduce_scatter(const Operand& x, void* output, int64_t dim, bool average, Split split,
                          const DimSlices& slices, Stream stream) {
    int64_t longest = 0;
    for (int r = 0; r < world; ++r) longest = max64(longest, slices.size(r));
    ReduceCall call{};
    call.dtype = x.dtype;
    call.scale = average ? 1.0 / world : 1.0;
    call.grain = config_.grain(x.itemsize);
    call.slices = slices;
    call.one_shot = fits_attachments(x.bytes(), longest, world, x.itemsize);
    RankOperands operands{};
    Work work{{},      stream,  &call,
              nullptr, nullptr, launch_works<ReduceLaunch, launch_reduce_scatter>};
    collective(describe_reduce_scatter(x, dim, average, split), x, output, work, operands);
}

void Rank::all_gather(const Operand& shard, void* output, int64_t dim, int64_t size, int64_t total,
                      Stream stream) {
    // In units that divide an element, so that copies know its alignment.
    const int64_t unit = shard.itemsize % 8 == 0   ? 8
                         : shard.itemsize % 4 == 0 ? 4
                         : shard.itemsize % 2 == 0 ? 2
                                                   : 1;
    GatherCall call{};
    call.unit = static_cast<int32_t>(unit);
    call.grain = config_.grain(unit);
    call.slices = {shard.product(0, dim),
                   total,
                   shard.product(dim + 1, shard.dims) * (shard.itemsize / unit),
                   {}};
    const int64_t row = call.slices.outer * call.slices.inner;
    // The largest shard that the total allows, since ranks may have any number of rows.
    call.one_shot = fits_attachments(total * row * unit, total * row, 1, unit);
    RankOperands operands{};
    operands.mail.operands[1] = total;
    operands.mail.operands[2] = shard.sizes[dim];
    Work work{{}, stream, &call, nullptr, nullptr, launch_works<GatherLaunch, launch_all_gather>};
    collective(describe_all_gather(shard, dim, size), shard, output, work, operands);
}

std::unique_ptr<TensorList> Rank::tensor_list(const std::vector<int64_t>& numels, Stream stream) {
    const DeviceGuard guard(device);
    follow_calls(stream);
    return std::make_unique<DeviceTensorList>(shared_from_this(), numels, stream);
}

void Rank::rs_adam_ag(TensorList& tensors, DType dtype, const std::vector<void*>& weights,
                      const std::vector<const void*>& gradients, const AdamHyper& hyper,
                      const AdamState& state, Stream stream) {
    auto& list = static_cast<DeviceTensorList&>(tensors);
    const int64_t itemsize = dtype == DType::f32 ? 4 : 2;
    AdamCall call{};
    call.dtype = dtype;
    call.num_tensors = list.size();
    call.total = list.total;
    call.slice = list.slice;
    call.grain = config_.grain(itemsize);
    call.constants = adam_constants(hyper, world);
    call.lr = hyper.lr;
    call.beta1 = hyper.beta1;
    call.beta2 = hyper.beta2;
    call.bias_correction = hyper.bias_correction;
    const DeviceGuard guard(device);
    follow_calls(stream);
    RankTensors operands = list.upload(itemsize, weights, gradients, stream);
    operands.exp_avg = state.exp_avg;
    operands.exp_avg_sq = state.exp_avg_sq;
    operands.master = state.master;
    Work work{
        describe_rs_adam_ag(dtype, list.size(), hyper), stream, &call, &operands, &operands.mail,
        launch_works<AdamLaunch, launch_rs_adam_ag>};
    submit(work);
}

}  // namespace coconet::cuda
