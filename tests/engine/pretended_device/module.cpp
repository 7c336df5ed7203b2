// A CUDA device that there is not, for the engine in C++: its memory is the host's, and its streams only take notes.
//
// `noted_streams.py` builds it.

#include <ATen/EmptyTensor.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace {

namespace py = pybind11;

const c10::Device DEVICE(c10::kCUDA, 0);
const std::vector<std::string> NAMES = {"main", "out", "back", "other"};

struct Device {
  std::vector<std::string> notes;
  std::vector<std::string> memory;
  c10::StreamId current = 0;
  // By stream: what an event that is recorded there now stands for.
  std::vector<std::string> latest = NAMES;
  size_t num_copies = 0;
  c10::StreamId next_of_pool = 1;
  bool is_broken = false;
  bool is_host_full = false;

  std::string name() const { return NAMES.at(current); }
};
Device device;

c10::Stream numbered(c10::StreamId number) { return c10::Stream(c10::Stream::UNSAFE, DEVICE, number); }

struct NotedStreams final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return numbered(device.current); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return numbered(device.next_of_pool++); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return numbered(std::exchange(device.current, stream.id()));
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag flag) const override {
    TORCH_CHECK(flag == c10::EventFlag::PYTORCH_DEFAULT, "an event that measures time");
    if (*event == nullptr) *event = new std::string();
    *static_cast<std::string*>(*event) = device.latest.at(stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    TORCH_CHECK(!device.is_broken, "the device is gone");
    device.notes.push_back(NAMES.at(stream.id()) + " waits for " + *static_cast<std::string*>(event));
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<std::string*>(event); }
};

at::Tensor over_memory_of(const at::Tensor& tensor, c10::Device on) {
  auto storage =
      c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), tensor.storage().nbytes(),
                                            c10::DataPtr(
                                                tensor.storage().mutable_data(), new at::Tensor(tensor),
                                                [](void* owner) { delete static_cast<at::Tensor*>(owner); }, on),
                                            nullptr, false);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(on.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU),
      tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return made;
}

at::Tensor empty_on_host(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                         std::optional<c10::Device>, std::optional<bool> is_pinned,
                         std::optional<c10::MemoryFormat> format) {
  if (is_pinned.value_or(false)) {
    TORCH_CHECK(!device.is_host_full, "CUDA error: out of memory");
    device.memory.push_back("pinned");
  }
  return at::detail::empty_cpu(size, dtype.value_or(c10::kFloat), false, format);
}

at::Tensor empty_on_device(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                           std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  device.memory.push_back(device.name());
  return over_memory_of(at::detail::empty_cpu(size, dtype.value_or(c10::kFloat), false, format), DEVICE);
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  TORCH_CHECK(non_blocking && self.nbytes() == source.nbytes());
  std::memcpy(self.storage().mutable_data(), source.storage().data(), self.nbytes());
  device.latest[device.current] = "copy " + std::to_string(device.num_copies++) + " " + device.name();
  device.notes.push_back(device.latest[device.current]);
  return self;
}

// While it is open, there is such a device.
class Pretence {
 public:
  Pretence() {
    const auto next_of_pool = device.next_of_pool;
    device = Device();
    device.next_of_pool = next_of_pool;
    // Never freed: events may outlive the pretence.
    static const auto* streams = new NotedStreams();
    before_ = registry().exchange(streams);
    on_host_.impl("empty.memory_format", empty_on_host);
    on_device_.impl("empty.memory_format", empty_on_device);
    on_device_.impl("copy_", copy_);
  }
  ~Pretence() { registry().store(before_); }

 private:
  static std::atomic<const c10::impl::DeviceGuardImplInterface*>& registry() {
    return c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::kCUDA)];
  }

  const c10::impl::DeviceGuardImplInterface* before_ = nullptr;
  torch::Library on_host_{torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__};
  torch::Library on_device_{torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__};
};

py::object moved(const py::object& tensor, c10::Device to) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(over_memory_of(THPVariable_Unpack(tensor.ptr()), to)));
}

}  // namespace

PYBIND11_MODULE(MEMFIT_MODULE, module) {
  py::class_<Pretence>(module, "Pretence").def(py::init<>());
  module.def("on_device", [](const py::object& tensor) { return moved(tensor, DEVICE); });
  module.def("on_host", [](const py::object& tensor) { return moved(tensor, c10::Device(c10::kCPU)); });
  module.def("taken_notes", [] { return std::exchange(device.notes, {}); });
  module.def("taken_memory", [] { return std::exchange(device.memory, {}); });
  module.def("use_stream", [](size_t number) { device.current = number; });
  module.def("break_device", [] { device.is_broken = true; });
  module.def("fill_host", [] { device.is_host_full = true; });
}
