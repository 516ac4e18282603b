// The collectives as torch ops: kernels, gradients, and what eager Python calls directly.
// Arguments were checked in Python (coconet_ops/checks.py).
//
// Gradients follow Megatron's convention: that of a replicated output arrives complete and equal on
// every rank.
//
//   op                                    gradient of x
//   all_reduce                            as it is
//   reduce_scatter                        all_gather
//   all_gather, grad="slice"              this rank's rows
//   all_gather, grad="reduce_scatter"     reduce_scatter (what uses y holds a part of its gradient)
//   copy_to_group (y = x)                 all_reduce
//
// An average divides the gradient by the world size too.
#include "cpu/collectives.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/core/WrapDimMinimal.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>

#include "binding.h"
#include "device.h"

namespace py = pybind11;

namespace coconet {

using at::Tensor;
using c10::string_view;
using c10::SymInt;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The ops, through the dispatcher.
namespace ops {

namespace {

template <class Signature>
auto find(const char* name) {
    return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

Tensor all_reduce(const Tensor& x, string_view op, int64_t comm) {
    static const auto f = find<Tensor(const Tensor&, string_view, int64_t)>("coconet::all_reduce");
    return f.call(x, op, comm);
}

void all_reduce_(Tensor& x, string_view op, int64_t comm) {
    static const auto f = find<void(Tensor&, string_view, int64_t)>("coconet::all_reduce_");
    f.call(x, op, comm);
}

Tensor reduce_scatter(const Tensor& x, int64_t dim, string_view op, string_view split,
                      int64_t comm) {
    static const auto f = find<Tensor(const Tensor&, int64_t, string_view, string_view, int64_t)>(
        "coconet::reduce_scatter");
    return f.call(x, dim, op, split, comm);
}

Tensor all_gather(const Tensor& x, int64_t dim, SymInt size, string_view grad, int64_t comm) {
    static const auto f =
        find<Tensor(const Tensor&, int64_t, SymInt, string_view, int64_t)>("coconet::all_gather");
    return f.call(x, dim, std::move(size), grad, comm);
}

std::tuple<Tensor, Tensor> all_gather_begins(const Tensor& x, int64_t dim, SymInt size,
                                             int64_t comm) {
    static const auto f = find<std::tuple<Tensor, Tensor>(const Tensor&, int64_t, SymInt, int64_t)>(
        "coconet::all_gather_begins");
    return f.call(x, dim, std::move(size), comm);
}

using RowsOp = Tensor(const Tensor&, const Tensor&, int64_t, SymInt, int64_t);

Tensor reduce_scatter_rows(const Tensor& x, const Tensor& begins, int64_t dim, SymInt rows,
                           int64_t comm) {
    static const auto f = find<RowsOp>("coconet::reduce_scatter_rows");
    return f.call(x, begins, dim, std::move(rows), comm);
}

Tensor own_rows(const Tensor& x, const Tensor& begins, int64_t dim, SymInt rows, int64_t comm) {
    static const auto f = find<RowsOp>("coconet::own_rows");
    return f.call(x, begins, dim, std::move(rows), comm);
}

Tensor copy_to_group(const Tensor& x, int64_t comm) {
    static const auto f = find<Tensor(const Tensor&, int64_t)>("coconet::copy_to_group");
    return f.call(x, comm);
}

}  // namespace

}  // namespace ops

namespace {

// --- kernels -------------------------------------------------------------------------------------

Operand operand(const Tensor& t) {
    return {t.data_ptr(), dtype_of(t), t.element_size(), t.sizes().data(), t.dim()};
}

Operand summand(const Tensor& t) {
    const Operand x = operand(t);
    TORCH_CHECK_TYPE(static_cast<int>(x.dtype) < kNumReduceDTypes, "coconet_ops: tensors of dtype ",
                     t.dtype(), " can't be summed");
    return x;
}

bool is_average(string_view op) { return op == "avg"; }

Tensor all_reduce_kernel(const Tensor& x, string_view op, int64_t comm_id) {
    const auto comm = communicator(comm_id);
    const Tensor input = x.contiguous();
    const Operand operand = summand(input);
    if (comm.device)
        return with_python_errors([&] { return all_reduce(*comm.device, input, is_average(op)); });
    Tensor output;
    const Output block = with_python_errors([&] {
        return all_reduce(*comm.shm, operand, is_average(op), [&](int64_t) {
            output = at::empty(input.sizes(), input.options());
            return output.data_ptr();
        });
    });
    return block ? heap_tensor(*comm.shm, *block, input.sizes(), input.scalar_type()) : output;
}

void all_reduce_kernel_(Tensor& x, string_view op, int64_t comm_id) {
    const auto comm = communicator(comm_id);
    Tensor dense = x.contiguous();
    const Operand operand = summand(dense);
    with_python_errors([&] {
        if (comm.device)
            all_reduce_(*comm.device, dense, is_average(op));
        else
            all_reduce_(*comm.shm, operand, is_average(op));
    });
    if (!dense.is_same(x)) x.copy_(dense);
}

Tensor reduce_scatter_slices(const AnyCommunicator& comm, const Tensor& input, int64_t dim,
                             bool average, Split split, const DimSlices& slices) {
    const Operand operand = summand(input);
    if (comm.device)
        return with_python_errors(
            [&] { return reduce_scatter(*comm.device, input, dim, average, split, slices); });
    at::DimVector sizes(input.sizes());
    sizes[dim] = slices.rows(comm.rank());
    Tensor output;
    const Output block = with_python_errors([&] {
        return reduce_scatter(*comm.shm, operand, dim, average, split, slices, [&](int64_t) {
            output = at::empty(sizes, input.options());
            return output.data_ptr();
        });
    });
    return block ? heap_tensor(*comm.shm, *block, sizes, input.scalar_type()) : output;
}

Tensor reduce_scatter_kernel(const Tensor& x, int64_t dim, string_view op, string_view split,
                             int64_t comm_id) {
    const auto comm = communicator(comm_id);
    const Tensor input = x.contiguous();
    dim = c10::maybe_wrap_dim(dim, input.dim());
    const Split cut = split == "chunk" ? Split::chunk : Split::tensor_split;
    return reduce_scatter_slices(comm, input, dim, is_average(op), cut,
                                 dim_slices(operand(input), dim, cut, comm.world()));
}

// begins: from all_gather_begins, for a tensor of the gathered shape.
void check_begins(const Tensor& x, const Tensor& begins, int64_t dim, int64_t rows,
                  const AnyCommunicator& comm) {
    const int world = comm.world(), rank = comm.rank();
    const auto* begin = begins.const_data_ptr<int64_t>();
    TORCH_CHECK(begins.numel() == world + 1 && begin[0] == 0 &&
                    std::is_sorted(begin, begin + world + 1) && begin[world] == x.size(dim) &&
                    begin[rank + 1] - begin[rank] == rows,
                "coconet_ops: a tensor of shape ", x.sizes(), " can't be cut along dim ", dim,
                " into ", rows, " rows here: begins is ", begins);
}

Tensor reduce_scatter_rows_kernel(const Tensor& x, const Tensor& begins, int64_t dim, int64_t rows,
                                  int64_t comm_id) {
    const auto comm = communicator(comm_id);
    check_begins(x, begins, dim, rows, comm);
    const Tensor input = x.contiguous();
    dim = c10::maybe_wrap_dim(dim, input.dim());
    return reduce_scatter_slices(
        comm, input, dim, false, Split::rows,
        dim_slices(operand(input), dim, begins.const_data_ptr<int64_t>(), comm.world()));
}

Tensor own_rows_kernel(const Tensor& x, const Tensor& begins, int64_t dim, int64_t rows,
                       int64_t comm_id) {
    const auto comm = communicator(comm_id);
    check_begins(x, begins, dim, rows, comm);
    return x.narrow(dim, begins.const_data_ptr<int64_t>()[comm.rank()], rows)
        .clone(at::MemoryFormat::Contiguous);
}

// begins: room for one more than the ranks.
Tensor all_gather_into(const AnyCommunicator& comm, const Tensor& x, int64_t dim, int64_t size,
                       int64_t* begins) {
    const Tensor shard = x.contiguous();
    dim = c10::maybe_wrap_dim(dim, shard.dim());
    if (comm.device)
        return with_python_errors(
            [&] { return all_gather(*comm.device, shard, dim, size, begins); });
    at::DimVector sizes(shard.sizes());
    Tensor output;
    const Output block = with_python_errors([&] {
        return all_gather(
            *comm.shm, operand(shard), dim, size,
            [&](int64_t rows) {
                sizes[dim] = rows;
                output = at::empty(sizes, shard.options());
                return output.data_ptr();
            },
            begins);
    });
    sizes[dim] = begins[comm.world()];
    return block ? heap_tensor(*comm.shm, *block, sizes, shard.scalar_type()) : output;
}

Tensor all_gather_kernel(const Tensor& x, int64_t dim, int64_t size, string_view, int64_t comm_id) {
    const auto comm = communicator(comm_id);
    int64_t begins[kMaxRanks + 1];
    return all_gather_into(comm, x, dim, size, begins);
}

std::tuple<Tensor, Tensor> all_gather_begins_kernel(const Tensor& x, int64_t dim, int64_t size,
                                                    int64_t comm_id) {
    const auto comm = communicator(comm_id);
    const Tensor begins = at::empty({comm.world() + 1}, at::kLong);
    return {all_gather_into(comm, x, dim, size, begins.data_ptr<int64_t>()), begins};
}

// --- gradients -----------------------------------------------------------------------------------

bool needs_gradient(const char* op, const Tensor& x) {
    TORCH_CHECK_NOT_IMPLEMENTED(!x._fw_grad(0).defined(), "coconet_ops: ", op,
                                " has no forward-mode gradient");
    return at::GradMode::is_enabled() && x.requires_grad();
}

// What the gradient is divided by.
int64_t divisor(string_view op, int64_t comm) { return is_average(op) ? world_of(comm) : 1; }

Tensor divided(const Tensor& gradient, int64_t divisor) {
    return divisor == 1 ? gradient : gradient.div(divisor);
}

// The four kinds of backward pass. run computes the op itself; a backward pass returns a gradient
// for x, and nothing for the other arguments of forward.

struct KeepGradient : torch::autograd::Function<KeepGradient> {
    static constexpr bool is_traceable = true;

    template <class Run>
    static Tensor forward(AutogradContext* ctx, const Tensor& x, const Run& run, int64_t divisor,
                          bool in_place) {
        ctx->saved_data["divisor"] = divisor;
        if (in_place) ctx->mark_dirty({x});
        return run();
    }
    static variable_list backward(AutogradContext* ctx, variable_list gradients) {
        return {divided(gradients[0], ctx->saved_data["divisor"].toInt()), {}, {}, {}};
    }
};

// The result is this rank's rows of x, or of a sum.
struct GatherGradient : torch::autograd::Function<GatherGradient> {
    static constexpr bool is_traceable = true;

    template <class Run>
    static Tensor forward(AutogradContext* ctx, const Tensor& x, const Run& run, int64_t dim,
                          int64_t divisor, int64_t comm) {
        ctx->saved_data["dim"] = dim;
        ctx->saved_data["size"] = x.sym_size(dim);
        ctx->saved_data["divisor"] = divisor;
        ctx->saved_data["comm"] = comm;
        return run();
    }
    static variable_list backward(AutogradContext* ctx, variable_list gradients) {
        auto& saved = ctx->saved_data;
        return {
            ops::all_gather(divided(gradients[0], saved["divisor"].toInt()), saved["dim"].toInt(),
                            saved["size"].toSymInt(), "slice", saved["comm"].toInt()),
            {},
            {},
            {},
            {}};
    }
};

struct CutGradient : torch::autograd::Function<CutGradient> {
    static constexpr bool is_traceable = true;

    static Tensor forward(AutogradContext* ctx, const Tensor& x, int64_t dim, SymInt size,
                          bool partial, int64_t comm) {
        at::AutoDispatchBelowADInplaceOrView below;
        const auto [y, begins] = ops::all_gather_begins(x, dim, std::move(size), comm);
        ctx->save_for_backward({begins});
        ctx->saved_data["dim"] = dim;
        ctx->saved_data["rows"] = x.sym_size(dim);
        ctx->saved_data["partial"] = partial;
        ctx->saved_data["comm"] = comm;
        return y;
    }
    static variable_list backward(AutogradContext* ctx, variable_list gradients) {
        auto& saved = ctx->saved_data;
        const auto cut = saved["partial"].toBool() ? ops::reduce_scatter_rows : ops::own_rows;
        return {cut(gradients[0], ctx->get_saved_variables()[0], saved["dim"].toInt(),
                    saved["rows"].toSymInt(), saved["comm"].toInt()),
                {},
                {},
                {},
                {}};
    }
};

struct SumGradient : torch::autograd::Function<SumGradient> {
    static constexpr bool is_traceable = true;

    static Tensor forward(AutogradContext* ctx, const Tensor& x, int64_t comm) {
        ctx->saved_data["comm"] = comm;
        return x;
    }
    static variable_list backward(AutogradContext* ctx, variable_list gradients) {
        return {ops::all_reduce(gradients[0], "sum", ctx->saved_data["comm"].toInt()), {}};
    }
};

Tensor all_reduce_autograd(const Tensor& x, string_view op, int64_t comm) {
    const auto run = [&] {
        at::AutoDispatchBelowADInplaceOrView below;
        return ops::all_reduce(x, op, comm);
    };
    if (!needs_gradient("all_reduce", x)) return run();
    return KeepGradient::apply(x, run, divisor(op, comm), false);
}

void all_reduce_autograd_(Tensor& x, string_view op, int64_t comm) {
    const auto run = [&] {
        at::AutoDispatchBelowAutograd below;
        ops::all_reduce_(x, op, comm);
        return x;
    };
    if (needs_gradient("all_reduce_", x))
        KeepGradient::apply(x, run, divisor(op, comm), true);
    else
        run();
}

// As any in-place change: autograd notices a stale saved tensor.
void all_reduce_version_(Tensor& x, string_view op, int64_t comm) {
    at::AutoDispatchBelowADInplaceOrView below;
    ops::all_reduce_(x, op, comm);
    x.unsafeGetTensorImpl()->bump_version();
}

Tensor reduce_scatter_autograd(const Tensor& x, int64_t dim, string_view op, string_view split,
                               int64_t comm) {
    const auto run = [&] {
        at::AutoDispatchBelowADInplaceOrView below;
        return ops::reduce_scatter(x, dim, op, split, comm);
    };
    if (!needs_gradient("reduce_scatter", x)) return run();
    return GatherGradient::apply(x, run, dim, divisor(op, comm), comm);
}

Tensor reduce_scatter_rows_autograd(const Tensor& x, const Tensor& begins, int64_t dim, SymInt rows,
                                    int64_t comm) {
    const auto run = [&] {
        at::AutoDispatchBelowADInplaceOrView below;
        return ops::reduce_scatter_rows(x, begins, dim, rows, comm);
    };
    if (!needs_gradient("reduce_scatter_rows", x)) return run();
    return GatherGradient::apply(x, run, dim, 1, comm);
}

Tensor own_rows_autograd(const Tensor& x, const Tensor& begins, int64_t dim, SymInt rows,
                         int64_t comm) {
    const auto run = [&] {
        at::AutoDispatchBelowADInplaceOrView below;
        return ops::own_rows(x, begins, dim, rows, comm);
    };
    if (!needs_gradient("own_rows", x)) return run();
    return GatherGradient::apply(x, run, dim, 1, comm);
}

Tensor all_gather_autograd(const Tensor& x, int64_t dim, SymInt size, string_view grad,
                           int64_t comm) {
    if (needs_gradient("all_gather", x))
        return CutGradient::apply(x, dim, std::move(size), grad == "reduce_scatter", comm);
    at::AutoDispatchBelowADInplaceOrView below;
    return ops::all_gather(x, dim, std::move(size), grad, comm);
}

Tensor copy_to_group(const Tensor& x, int64_t comm) {
    return needs_gradient("copy_to_group", x) ? SumGradient::apply(x, comm) : x.view_as(x);
}

}  // namespace

void repeat_all_reduce_(Communicator& comm, const at::Tensor& x, int64_t calls) {
    TORCH_CHECK(x.is_contiguous(), "repeat_all_reduce_: x must be contiguous");
    for (; calls > 0; --calls) all_reduce_(comm, operand(x), false);
}

TORCH_LIBRARY(coconet, m) {
    const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
    m.def("all_reduce(Tensor x, str op, int comm) -> Tensor", tags);
    m.def("all_reduce_(Tensor(a!) x, str op, int comm) -> ()", tags);
    m.def("reduce_scatter(Tensor x, int dim, str op, str split, int comm) -> Tensor", tags);
    m.def("all_gather(Tensor x, int dim, SymInt size, str grad, int comm) -> Tensor", tags);
    m.def("copy_to_group(Tensor(a) x, int comm) -> Tensor(a)", copy_to_group, tags);

    // What the gradient of all_gather needs: where each rank's rows begin.
    m.def("all_gather_begins(Tensor x, int dim, SymInt size, int comm) -> (Tensor, Tensor)", tags);
    m.def("own_rows(Tensor x, Tensor begins, int dim, SymInt rows, int comm) -> Tensor", tags);
    m.def("reduce_scatter_rows(Tensor x, Tensor begins, int dim, SymInt rows, int comm) -> Tensor",
          tags);
}

static void implement_kernels(torch::Library& m) {
    m.impl("all_reduce", all_reduce_kernel);
    m.impl("all_reduce_", all_reduce_kernel_);
    m.impl("reduce_scatter", reduce_scatter_kernel);
    m.impl("all_gather", all_gather_kernel);
    m.impl("all_gather_begins", all_gather_begins_kernel);
    m.impl("own_rows", own_rows_kernel);
    m.impl("reduce_scatter_rows", reduce_scatter_rows_kernel);
}

// One set for both: the communicator decides.
TORCH_LIBRARY_IMPL(coconet, CPU, m) { implement_kernels(m); }
TORCH_LIBRARY_IMPL(coconet, CUDA, m) { implement_kernels(m); }

TORCH_LIBRARY_IMPL(coconet, ADInplaceOrView, m) { m.impl("all_reduce_", all_reduce_version_); }

TORCH_LIBRARY_IMPL(coconet, Autograd, m) {
    m.impl("all_reduce", all_reduce_autograd);
    m.impl("all_reduce_", all_reduce_autograd_);
    m.impl("reduce_scatter", reduce_scatter_autograd);
    m.impl("all_gather", all_gather_autograd);
    m.impl("own_rows", own_rows_autograd);
    m.impl("reduce_scatter_rows", reduce_scatter_rows_autograd);
}

// Straight to the dispatcher: torch.ops takes microseconds to find the way.
void bind_collectives(py::module_& m) {
    using Release = py::call_guard<py::gil_scoped_release>;
    using std::string;
    m.def(
        "all_reduce",
        [](const Tensor& x, const string& op, int64_t comm) {
            return ops::all_reduce(x, op, comm);
        },
        Release());
    m.def(
        "all_reduce_",
        [](Tensor& x, const string& op, int64_t comm) { ops::all_reduce_(x, op, comm); },
        Release());
    m.def(
        "reduce_scatter",
        [](const Tensor& x, int64_t dim, const string& op, const string& split, int64_t comm) {
            return ops::reduce_scatter(x, dim, op, split, comm);
        },
        Release());
    m.def(
        "all_gather",
        [](const Tensor& x, int64_t dim, int64_t size, const string& grad, int64_t comm) {
            return ops::all_gather(x, dim, size, grad, comm);
        },
        Release());
    m.def("copy_to_group", &ops::copy_to_group, Release());
}

}  // namespace coconet
