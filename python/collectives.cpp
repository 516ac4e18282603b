// The collectives as torch ops. Arguments were checked in Python (coconet_ops/checks.py).
#include "cpu/collectives.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "binding.h"

namespace coconet {

namespace {

Operand operand(const at::Tensor& t) {
    return {t.data_ptr(), dtype_of(t), t.element_size(), t.sizes().data(), t.dim()};
}

bool is_average(c10::string_view op) { return op == "avg"; }

at::Tensor all_reduce_op(const at::Tensor& x, c10::string_view op, int64_t comm_id) {
    const auto comm = communicator(comm_id);
    const at::Tensor input = x.contiguous();
    at::Tensor output;
    const Output block = with_python_errors([&] {
        return all_reduce(*comm, operand(input), is_average(op), [&](int64_t) {
            output = at::empty(input.sizes(), input.options());
            return output.data_ptr();
        });
    });
    return block ? heap_tensor(*comm, *block, input.sizes(), input.scalar_type()) : output;
}

at::Tensor& all_reduce_op_(at::Tensor& x, c10::string_view op, int64_t comm_id) {
    const auto comm = communicator(comm_id);
    at::Tensor dense = x.contiguous();
    with_python_errors([&] { all_reduce_(*comm, operand(dense), is_average(op)); });
    if (!dense.is_same(x)) x.copy_(dense);
    return x;
}

at::Tensor reduce_scatter_op(const at::Tensor& x, int64_t dim, c10::string_view op,
                             c10::string_view split, int64_t comm_id) {
    const auto comm = communicator(comm_id);
    const at::Tensor input = x.contiguous();
    const Split cut = split == "chunk" ? Split::chunk : Split::tensor_split;
    at::DimVector sizes(input.sizes());
    const DimSlices slices = dim_slices(operand(input), dim, cut, comm->world);
    sizes[dim] = slices.rows(comm->rank);
    at::Tensor output;
    const Output block = with_python_errors([&] {
        return reduce_scatter(*comm, operand(input), dim, is_average(op), cut, [&](int64_t) {
            output = at::empty(sizes, input.options());
            return output.data_ptr();
        });
    });
    return block ? heap_tensor(*comm, *block, sizes, input.scalar_type()) : output;
}

at::Tensor all_gather_op(const at::Tensor& x, int64_t dim, int64_t size, int64_t comm_id) {
    const auto comm = communicator(comm_id);
    const at::Tensor shard = x.contiguous();
    at::DimVector sizes(shard.sizes());
    at::Tensor output;
    int64_t total = 0;
    const Output block = with_python_errors([&] {
        return all_gather(
            *comm, operand(shard), dim, size,
            [&](int64_t rows) {
                sizes[dim] = rows;
                output = at::empty(sizes, shard.options());
                return output.data_ptr();
            },
            &total);
    });
    sizes[dim] = total;
    return block ? heap_tensor(*comm, *block, sizes, shard.scalar_type()) : output;
}

}  // namespace

void repeat_all_reduce_(Communicator& comm, const at::Tensor& x, int64_t calls) {
    TORCH_CHECK(x.is_contiguous(), "repeat_all_reduce_: x must be contiguous");
    for (; calls > 0; --calls) all_reduce_(comm, operand(x), false);
}

TORCH_LIBRARY(coconet, m) {
    m.def("all_reduce(Tensor x, str op, int comm) -> Tensor");
    m.def("all_reduce_(Tensor(a!) x, str op, int comm) -> Tensor(a!)");
    m.def("reduce_scatter(Tensor x, int dim, str op, str split, int comm) -> Tensor");
    m.def("all_gather(Tensor x, int dim, int size, int comm) -> Tensor");
}

TORCH_LIBRARY_IMPL(coconet, CPU, m) {
    m.impl("all_reduce", all_reduce_op);
    m.impl("all_reduce_", all_reduce_op_);
    m.impl("reduce_scatter", reduce_scatter_op);
    m.impl("all_gather", all_gather_op);
}

}  // namespace coconet
