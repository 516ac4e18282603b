// Shared by the files of the binding layer.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <memory>

#include "cpu/communicator.h"

namespace coconet {

// Communicators by number: torch ops take no Python objects. The number tells world size and rank
// too, so that the shape of an op's result follows from its arguments: compiled graphs are cached,
// on disk and for all ranks, by nothing else.
int64_t register_communicator(const std::shared_ptr<Communicator>& comm);
constexpr int world_of(int64_t id) { return id >> 8 & 0xff; }
constexpr int rank_of(int64_t id) { return id & 0xff; }
std::shared_ptr<Communicator> communicator(int64_t id);

// Sets the Python exception that belongs to the error and throws it. Takes the GIL.
[[noreturn]] void throw_python(const Error& error);

template <class F>
auto with_python_errors(F&& f) {
    try {
        return f();
    } catch (const Error& error) {
        throw_python(error);
    }
}

DType dtype_of(const at::Tensor& t);
// A tensor with its own storage in the heap; dropping it marks the block as freed.
at::Tensor heap_tensor(const Communicator& comm, const Heap::Block& block, at::IntArrayRef sizes,
                       at::ScalarType dtype);

void bind_collectives(pybind11::module_& m);
void bind_nccl(pybind11::module_& m);
// The op's C++ entry, some calls back to back: what a benchmark compares with other C libraries.
void repeat_all_reduce_(Communicator& comm, const at::Tensor& x, int64_t calls);

}  // namespace coconet
