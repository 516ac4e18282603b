// Binding of csrc/nccl: see coconet_ops/peer_memory.py.
#include "nccl/nccl_peers.h"

#include <torch/csrc/utils/pybind.h>

#include "binding.h"

namespace py = pybind11;

namespace coconet {

void bind_nccl(py::module_& m) {
    using cuda::NcclPeers;
    using Release = py::call_guard<py::gil_scoped_release>;
    m.attr("nccl_version") = cuda::nccl_build_version();
    py::class_<NcclPeers>(m, "NcclPeers")
        .def(py::init<int, int64_t>(), Release(), py::arg("device"), py::arg("nbytes"))
        .def_static("new_meeting", [] { return py::bytes(NcclPeers::new_meeting()); })
        .def("connect", &NcclPeers::connect, Release(), py::arg("meeting"), py::arg("rank"),
             py::arg("world_size"))
        .def("map", &NcclPeers::map, Release())
        .def_property_readonly("pointers",
                               [](const NcclPeers& peers) {
                                   std::vector<uintptr_t> pointers;
                                   for (void* p : peers.pointers())
                                       pointers.push_back(reinterpret_cast<uintptr_t>(p));
                                   return pointers;
                               })
        .def(
            "barrier",
            [](NcclPeers& peers, uintptr_t stream) {
                peers.barrier(reinterpret_cast<cuda::Stream>(stream));
            },
            Release(), py::arg("stream"));
}

}  // namespace coconet
