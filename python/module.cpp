// The extension module coconet_ops._C: communicator, optimizer step, errors.
#include <ATen/ops/from_blob.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <mutex>

#include "binding.h"
#include "cpu/kernels.h"
#include "cpu/local.h"
#include "cpu/rs_adam_ag.h"
#include "device.h"

namespace py = pybind11;

namespace coconet {

namespace {

std::mutex registry_mutex;
struct Registered {
    std::weak_ptr<Communicator> shm;
    std::weak_ptr<DeviceCommunicator> device;
};
std::map<int64_t, Registered> registry;
int64_t next_serial = 0;

// Runs Python's signal handlers; true when one of them raised (KeyboardInterrupt).
bool python_interrupt_requested() {
    if (!Py_IsInitialized()) return false;
    py::gil_scoped_acquire gil;
    return PyErr_CheckSignals() != 0;
}

const char* python_error_name(ErrorKind kind) {
    switch (kind) {
        case ErrorKind::peer_lost:
            return "PeerLostError";
        case ErrorKind::timeout:
            return "CommunicatorTimeout";
        case ErrorKind::mismatch:
            return "MismatchError";
        default:
            return "CommunicatorError";
    }
}

void set_python_error(const Error& error) {
    // The signal handler's own exception is already set.
    if (error.kind == ErrorKind::interrupted && PyErr_Occurred()) return;
    if (error.kind == ErrorKind::heap_exhausted) {
        PyErr_SetString(PyExc_MemoryError, error.what());
        return;
    }
    const py::object type =
        py::module_::import("coconet_ops.errors").attr(python_error_name(error.kind));
    PyErr_SetString(type.ptr(), error.what());
}

}  // namespace

int AnyCommunicator::rank() const { return device ? device->core->rank : shm->rank; }
int AnyCommunicator::world() const { return device ? device->core->world : shm->world; }

int64_t register_communicator(const AnyCommunicator& comm) {
    std::lock_guard<std::mutex> lock(registry_mutex);
    const int64_t id = next_serial++ << 16 | comm.world() << 8 | comm.rank();
    registry[id] = {comm.shm, comm.device};
    return id;
}

AnyCommunicator communicator(int64_t id) {
    AnyCommunicator comm;
    {
        std::lock_guard<std::mutex> lock(registry_mutex);
        const auto it = registry.find(id);
        if (it != registry.end()) comm = {it->second.shm.lock(), it->second.device.lock()};
    }
    if (!comm.shm && !comm.device)
        throw_python(Error(ErrorKind::communicator,
                           "coconet_ops: the communicator of this call doesn't exist any more; "
                           "code that was compiled for it needs torch.compiler.reset()"));
    return comm;
}

void throw_python(const Error& error) {
    py::gil_scoped_acquire gil;
    set_python_error(error);
    throw py::error_already_set();
}

DType dtype_of(const at::Tensor& t) {
    switch (t.scalar_type()) {
        case at::kFloat:
            return DType::f32;
        case at::kBFloat16:
            return DType::bf16;
        case at::kHalf:
            return DType::f16;
        case at::kDouble:
            return DType::f64;
        case at::kLong:
            return DType::i64;
        case at::kInt:
            return DType::i32;
        case at::kShort:
            return DType::i16;
        case at::kChar:
            return DType::i8;
        case at::kByte:
            return DType::u8;
        case at::kBool:
            return DType::boolean;
        case at::kComplexFloat:
            return DType::c64;
        case at::kComplexDouble:
            return DType::c128;
        default:
            return static_cast<DType>(static_cast<int>(DType::other) +
                                      static_cast<int>(t.scalar_type()));
    }
}

OpCode op_code(const std::string& name) {
    for (const OpCode op : {OpCode::barrier, OpCode::empty, OpCode::all_reduce,
                            OpCode::reduce_scatter, OpCode::all_gather, OpCode::rs_adam_ag})
        if (name == op_name(op) || name == std::string(op_name(op)) + "_") return op;
    return OpCode::rejected;
}

StepTensors::StepTensors(const std::vector<at::Tensor>& params,
                         const std::optional<std::vector<std::optional<at::Tensor>>>& grads)
    : weights(params.size()),
      gradients(params.size()),
      dtype(params.empty() ? DType::f32 : dtype_of(params[0])) {
    for (size_t i = 0; i < params.size(); ++i) {
        weights[i] = params[i].data_ptr();
        const at::Tensor grad = grads ? (*grads)[i].value_or(at::Tensor()) : params[i].grad();
        // An empty tensor has no memory, yet it is there.
        static const char nothing = 0;
        gradients[i] = !grad.defined()     ? nullptr
                       : grad.numel() == 0 ? &nothing
                                           : grad.const_data_ptr();
    }
}

std::vector<std::tuple<int, int64_t, int64_t, int64_t>> slice_pieces(const ListLayout& list,
                                                                     int rank) {
    std::vector<std::tuple<int, int64_t, int64_t, int64_t>> pieces;
    const ListSlices slices = list.slices();
    slices.for_runs(rank, 0, slices.size(rank), [&](const Run& run) {
        pieces.emplace_back(run.tensor, run.offset, run.index, run.length);
    });
    return pieces;
}

at::Tensor heap_tensor(const Communicator& comm, const Heap::Block& block, at::IntArrayRef sizes,
                       at::ScalarType dtype) {
    const auto heap = comm.heap();
    return at::from_blob(
        heap->data() + block.offset, sizes,
        [heap, slot = block.slot](void*) { heap->mark_freed(slot); },
        at::TensorOptions().dtype(dtype));
}

namespace {

// Whether the memory of t is what its dtype, sizes and strides say, and these are as given.
bool laid_out(const at::Tensor& t, at::ScalarType dtype, at::IntArrayRef sizes,
              at::IntArrayRef strides) {
    return t.layout() == at::kStrided && !t.is_neg() && t.scalar_type() == dtype &&
           t.sizes() == sizes && t.strides() == strides;
}

// Where the parameters of an optimizer and their gradients live, to notice what was replaced.
class Homes {
  public:
    Homes(const std::vector<at::Tensor>& weights, const std::vector<at::Tensor>& gradients) {
        for (const auto& t : weights) weights_.emplace_back(t);
        for (const auto& t : gradients) gradients_.emplace_back(t);
    }
    // Indices of parameters that were re-pointed, and of gradients that lie elsewhere.
    std::pair<std::vector<int>, std::vector<int>> strays(
        const std::vector<at::Tensor>& params) const {
        std::pair<std::vector<int>, std::vector<int>> found;
        for (size_t i = 0; i < params.size(); ++i) {
            if (!weights_[i].holds(params[i])) found.first.push_back(static_cast<int>(i));
            const at::Tensor& grad = params[i].grad();
            if (grad.defined() && !gradients_[i].holds(grad))
                found.second.push_back(static_cast<int>(i));
        }
        return found;
    }

  private:
    // As numbers: a tensor object can be re-pointed by its user.
    struct Home {
        const void* data;
        at::ScalarType dtype;
        at::DimVector sizes, strides;

        explicit Home(const at::Tensor& t)
            : data(t.const_data_ptr()),
              dtype(t.scalar_type()),
              sizes(t.sizes()),
              strides(t.strides()) {}
        bool holds(const at::Tensor& t) const {
            return laid_out(t, dtype, sizes, strides) && t.const_data_ptr() == data;
        }
    };
    std::vector<Home> weights_, gradients_;
};

// The memory layouts that a step takes, one per parameter.
class Layouts {
  public:
    Layouts(const std::vector<std::pair<std::vector<int64_t>, std::vector<int64_t>>>& layouts,
            at::ScalarType dtype, at::Device device)
        : layouts_(layouts), dtype_(dtype), device_(device) {}
    // Whether parameters and gradients (or None) can be used as they are. Says nothing about what
    // is wrong with them.
    bool hold(const py::list& params, const py::list& grads) const {
        if (params.size() != layouts_.size() || grads.size() != layouts_.size()) return false;
        for (size_t i = 0; i < layouts_.size(); ++i)
            if (!holds(params[i].ptr(), i) || !(grads[i].is_none() || holds(grads[i].ptr(), i)))
                return false;
        return true;
    }

  private:
    bool holds(PyObject* object, size_t i) const {
        if (!THPVariable_Check(object)) return false;
        const at::Tensor& t = THPVariable_Unpack(object);
        const auto& [sizes, strides] = layouts_[i];
        return laid_out(t, dtype_, sizes, strides) && t.device() == device_;
    }
    std::vector<std::pair<std::vector<int64_t>, std::vector<int64_t>>> layouts_;
    at::ScalarType dtype_;
    at::Device device_;
};

void adam_step(TensorList& list, const std::vector<at::Tensor>& params,
               const std::optional<std::vector<std::optional<at::Tensor>>>& grads,
               const AdamHyper& hyper, const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq,
               const std::optional<at::Tensor>& master) {
    const StepTensors step(params, grads);
    py::gil_scoped_release release;
    with_python_errors([&] {
        rs_adam_ag(list, step.dtype, step.weights, step.gradients, hyper, exp_avg.data_ptr<float>(),
                   exp_avg_sq.data_ptr<float>(), master ? master->data_ptr<float>() : nullptr);
    });
}

std::shared_ptr<Communicator> connect(Rendezvous& rendezvous, int rank,
                                      const std::vector<std::string>& addresses, bool use_pidfds,
                                      int64_t heap_bytes, double timeout, bool check,
                                      uint32_t first_epoch, bool oversubscribed) {
    CommunicatorOptions options{rank, heap_bytes, timeout, check, first_epoch, oversubscribed};
    return std::make_shared<Communicator>(options,
                                          rendezvous.connect(rank, addresses, use_pidfds, timeout));
}

int64_t hash_bytes(const at::Tensor& t) {
    // Four independent FNV-1a lanes over 64-bit words.
    const auto* bytes = static_cast<const unsigned char*>(t.const_data_ptr());
    const int64_t size = t.numel() * t.element_size();
    uint64_t lanes[4] = {14695981039346656037u, 1, 2, 3};
    constexpr uint64_t kPrime = 1099511628211u;
    int64_t i = 0;
    for (; i + 32 <= size; i += 32)
        for (int k = 0; k < 4; ++k) {
            uint64_t word;
            memcpy(&word, bytes + i + 8 * k, 8);
            lanes[k] = (lanes[k] ^ word) * kPrime;
            lanes[k] ^= lanes[k] >> 32;
        }
    for (; i < size; ++i) lanes[0] = (lanes[0] ^ bytes[i]) * kPrime;
    uint64_t hash = static_cast<uint64_t>(size);
    for (const uint64_t lane : lanes) hash = (hash ^ lane) * kPrime;
    return static_cast<int64_t>(hash);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    using Release = py::call_guard<py::gil_scoped_release>;
    interrupt_requested = python_interrupt_requested;
    other_dtype_name = [](int number) {
        return c10::toString(static_cast<at::ScalarType>(number));
    };
    py::register_exception_translator([](std::exception_ptr p) {
        try {
            if (p) std::rethrow_exception(p);
        } catch (const Error& error) {
            set_python_error(error);
        }
    });

    m.attr("isa") = kernels().isa;
    m.attr("max_ranks") = kMaxRanks;
    m.attr("compiler") = __VERSION__;
    m.def("host_identity", &host_identity);
    m.def("hash_bytes", &hash_bytes, Release(), "64-bit hash of a contiguous tensor's bytes.");
    m.def(
        "copy_limit",
        [](at::Tensor& dst, const at::Tensor& src) {
            kernels().copy(dst.data_ptr(), src.const_data_ptr(), src.numel() * src.element_size(),
                           true);
        },
        Release(), "Copies src to dst past the cache: what a benchmark measures the limit with.");

    bind_collectives(m);
    bind_device(m);
    bind_nccl(m);

    py::class_<Rendezvous>(m, "Rendezvous")
        .def(py::init<int64_t>(), py::arg("heap_bytes"))
        .def_property_readonly("address", &Rendezvous::address)
        .def_property_readonly("has_pidfd", &Rendezvous::has_pidfd)
        .def("connect", &connect, Release(), py::arg("rank"), py::arg("addresses"),
             py::arg("use_pidfds"), py::arg("heap_bytes"), py::arg("timeout"), py::arg("check"),
             py::arg("first_epoch"), py::arg("oversubscribed"));

    py::class_<Communicator, std::shared_ptr<Communicator>>(m, "Communicator")
        .def("register",
             [](const std::shared_ptr<Communicator>& c) {
                 return register_communicator({c, nullptr});
             })
        .def_property_readonly("closed", &Communicator::closed)
        .def_property_readonly("heap_bytes",
                               [](const Communicator& c) { return c.heap()->capacity(); })
        .def_property_readonly("heap_allocated",
                               [](const Communicator& c) { return c.heap()->allocated(); })
        .def_property_readonly(
            "huge_pages", [](const Communicator& c) { return c.heap()->segment().huge_pages(); })
        .def_property_readonly(
            "heap_resident",
            [](const Communicator& c) { return c.heap()->segment().resident_bytes(); })
        .def("owns",
             [](const Communicator& c, const at::Tensor& t) {
                 return c.heap()->offset_of(t.const_data_ptr(), 0) >= 0;
             })
        .def_property_readonly("tuning",
                               [](const Communicator& c) {
                                   const Tuning& t = c.tuning();
                                   py::dict d;
                                   d["one_shot_bytes"] = t.one_shot_bytes;
                                   d["chunk_bytes"] = t.chunk_bytes;
                                   d["stream_bytes"] = t.stream_bytes;
                                   d["staged_stream_bytes"] = t.staged_stream_bytes;
                                   d["spins"] = t.spins;
                                   return d;
                               })
        .def("barrier", &Communicator::barrier, Release())
        .def("empty",
             [](Communicator& c, const std::vector<int64_t>& sizes, at::ScalarType dtype) {
                 int64_t bytes = static_cast<int64_t>(at::elementSize(dtype));
                 for (const int64_t size : sizes) bytes *= size;
                 py::gil_scoped_release release;
                 const Heap::Block block = c.empty(bytes);
                 return heap_tensor(c, block, sizes, dtype);
             })
        .def("reject",
             [](Communicator& c, const std::string& op, const std::string& text) {
                 py::gil_scoped_release release;
                 c.reject(op_code(op), text);
             })
        .def("repeat_all_reduce_", &repeat_all_reduce_, Release(), py::arg("x"), py::arg("calls"))
        .def("tensor_list",
             [](std::shared_ptr<Communicator> c, const std::vector<int64_t>& numels) {
                 py::gil_scoped_release release;
                 return std::make_unique<TensorList>(std::move(c), numels);
             })
        .def("ping", &Communicator::ping, Release(), py::arg("rounds"))
        .def("close", &Communicator::close, Release())
        .def("inject_fault", [](Communicator& c, const std::string& phase, int signal) {
            for (int p = 0; p < kNumPhases; ++p)
                if (phase == kPhaseNames[p]) return c.inject_fault(static_cast<Phase>(p), signal);
            throw py::value_error("unknown phase " + phase);
        });

    m.def(
        "local_communicators",
        [](int world, int64_t heap_bytes, double timeout, bool check, uint32_t first_epoch,
           bool oversubscribed) {
            return local_communicators(
                world, {0, heap_bytes, timeout, check, first_epoch, oversubscribed});
        },
        Release(), py::arg("world"), py::arg("heap_bytes"), py::arg("timeout"), py::arg("check"),
        py::arg("first_epoch"), py::arg("oversubscribed"),
        "Communicators of ranks that are threads of this process, by rank.");

    py::class_<AdamHyper>(m, "AdamHyper")
        .def(py::init<double, double, double, double, double, bool, bool, bool>(), py::arg("lr"),
             py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"),
             py::arg("adam_w_mode"), py::arg("bias_correction"), py::arg("average_grads"));

    py::class_<TensorList>(m, "TensorList")
        .def_readonly("numels", &TensorList::numels)
        .def_readonly("slice", &TensorList::slice)
        .def_readwrite("steps", &TensorList::steps)
        .def(
            "pieces", [](const TensorList& list, int rank) { return slice_pieces(list, rank); },
            py::arg("rank"));
    m.def("adam_step", &adam_step, py::arg("tensors"), py::arg("params"),
          py::arg("grads").none(true), py::arg("hyper"), py::arg("exp_avg"), py::arg("exp_avg_sq"),
          py::arg("master").none(true));

    py::class_<Layouts>(m, "Layouts")
        .def(py::init<const std::vector<std::pair<std::vector<int64_t>, std::vector<int64_t>>>&,
                      at::ScalarType, at::Device>())
        .def("hold", &Layouts::hold, py::arg("params"), py::arg("grads"));

    py::class_<Homes>(m, "Homes")
        .def(py::init<const std::vector<at::Tensor>&, const std::vector<at::Tensor>&>())
        .def("strays", &Homes::strays);
}

}  // namespace coconet
