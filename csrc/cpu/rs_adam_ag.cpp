#include "cpu/rs_adam_ag.h"

#include <math.h>

#include <string>
#include <utility>

#include "cpu/collectives.h"

namespace coconet {

TensorList::TensorList(std::shared_ptr<Communicator> c, std::vector<int64_t> n)
    : ListLayout(std::move(n), c->world),
      comm(std::move(c)),
      steps(numels.size(), 0),
      constants(numels.size()),
      heap_(comm->heap()),
      table_(comm->empty(2 * static_cast<int64_t>(numels.size() * sizeof(TensorEntry)))) {}

TensorList::~TensorList() { heap_->mark_freed(table_.slot); }

namespace {

int64_t place(const Heap& heap, const void* p, int64_t bytes) {
    return p == nullptr ? kAbsent : bytes == 0 ? 0 : heap.offset_of(p, bytes);
}

// Fills this rank's table; true when every tensor is in the heap.
bool publish_table(TensorList& list, int64_t itemsize, const std::vector<void*>& weights,
                   const std::vector<const void*>& gradients) {
    Communicator& comm = *list.comm;
    comm.channel().settle();
    auto* entries = reinterpret_cast<TensorEntry*>(comm.heap_of(comm.rank) +
                                                   list.table(comm.channel().next_epoch()));
    bool in_heap = true;
    for (int t = 0; t < list.size(); ++t) {
        const int64_t bytes = list.numels[t] * itemsize;
        entries[t] = {list.numels[t], place(*comm.heap(), weights[t], bytes),
                      place(*comm.heap(), gradients[t], bytes)};
        in_heap = in_heap && entries[t].weight != kPrivate && entries[t].gradient != kPrivate;
    }
    return in_heap;
}

void check_sizes(Communicator& comm, int tensors, const TensorEntry* const* entries) {
    for (int t = 0; t < tensors; ++t)
        for (int r = 1; r < comm.world; ++r) {
            if (entries[r][t].numel == entries[0][t].numel) continue;
            comm.channel().leave();
            throw Error(ErrorKind::mismatch,
                        "rs_adam_ag_: ranks disagree on the number of elements of params[" +
                            std::to_string(t) + "]: " + by_value(comm.world, [&](int rank) {
                                return std::to_string(entries[rank][t].numel);
                            }));
        }
}

AdamStep step_constants(const AdamHyper& h, int64_t step) {
    if (!h.bias_correction) return {static_cast<float>(h.lr), 1.0f};
    const double bias1 = 1 - pow(h.beta1, static_cast<double>(step));
    const double bias2 = 1 - pow(h.beta2, static_cast<double>(step));
    return {static_cast<float>(h.lr / bias1), static_cast<float>(1 / sqrt(bias2))};
}

// Counts the step of every tensor that has a gradient somewhere.
void count_steps(TensorList& list, const AdamHyper& hyper, const TensorEntry* const* entries) {
    int64_t known_step = 0;
    AdamStep known{};
    for (int t = 0; t < list.size(); ++t) {
        bool present = false;
        for (int r = 0; r < list.comm->world; ++r)
            present = present || entries[r][t].gradient != kAbsent;
        if (!present) continue;
        const int64_t step = ++list.steps[t];
        if (step != known_step) known = step_constants(hyper, step);
        known_step = step;
        list.constants[t] = known;
    }
}

}  // namespace

void rs_adam_ag(TensorList& list, DType dtype, const std::vector<void*>& weights,
                const std::vector<const void*>& gradients, const AdamHyper& hyper, float* exp_avg,
                float* exp_avg_sq, float* master) {
    Communicator& comm = *list.comm;
    comm.call(OpCode::rs_adam_ag, [&] {
        const int64_t itemsize = dtype == DType::f32 ? 4 : 2;
        const bool in_heap = publish_table(list, itemsize, weights, gradients);
        Descriptor d = describe_rs_adam_ag(dtype, list.size(), hyper);
        d.operands[0] = in_heap;
        d.operands[1] = list.table(comm.channel().next_epoch());
        comm.enter(d);

        AdamArgs args;
        args.slices = list.slices();
        args.dtype = dtype;
        for (int r = 0; r < comm.world; ++r) {
            args.heaps[r] = comm.heap_of(r);
            args.entries[r] = reinterpret_cast<const TensorEntry*>(
                args.heaps[r] + comm.channel().descriptor(r).operands[1]);
        }
        check_sizes(comm, list.size(), args.entries);
        count_steps(list, hyper, args.entries);
        comm.probe(list.total * itemsize);
        args.weights = weights.data();
        args.gradients = gradients.data();
        args.constants = adam_constants(hyper, comm.world);
        args.steps = list.constants.data();
        args.exp_avg = exp_avg;
        args.exp_avg_sq = exp_avg_sq;
        args.master = master;
        const bool direct = comm.all_ranks([](const Descriptor& d) { return d.operands[0] != 0; });
        args.stream =
            writes_past_cache(comm, direct ? Path::direct : Path::staged, list.total * itemsize);
        if (direct) {
            kernels().rs_adam_ag(comm.channel(), args);
        } else {
            args.stage = stage_of(comm);
            kernels().rs_adam_ag_staged(comm.channel(), args);
        }
    });
}

}  // namespace coconet
