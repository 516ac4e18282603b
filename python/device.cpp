#include "device.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <dlfcn.h>
#include <pybind11/gil_safe_call_once.h>
#include <torch/csrc/utils/pybind.h>

#include "binding.h"
#include "cuda/layout.h"

namespace py = pybind11;

namespace coconet {

using at::Tensor;

cuda::Stream DeviceCommunicator::stream() const {
    if (!device.is_cuda()) return nullptr;
    // torch's own C++ function for it is in libraries that a build for the CPU lacks.
    py::gil_scoped_acquire gil;
    PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> current;
    const py::object& get =
        current
            .call_once_and_store_result(
                [] { return py::module_::import("torch._C").attr("_cuda_getCurrentRawStream"); })
            .get_stored();
    return reinterpret_cast<cuda::Stream>(get(device.index()).cast<uintptr_t>());
}

Tensor DeviceCommunicator::heap_tensor(void* block, at::IntArrayRef sizes,
                                       at::ScalarType dtype) const {
    int64_t bytes = static_cast<int64_t>(at::elementSize(dtype));
    for (const int64_t size : sizes) bytes *= size;
    return at::from_blob(
        block, sizes, [heap = core, block, bytes](void*) { heap->release(block, bytes); },
        at::TensorOptions().dtype(dtype).device(device), device);
}

Tensor DeviceCommunicator::output_for(const Tensor& input, at::IntArrayRef sizes) const {
    const auto bytes = static_cast<int64_t>(input.nbytes());
    if (input.numel() > 0 && core->offset_of(input.const_data_ptr(), bytes) >= 0) {
        int64_t size = input.element_size();
        for (const int64_t n : sizes) size *= n;
        if (void* block = core->allocate(size))
            return heap_tensor(block, sizes, input.scalar_type());
    }
    return at::empty(sizes, input.options());
}

namespace {

Operand operand(const Tensor& t) {
    return {t.data_ptr(), dtype_of(t), t.element_size(), t.sizes().data(), t.dim()};
}

// The emulator's library, or another one with its entry point; it stays loaded.
const cuda::Backend* load_backend(const std::string& path) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw py::import_error(dlerror());
    const auto entry =
        reinterpret_cast<const cuda::Backend* (*)()>(dlsym(library, "coconet_backend"));
    if (entry == nullptr) throw py::import_error(dlerror());
    const auto set_name = reinterpret_cast<void (*)(const char* (*)(int))>(
        dlsym(library, "coconet_set_other_dtype_name"));
    if (set_name != nullptr) set_name(other_dtype_name);
    return entry();
}

cuda::Options options(int device, int64_t heap_bytes, double timeout, bool check,
                      uint32_t first_epoch, int blocks, int threads) {
    cuda::Options o;
    o.device = device;
    o.heap_bytes = heap_bytes;
    o.timeout_seconds = timeout;
    o.check = check;
    o.first_epoch = first_epoch;
    o.blocks = blocks;
    o.threads = threads;
    return o;
}

// The emulator has one device, whose tensors are on the CPU.
int index_of(at::Device device) { return device.is_cuda() ? device.index() : 0; }

// Keeps a Python object for code that may drop it without the GIL.
std::shared_ptr<void> kept(const py::object& object) {
    return {new py::object(object), [](py::object* p) {
                if (!Py_IsInitialized()) return;  // the process is at its end
                py::gil_scoped_acquire gil;
                delete p;
            }};
}

// Runs f with the current stream, without the GIL.
template <class F>
auto on_stream(const DeviceCommunicator& comm, F&& f) {
    const cuda::Stream stream = comm.stream();
    py::gil_scoped_release release;
    return f(stream);
}

void adam_step(DeviceTensors& tensors, const std::vector<Tensor>& params,
               const std::optional<std::vector<std::optional<Tensor>>>& grads,
               const AdamHyper& hyper, const Tensor& exp_avg, const Tensor& exp_avg_sq,
               const std::optional<Tensor>& master) {
    const StepTensors step(params, grads);
    const cuda::AdamState state{exp_avg.data_ptr<float>(), exp_avg_sq.data_ptr<float>(),
                                master ? master->data_ptr<float>() : nullptr};
    on_stream(*tensors.comm, [&](cuda::Stream stream) {
        with_python_errors([&] {
            tensors.comm->core->rs_adam_ag(*tensors.list, step.dtype, step.weights, step.gradients,
                                           hyper, state, stream);
        });
    });
}

}  // namespace

Tensor all_reduce(const DeviceCommunicator& comm, const Tensor& x, bool average) {
    const Tensor output = comm.output_for(x, x.sizes());
    comm.core->all_reduce(operand(x), output.data_ptr(), average, false, comm.stream());
    return output;
}

void all_reduce_(const DeviceCommunicator& comm, Tensor& x, bool average) {
    comm.core->all_reduce(operand(x), x.data_ptr(), average, true, comm.stream());
}

Tensor reduce_scatter(const DeviceCommunicator& comm, const Tensor& x, int64_t dim, bool average,
                      Split split, const DimSlices& slices) {
    at::DimVector sizes(x.sizes());
    sizes[dim] = slices.rows(comm.core->rank);
    const Tensor output = comm.output_for(x, sizes);
    comm.core->reduce_scatter(operand(x), output.data_ptr(), dim, average, split, slices,
                              comm.stream());
    return output;
}

Tensor all_gather(const DeviceCommunicator& comm, const Tensor& shard, int64_t dim, int64_t size,
                  int64_t* begins) {
    const cuda::Stream stream = comm.stream();
    comm.core->find_rows(operand(shard), dim, size, begins, stream);
    at::DimVector sizes(shard.sizes());
    sizes[dim] = begins[comm.core->world];
    const Tensor output = comm.output_for(shard, sizes);
    comm.core->all_gather(operand(shard), output.data_ptr(), dim, size, sizes[dim], stream);
    return output;
}

void bind_device(py::module_& m) {
    using Release = py::call_guard<py::gil_scoped_release>;

    py::class_<DeviceCommunicator, std::shared_ptr<DeviceCommunicator>>(m, "DeviceCommunicator")
        .def("register",
             [](const std::shared_ptr<DeviceCommunicator>& c) {
                 return register_communicator({nullptr, c});
             })
        .def_property_readonly("closed",
                               [](const DeviceCommunicator& c) { return c.core->closed(); })
        .def_property_readonly("heap_bytes",
                               [](const DeviceCommunicator& c) { return c.core->heap_bytes(); })
        .def_property_readonly("heap_allocated",
                               [](const DeviceCommunicator& c) { return c.core->heap_allocated(); })
        .def_property_readonly("huge_pages", [](const DeviceCommunicator&) { return false; })
        .def("__repr__",
             [](const DeviceCommunicator& c) { return cuda::to_string(c.core->config()); })
        .def("owns", [](const DeviceCommunicator& c,
                        const Tensor& t) { return c.core->offset_of(t.const_data_ptr(), 0) >= 0; })
        .def_property_readonly("tuning",
                               [](const DeviceCommunicator& c) {
                                   const cuda::LaunchConfig& config = c.core->config();
                                   py::dict d;
                                   d["one_shot_bytes"] = config.one_shot_bytes;
                                   d["chunk_bytes"] = config.chunk_bytes;
                                   d["threads"] = config.threads;
                                   d["blocks"] = config.blocks;
                                   d["unroll"] = config.unroll;
                                   d["pack_bytes"] = config.pack_bytes;
                                   return d;
                               })
        .def("barrier",
             [](const DeviceCommunicator& c) {
                 on_stream(c, [&](cuda::Stream stream) { c.core->barrier(stream); });
             })
        .def("empty",
             [](const DeviceCommunicator& c, const std::vector<int64_t>& sizes,
                at::ScalarType dtype) {
                 int64_t bytes = static_cast<int64_t>(at::elementSize(dtype));
                 for (const int64_t size : sizes) bytes *= size;
                 return on_stream(c, [&](cuda::Stream stream) {
                     return c.heap_tensor(c.core->empty(bytes, stream), sizes, dtype);
                 });
             })
        .def("reject",
             [](const DeviceCommunicator& c, const std::string& op, const std::string& text) {
                 on_stream(c,
                           [&](cuda::Stream stream) { c.core->reject(op_code(op), text, stream); });
             })
        .def("tensor_list",
             [](std::shared_ptr<DeviceCommunicator> c, const std::vector<int64_t>& numels) {
                 py::gil_scoped_release release;
                 return std::make_unique<DeviceTensors>(std::move(c), numels);
             })
        .def("close", [](const DeviceCommunicator& c) { c.core->close(); }, Release());

    py::class_<DeviceTensors>(m, "DeviceTensors")
        .def_property_readonly("numels", [](const DeviceTensors& t) { return t.list->numels; })
        .def_property_readonly("slice", [](const DeviceTensors& t) { return t.list->slice; })
        .def_property(
            "steps",
            [](const DeviceTensors& t) {
                return on_stream(*t.comm, [&](cuda::Stream s) { return t.list->steps(s); });
            },
            [](const DeviceTensors& t, const std::vector<int64_t>& steps) {
                on_stream(*t.comm, [&](cuda::Stream s) { t.list->set_steps(steps, s); });
            })
        .def(
            "pieces", [](const DeviceTensors& t, int rank) { return slice_pieces(*t.list, rank); },
            py::arg("rank"));
    m.def("adam_step", &adam_step, py::arg("tensors"), py::arg("params"),
          py::arg("grads").none(true), py::arg("hyper"), py::arg("exp_avg"), py::arg("exp_avg_sq"),
          py::arg("master").none(true));

    py::class_<cuda::Backend, std::unique_ptr<cuda::Backend, py::nodelete>>(m, "Backend")
        .def_property_readonly("version", &cuda::Backend::version)
        .def_property_readonly("targets", &cuda::Backend::targets)
        .def("device_count",
             [](const cuda::Backend& b) {
                 std::string why;
                 const int count = b.device_count(&why);
                 return py::make_tuple(count, why);
             })
        .def("device_info",
             [](const cuda::Backend& b, int device) {
                 const cuda::DeviceInfo info = b.device_info(device);
                 py::dict d;
                 d["name"] = info.name;
                 d["compute_capability"] = py::make_tuple(info.major, info.minor);
                 d["multiprocessors"] = info.multiprocessors;
                 d["memory"] = info.memory;
                 return d;
             })
        .def(
            "local_communicators",
            [](const cuda::Backend& b, int world, at::Device device, int64_t heap_bytes,
               double timeout, bool check, uint32_t first_epoch, int blocks, int threads) {
                std::vector<std::shared_ptr<DeviceCommunicator>> ranks;
                for (auto& core : b.local(world, options(index_of(device), heap_bytes, timeout,
                                                         check, first_epoch, blocks, threads)))
                    ranks.push_back(std::make_shared<DeviceCommunicator>(core, device));
                return ranks;
            },
            Release(), py::arg("world"), py::arg("device"), py::arg("heap_bytes"),
            py::arg("timeout"), py::arg("check"), py::arg("first_epoch"), py::arg("blocks") = 0,
            py::arg("threads") = 0)
        .def(
            "peer_buffer_bytes",
            [](const cuda::Backend& b, int world, at::Device device, int64_t heap_bytes,
               int blocks) {
                return b.buffer_bytes(world,
                                      options(index_of(device), heap_bytes, 0, true, 0, blocks, 0));
            },
            py::arg("world"), py::arg("device"), py::arg("heap_bytes"), py::arg("blocks"))
        .def(
            "peer_communicator",
            [](const cuda::Backend& b, int rank, const std::vector<uintptr_t>& buffers,
               const py::object& owner, int64_t bytes, at::Device device, int64_t heap_bytes,
               double timeout, bool check, int blocks) {
                cuda::PeerBuffers peers{rank, {}, bytes, kept(owner)};
                for (const uintptr_t p : buffers) peers.base.push_back(reinterpret_cast<void*>(p));
                return std::make_shared<DeviceCommunicator>(
                    b.peer(peers,
                           options(index_of(device), heap_bytes, timeout, check, 0, blocks, 0)),
                    device);
            },
            py::arg("rank"), py::arg("buffers"), py::arg("owner"), py::arg("bytes"),
            py::arg("device"), py::arg("heap_bytes"), py::arg("timeout"), py::arg("check"),
            py::arg("blocks"));
    m.attr("max_device_ranks") = cuda::kMaxRanks;
    m.def("cuda_backend", &cuda::backend, py::return_value_policy::reference);
    m.def("load_backend", &load_backend, py::return_value_policy::reference, py::arg("path"));
}

}  // namespace coconet
