// Shared by the files of the binding layer.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "common/calls.h"
#include "cpu/communicator.h"

namespace coconet {

class DeviceCommunicator;

// Communicators by number: torch ops take no Python objects. The number tells world size and rank
// too, so that the shape of an op's result follows from its arguments: compiled graphs are cached,
// on disk and for all ranks, by nothing else.
struct AnyCommunicator {
    std::shared_ptr<Communicator> shm;
    std::shared_ptr<DeviceCommunicator> device;  // instead of it

    int rank() const;
    int world() const;
};
int64_t register_communicator(const AnyCommunicator& comm);
constexpr int world_of(int64_t id) { return id >> 8 & 0xff; }
constexpr int rank_of(int64_t id) { return id & 0xff; }
AnyCommunicator communicator(int64_t id);

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
// Of a call's name; `rejected` for one that isn't an op of its own.
OpCode op_code(const std::string& name);
// A tensor with its own storage in the heap; dropping it marks the block as freed.
at::Tensor heap_tensor(const Communicator& comm, const Heap::Block& block, at::IntArrayRef sizes,
                       at::ScalarType dtype);

// (tensor, first element in it, first element in the slice, elements) for each piece of the slice.
std::vector<std::tuple<int, int64_t, int64_t, int64_t>> slice_pieces(const ListLayout& list,
                                                                     int rank);
// The operands of an optimizer step.
struct StepTensors {
    // grads: one per parameter, None where absent; None altogether: the parameters' own.
    StepTensors(const std::vector<at::Tensor>& params,
                const std::optional<std::vector<std::optional<at::Tensor>>>& grads);
    std::vector<void*> weights;
    std::vector<const void*> gradients;
    DType dtype;
};

void bind_collectives(pybind11::module_& m);
void bind_nccl(pybind11::module_& m);
// The op's C++ entry, some calls back to back: what a benchmark compares with other C libraries.
void repeat_all_reduce_(Communicator& comm, const at::Tensor& x, int64_t calls);

}  // namespace coconet
