// An accelerator made of host memory: torch's PrivateUse1 device with two indices, streams and events, for tests without a GPU.
//
// Memory is the host's, and every operation that is not written here runs on the CPU at once.  So
// values are right at any time; what the runtime forgets to move, torch refuses, as it would on a GPU.  What a GPU would do at any
// time unless it is told to wait, is checked by clocks.h at every access to memory, where that is switched on.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include "clocks.h"

#include <atomic>
#include <chrono>
#include <cstring>

namespace {

constexpr auto kTwin = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 2;

thread_local c10::DeviceIndex current = 0;
thread_local c10::StreamId streams[kDevices] = {};
clocks::Clocks& watch = *new clocks::Clocks();  // never destroyed: memory is freed until the very end
std::atomic<c10::StreamId> made{0};
std::atomic<int64_t> waits{0};  // how often the host read what a device has computed

clocks::Name name_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }

struct Moment {
  double time;
  clocks::Clock clock;
};

void touch(const at::Tensor& tensor, bool writes, const std::string& what) {
  if (!tensor.defined() || !tensor.is_privateuseone() || tensor.numel() == 0) return;
  const auto index = tensor.device().index();
  watch.access(tensor.storage().data(), {index, streams[index]}, writes, what);
}

double now() {
  using namespace std::chrono;
  return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kTwin; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kTwin, current}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "there is no device ", device);
    if (device.index() >= 0) current = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { if (device.index() >= 0) current = device.index(); }
  c10::Stream getStream(c10::Device device) const override {
    auto index = device.has_index() ? device.index() : current;
    return c10::Stream(c10::Stream::UNSAFE, {kTwin, index}, streams[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::UNSAFE, device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    auto index = device.has_index() ? device.index() : current;
    return c10::Stream(c10::Stream::UNSAFE, {kTwin, index}, ++made);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    streams[stream.device_index()] = stream.id();
    return before;
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Moment;
    *static_cast<Moment*>(*event) = {now(), watch.record(name_of(stream))};
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Moment*>(event); }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    return static_cast<Moment*>(second)->time - static_cast<Moment*>(first)->time;
  }
  void block(void* event, const c10::Stream& stream) const override {
    watch.wait(name_of(stream), static_cast<Moment*>(event)->clock);
  }
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
};

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = c10::alloc_cpu(bytes);
    if (data) watch.allocate(data, {current, streams[current]});
    return {data, data, &release, {kTwin, current}};
  }
  static void release(void* data) {
    watch.free(data);
    c10::free_cpu(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t count) const override { std::memcpy(to, from, count); }
};

Memory memory;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current = index; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    auto before = current;
    if (index >= 0) current = index;
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  bool isPinnedPtr(const void*) const override { return false; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto impl = storage.unsafeGetStorageImpl();
    c10::DeviceIndex before = exchangeDevice(storage.device().index());
    auto data = memory.allocate(bytes);
    std::memcpy(data.get(), storage.data(), std::min(bytes, storage.nbytes()));
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(bytes);
    current = before;
  }
};

struct OnDevice {
  c10::DeviceIndex before = current;
  explicit OnDevice(std::optional<at::Device> device) { if (device && device->has_index()) current = device->index(); }
  ~OnDevice() { current = before; }
};

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  OnDevice guard(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  OnDevice guard(device);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

// A CPU tensor over the same memory.
at::Tensor host(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  auto keep = tensor;
  auto view = at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(), [keep](void*) {},
                            at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU));
  if (tensor.is_conj()) view._set_conj(true);
  if (tensor.is_neg()) view._set_neg(true);
  return view;
}

void carry(const at::Tensor& from, const at::Tensor& to) {
  const bool between = from.is_privateuseone() && to.is_privateuseone() && from.device() != to.device();
  const auto one = from.device().index(), other = to.device().index();
  if (between) watch.meet({one, streams[one]}, {other, streams[other]});
  if (from.is_privateuseone() && to.is_cpu()) ++waits;
  touch(from, false, "copy");
  touch(to, true, "copy");
  if (between) watch.meet({one, streams[one]}, {other, streams[other]});
  host(to).copy_(host(from));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  carry(from, to);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  at::native::resize_(to, from.sizes(), std::nullopt);
  carry(from, to);
  return to;
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  ++waits;
  touch(tensor, false, "item");
  return host(tensor).item();
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  std::optional<int64_t> place = std::nullopt;
  if (offset) place = offset->expect_int();
  return at::cpu::as_strided(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), place);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::cpu::set_(self, storage, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

void record_stream(at::Tensor& tensor, c10::Stream stream) { watch.keep(tensor.storage().data(), name_of(stream)); }

// What a GPU would refuse: tensors of two devices in one operation, but for single numbers on the CPU, and indices.
void check_devices(const c10::OperatorHandle& operation, const torch::jit::Stack& stack) {
  const auto& name = operation.schema().name();
  if (name.rfind("aten::index", 0) == 0 || name == "aten::_index_put_impl_" || name == "aten::record_stream") return;
  std::optional<c10::Device> found;
  const auto count = operation.schema().arguments().size();
  auto look = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0)) return;
    TORCH_CHECK(!found || *found == tensor.device(), "Expected all tensors to be on the same device, but found at least two devices, ",
                *found, " and ", tensor.device(), "! (in ", name, ")");
    found = tensor.device();
  };
  for (size_t i = stack.size() - count; i < stack.size(); ++i) {
    if (stack[i].isTensor()) look(stack[i].toTensor());
    if (stack[i].isTensorList()) for (const at::Tensor& tensor : stack[i].toTensorVector()) look(tensor);
  }
}

at::Tensor to_twin(const at::Tensor& tensor, c10::DeviceIndex index, const std::string& what) {
  if (!tensor.defined() || !tensor.is_cpu()) return tensor;
  const auto options = tensor.options().device(c10::Device(kTwin, index));
  const bool dense = tensor.is_non_overlapping_and_dense();
  auto moved = dense ? at::empty_strided(tensor.sizes(), tensor.strides(), options) : at::empty(tensor.sizes(), options);
  touch(moved, true, what);
  host(moved).copy_(tensor);
  return moved;
}

// Runs an operation on the CPU, on the same memory.  What its schema says it writes may be resized, so that is copied there and back;
// what it writes without saying so (the running statistics of batch norm) is written in place.
void fall_back(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  check_devices(operation, *stack);
  const auto& schema = operation.schema();
  const auto& what = schema.name();
  const bool norm = what == "aten::native_batch_norm" && (*stack)[stack->size() - 3].toBool();  // in training
  const auto count = schema.arguments().size(), first = stack->size() - count;
  auto index = current;
  std::vector<std::pair<at::Tensor, at::Tensor>> written;
  std::vector<c10::IValue> given(stack->begin() + first, stack->end());
  auto lower = [&](const at::Tensor& tensor, bool writes, bool hidden = false) {
    if (!tensor.defined() || !tensor.is_privateuseone()) return tensor;
    index = tensor.device().index();
    touch(tensor, writes || hidden, what);
    if (!writes) return host(tensor);
    auto copy = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
    copy.copy_(host(tensor));
    written.emplace_back(tensor, copy);
    return copy;
  };
  for (size_t i = 0; i < count; ++i) {
    auto& value = (*stack)[first + i];
    const auto* alias = schema.arguments()[i].alias_info();
    const bool writes = alias && alias->isWrite();
    if (value.isTensor()) {
      value = lower(value.toTensor(), writes, norm && schema.arguments()[i].name().rfind("running", 0) == 0);
    } else if (value.isTensorList() || value.isOptionalTensorList()) {
      if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(lower(tensor, writes));
        value = list;
      } else {
        c10::List<std::optional<at::Tensor>> list;
        for (const std::optional<at::Tensor>& one : value.toOptionalTensorList()) {
          list.push_back(one ? std::optional<at::Tensor>(lower(*one, writes)) : std::nullopt);
        }
        value = list;
      }
    } else if (value.isDevice() && value.toDevice().type() == kTwin) {
      if (value.toDevice().has_index()) index = value.toDevice().index();
      value = c10::Device(at::kCPU);
    }
  }
  operation.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (auto& [original, copy] : written) {
    if (original.sizes() != copy.sizes()) at::native::resize_(original, copy.sizes(), std::nullopt);
    host(original).copy_(copy);
  }
  const auto results = schema.returns().size();
  for (size_t i = 0; i < results; ++i) {
    auto& value = (*stack)[stack->size() - results + i];
    const auto* alias = schema.returns()[i].alias_info();
    if (alias && alias->isWrite()) {
      for (size_t k = 0; k < count; ++k) {
        const auto* other = schema.arguments()[k].alias_info();
        if (other && *other == *alias) value = given[k];
      }
    } else if (value.isTensor()) {
      value = to_twin(value.toTensor(), index, what);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(to_twin(tensor, index, what));
      value = list;
    }
  }
}

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
                       c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  const bool biased = bias && bias->defined();
  for (const auto& tensor : {input, weight, biased ? *bias : input}) touch(tensor, false, "convolution");
  auto result = at::convolution_symint(host(input), host(weight), biased ? std::optional(host(*bias)) : std::nullopt, stride, padding,
                                       dilation, transposed, output_padding, groups);
  return to_twin(result, input.device().index(), "convolution");
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups,
    std::array<bool, 3> mask) {
  for (const auto& tensor : {gradient, input, weight}) touch(tensor, false, "convolution_backward");
  const c10::SymInt channels = weight.sym_size(transposed ? 1 : 0) * (transposed ? groups : c10::SymInt(1));
  auto [one, two, three] = at::convolution_backward_symint(host(gradient), host(input), host(weight), c10::SymIntArrayRef(&channels, 1),
                                                           stride, padding, dilation, transposed, output_padding, groups, mask);
  const auto index = input.device().index();
  const std::string what = "convolution_backward";
  return {to_twin(one, index, what), to_twin(two, index, what), to_twin(three, index, what)};
}

}  // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("record_stream", record_stream);
  library.impl("convolution_overrideable", convolution);
  library.impl("convolution_backward_overrideable", convolution_backward);
}

void check(bool on) { watch.check(on); }

std::vector<std::string> faults() { return watch.faults(); }

int64_t host_reads() { return waits.exchange(0); }

TORCH_LIBRARY(twin, library) {
  library.def("host_reads() -> int", host_reads);
  library.def("check(bool on) -> ()", check);
  library.def("faults() -> str[]", faults);
}

namespace {
struct Start {
  Start() {
    c10::SetAllocator(kTwin, &memory);
    at::RegisterPrivateUse1HooksInterface(new Hooks());
  }
} start;
}  // namespace
