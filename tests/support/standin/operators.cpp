// The device as torch sees it: guard, hooks, generators, and every operator by the CPU's kernel, put into the stream.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <atomic>
#include <torch/library.h>
#include "streams.h"

namespace standin {
int64_t waits_counted();
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
std::atomic<int64_t> later{0}, at_once{0}, fills{0};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kDevice;
  c10::DeviceType type() const override { return kDevice; }
  Device exchangeDevice(Device d) const override { auto old = getDevice(); set_device(d.index()); return old; }
  Device getDevice() const override { return Device(kDevice, current_device()); }
  void setDevice(Device d) const override { set_device(d.index()); }
  void uncheckedSetDevice(Device d) const noexcept override { if (d.index() < device_count()) set_device(d.index()); }
  Stream getStream(Device d) const override { return current_stream(d.index()); }
  Stream getDefaultStream(Device d) const override { return Stream(Stream::DEFAULT, d); }
  Stream getStreamFromGlobalPool(Device d, bool = false) const override { return new_stream(d.index()); }
  Stream getNewStream(Device d, int = 0) const override { return new_stream(d.index()); }
  Stream exchangeStream(Stream s) const override { auto old = current_stream(s.device_index()); exchange_stream(s); return old; }
  DeviceIndex deviceCount() const noexcept override { return DeviceIndex(device_count()); }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<MomentPtr*>(event); }
  void record(void** event, const Stream& s, DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new MomentPtr;
    *static_cast<MomentPtr*>(*event) = standin::record(s);
  }
  void block(void* event, const Stream& s) const override { if (event) standin::block(s, *static_cast<MomentPtr*>(event)); }
  bool queryEvent(void* event) const override { return !event || (*static_cast<MomentPtr*>(event))->is_reached(); }
  void synchronizeEvent(void* event) const override { if (event) { count_wait(); (*static_cast<MomentPtr*>(event))->wait(); } }
  bool queryStream(const Stream& s) const override { return is_idle(s); }
  void synchronizeStream(const Stream& s) const override { synchronize(s); }
  void synchronizeDevice(DeviceIndex i) const override { synchronize_device(i); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& s) const override {
    if (auto held = block_of(data); held && held->stream != s) held->used_on.push_back(s);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// A device has random numbers of its own. They are the CPU's for the same seed, so that bits can be compared.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(DeviceIndex index)
      : c10::GeneratorImpl(Device(kDevice, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(at::detail::createCPUGenerator()) {}
  at::Generator inner;
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "no offsets"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "no offsets"); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { auto* made = new Generator(device().index()); made->inner = inner.clone(); return made; }
};
at::Generator& default_generator(DeviceIndex index) {
  static auto* all = new std::vector<at::Generator>;
  static std::mutex mutex;
  std::unique_lock<std::mutex> lock(mutex);
  while (int(all->size()) < device_count()) all->push_back(at::make_generator<Generator>(DeviceIndex(all->size())));
  return (*all)[index < 0 ? current_device() : index];
}

// Within its life, the CPU's default generator goes on from where the device's is.
class Drawing {
 public:
  explicit Drawing(DeviceIndex index) : lock_(mutex()), host_(at::detail::getDefaultCPUGenerator()), own_(default_generator(index)) {
    kept_ = host_.get_state();
    host_.set_state(own_.get_state());
  }
  ~Drawing() { own_.set_state(host_.get_state()); host_.set_state(kept_); }
 private:
  static std::mutex& mutex() { static auto* one = new std::mutex; return *one; }
  std::unique_lock<std::mutex> lock_;
  at::Generator host_, own_;
  at::Tensor kept_;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return is_used(); }
  void init() const override { refuse_after_fork(); }
  DeviceIndex deviceCount() const override { return DeviceIndex(device_count()); }
  DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(DeviceIndex i) const override { set_device(i); }
  DeviceIndex exchangeDevice(DeviceIndex i) const override { auto old = current_device(); set_device(i); return old; }
  DeviceIndex maybeExchangeDevice(DeviceIndex i) const override { return i < 0 ? current_device() : exchangeDevice(i); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_memory(); }
  const at::Generator& getDefaultGenerator(DeviceIndex i) const override { return default_generator(i); }
  at::Generator getNewGenerator(DeviceIndex i) const override { return at::make_generator<Generator>(i < 0 ? current_device() : i); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto fresh = memory()->allocate(nbytes);
    synchronize(current_stream(storage.device().index()));
    memcpy(fresh.get(), storage.data(), std::min(nbytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(nbytes);
  }
};

at::Tensor like(const at::Tensor& tensor, DeviceIndex index) {
  c10::DeviceGuard guard(Device(kDevice, index));
  return at::detail::empty_strided_generic(tensor.sizes(), tensor.strides(), memory(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), tensor.scalar_type());
}

c10::IValue mapped(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& made) {
  if (value.isTensor()) return is_ours(value.toTensor()) ? c10::IValue(made(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (at::Tensor tensor : value.toTensorList()) list.push_back(is_ours(tensor) ? made(tensor) : tensor);
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (std::optional<at::Tensor> tensor : value.toOptionalTensorList())
      list.push_back(tensor && is_ours(*tensor) ? std::optional<at::Tensor>(made(*tensor)) : tensor);
    return list;
  }
  if (value.isDevice() && value.toDevice().type() == kDevice) return Device(c10::kCPU);
  if (value.isGenerator() && value.toGenerator().device().type() == kDevice)
    return static_cast<Generator*>(value.toGenerator().unsafeGetGeneratorImpl())->inner;
  return value;
}

DeviceIndex device_of(const std::vector<c10::IValue>& arguments) {
  for (auto& value : arguments) {
    if (value.isTensor() && is_ours(value.toTensor())) return value.toTensor().device().index();
    if (value.isTensorList()) for (at::Tensor tensor : value.toTensorList()) if (is_ours(tensor)) return tensor.device().index();
    if (value.isDevice() && value.toDevice().type() == kDevice && value.toDevice().has_index()) return value.toDevice().index();
  }
  return current_device();
}

bool is_seeded(const c10::OperatorHandle& op) { return op.hasTag(at::Tag::nondeterministic_seeded); }

bool gives_tensors_of_known_shape(const c10::OperatorHandle& op) {
  for (auto tag : op.getTags())
    if (tag == at::Tag::nondeterministic_seeded || tag == at::Tag::dynamic_output_shape || tag == at::Tag::data_dependent_output) return false;
  for (auto& returned : op.schema().returns())
    if (!returned.alias_info() && returned.type()->kind() != c10::TypeKind::TensorType) return false;
  return true;
}

// The results' shapes, by the operator on tensors without memory; nothing when only the kernel can tell.
std::optional<std::vector<at::Tensor>> shapes(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments, const std::vector<int>& fresh) {
  if (!gives_tensors_of_known_shape(op)) return std::nullopt;
  auto meta = [](const at::Tensor& t) { return at::empty_strided(t.sizes(), t.strides(), t.options().device(c10::kMeta)); };
  try {
    torch::jit::Stack stack;
    for (auto& value : arguments) {
      if (value.isTensor() && value.toTensor().defined()) { stack.emplace_back(meta(value.toTensor())); continue; }
      auto one = mapped(value, meta);
      stack.push_back(one.isDevice() ? c10::IValue(Device(c10::kMeta)) : one);
    }
    auto before = stack;
    op.callBoxed(stack);
    for (size_t at = 0; at < arguments.size(); at++)
      if (op.schema().arguments()[at].alias_info() && arguments[at].isTensor() && is_ours(arguments[at].toTensor()) &&
          before[at].toTensor().sizes() != arguments[at].toTensor().sizes()) return std::nullopt;
    std::vector<at::Tensor> found;
    for (auto at : fresh) found.push_back(stack[at].toTensor());
    return found;
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

// What an operator that returns its own arguments returns.
c10::IValue written(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments, size_t which) {
  size_t at = 0;
  for (size_t i = 0; i < arguments.size(); i++)
    if (op.schema().arguments()[i].alias_info() && at++ == which) return arguments[i];
  return arguments[0];
}

void by_the_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  auto arguments = torch::jit::last(*stack, count).vec();
  const auto device = device_of(arguments);
  const auto stream = current_stream(device);
  if (op.schema().name() == "aten::fill_") fills++;
  std::vector<int> fresh;
  for (size_t i = 0; i < schema.returns().size(); i++) if (!schema.returns()[i].alias_info()) fresh.push_back(int(i));
  auto known = shapes(op, arguments, fresh);
  torch::jit::Stack hosts;
  for (auto& value : arguments) {
    bool others = value.isTensor() && value.toTensor().defined() && !is_ours(value.toTensor());
    TORCH_CHECK(!others || value.toTensor().dim() == 0 || value.toTensor().device().is_meta() || !schema.name().starts_with("aten::") ,
                schema.name(), ": all tensors are expected on one device, and one of them is on ", others ? value.toTensor().device().str() : "");
    hosts.push_back(others ? c10::IValue(value.toTensor().clone()) : mapped(value, on_host));
  }
  std::vector<c10::IValue> results;
  size_t own = 0, made = 0;
  if (known) {
    later++;
    std::vector<at::Tensor> outs, into;
    for (auto& shape : *known) {
      outs.push_back(shape.defined() ? like(shape, device) : at::Tensor());
      into.push_back(shape.defined() ? on_host(outs.back()) : at::Tensor());
    }
    put(stream, [op, hosts, into, fresh]() mutable {
      at::AutoDispatchBelowAutograd below;
      op.callBoxed(hosts);
      for (size_t i = 0; i < into.size(); i++) {
        auto made = hosts[fresh[i]].toTensor();
        if (into[i].defined() && made.numel()) into[i].copy_(made);  // some kernels leave out what nobody will read
      }
    });
    for (auto& returned : schema.returns()) results.push_back(returned.alias_info() ? written(op, arguments, own++) : c10::IValue(outs[made++]));
  } else {
    at_once++;
    synchronize(stream);
    auto handed = hosts;
    if (is_seeded(op)) { Drawing drawing(device); op.callBoxed(hosts); } else { op.callBoxed(hosts); }
    for (size_t i = 0; i < count; i++) {
      auto& argument = schema.arguments()[i];
      if (!argument.alias_info() || !argument.alias_info()->isWrite() || !arguments[i].isTensor() || !is_ours(arguments[i].toTensor())) continue;
      auto there = arguments[i].toTensor(), here = handed[i].toTensor();
      if (here.sizes() == there.sizes() && (!here.numel() || here.data_ptr() == there.data_ptr())) continue;
      at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(there.storage(), here.numel() * here.element_size());
      there.unsafeGetTensorImpl()->set_sizes_contiguous(here.sizes());
      on_host(there).copy_(here);
    }
    auto wrapped = [&](const at::Tensor& here) { auto out = like(here, device); on_host(out).copy_(here); return out; };
    for (size_t i = 0; i < schema.returns().size(); i++) {
      if (schema.returns()[i].alias_info()) { results.push_back(written(op, arguments, own++)); continue; }
      auto value = hosts[i];
      if (value.isTensor() && value.toTensor().defined()) value = wrapped(value.toTensor());
      else if (value.isTensorList()) { c10::List<at::Tensor> list; for (at::Tensor one : value.toTensorList()) list.push_back(wrapped(one)); value = list; }
      results.push_back(value);
    }
  }
  torch::jit::drop(*stack, count);
  for (auto& result : results) stack->push_back(std::move(result));
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_the_host>()); }

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device && device->has_index() ? *device : Device(kDevice, current_device()));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device && device->has_index() ? *device : Device(kDevice, current_device()));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), memory(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}
at::Tensor copy_from(const at::Tensor& source, const at::Tensor& into, bool non_blocking) {
  auto pinned = [](const at::Tensor& host) { auto held = block_of(host.storage().data_ptr()); return held && held->pinned; };
  auto stream = current_stream((is_ours(into) ? into : source).device().index());
  at::Tensor from, to;
  bool waits = false;
  if (is_ours(source) && is_ours(into)) { from = on_host(source); to = on_host(into); }
  else if (is_ours(into)) {
    bool direct = non_blocking && pinned(source);
    from = direct ? on_host(source) : source.clone();
    to = on_host(into);
    waits = !non_blocking;
  } else {
    bool direct = non_blocking && pinned(into);
    from = on_host(source);
    to = direct ? on_host(into) : into;
    waits = !direct;
  }
  if (waits) {
    synchronize(stream);
    at::AutoDispatchBelowAutograd below;
    to.copy_(from);
  } else {
    later++;
    put(stream, [from, to]() mutable { at::AutoDispatchBelowAutograd below; to.copy_(from); });
  }
  return into;
}
at::Scalar item(const at::Tensor& tensor) { synchronize(current_stream(tensor.device().index())); return on_host(tensor).item(); }
at::Tensor& set_storage(at::Tensor& t, at::Storage s, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(t, s, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
at::Tensor as_strided(const at::Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}
at::Tensor view(const at::Tensor& t, c10::SymIntArrayRef size) { return at::native::view(t, C10_AS_INTARRAYREF_SLOW(size)); }
at::Tensor reshape_alias(const at::Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
void record_stream(at::Tensor& t, Stream s) { Guard().recordDataPtrOnStream(t.storage().data_ptr(), s); }

// Torch asks devices of this kind for convolutions under names of their own.
void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  by_the_host(c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", ""), stack);
}
void convolution_backward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  auto arguments = torch::jit::pop(*stack, 10);
  auto weight = arguments[2].toTensor();
  int64_t channels = arguments[6].toBool() ? weight.size(1) * arguments[8].toInt() : weight.size(0);
  arguments.insert(arguments.begin() + 3, c10::IValue(std::vector<int64_t>{channels}));
  for (auto& argument : arguments) stack->push_back(std::move(argument));
  by_the_host(c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", ""), stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_local_scalar_dense", item);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("record_stream", record_stream);
}

}  // namespace

Counts counts() { return {later, at_once, waits_counted(), fills}; }
void seed(int index, uint64_t number) { default_generator(DeviceIndex(index)).set_current_seed(number); }
at::Tensor random_state(int index) { return default_generator(DeviceIndex(index)).get_state(); }
void set_random_state(int index, const at::Tensor& state) { default_generator(DeviceIndex(index)).set_state(state); }
void register_hooks() { at::RegisterPrivateUse1HooksInterface(new Hooks); }

// Operators that the CPU has a kernel of its own for, and other devices a decomposition, which has other bits.
void prefer_kernels_of_the_host() {
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto found = c10::Dispatcher::singleton().findOp(name);
    if (!found || !found->hasKernelForDispatchKey(c10::DispatchKey::CPU) || found->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) continue;
    if (!found->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) &&
        !found->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional)) continue;
    auto plain = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library->impl(plain.c_str(), torch::CppFunction::makeFromBoxedFunction<&by_the_host>());
  }
}

}  // namespace standin
