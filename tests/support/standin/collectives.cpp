// Collectives as NCCL has them, by a Gloo group beneath: tensors of one device only, issued to one stream of the group's
// own, which first waits for the caller's; the caller's waits for it in `wait`, and the host does not.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <c10/core/StreamGuard.h>
#include "streams.h"

namespace standin {
void seed(int index, uint64_t number);
at::Tensor random_state(int index);
void set_random_state(int index, const at::Tensor& state);
void register_hooks();
void prefer_kernels_of_the_host();
namespace {

using Tensors = std::vector<at::Tensor>;

class StreamWork final : public c10d::Work {
 public:
  StreamWork(c10::Stream stream, c10d::OpType kind, Tensors results)
      : c10d::Work(-1, kind), moment_(record(stream)), stream_(stream), results_(std::move(results)) {}
  bool isCompleted() override { return moment_->is_reached(); }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { synchronize(); return true; }
  void synchronize() override { block(current_stream(stream_.device_index()), moment_); }
  Tensors result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                           std::vector<c10::Device>{stream_.device()});
    c10::StreamGuard guard(stream_);
    future->markCompleted(c10::IValue(results_));
    return future;
  }

 private:
  MomentPtr moment_;
  c10::Stream stream_;
  Tensors results_;
};

class Collectives final : public c10d::Backend {
 public:
  explicit Collectives(c10::intrusive_ptr<c10d::Backend> inner) : c10d::Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}
  const std::string getBackendName() const override { return "standin_ccl"; }
  void setTimeout(std::chrono::milliseconds timeout) override { inner_->setTimeout(timeout); }

  c10::intrusive_ptr<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto hosts = on_hosts(tensors);
    return issue(tensors, c10d::OpType::ALLREDUCE, [this, hosts, options]() mutable { inner_->allreduce(hosts, options)->wait(); });
  }
  c10::intrusive_ptr<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto hosts = on_hosts(tensors);
    return issue(tensors, c10d::OpType::BROADCAST, [this, hosts, options]() mutable { inner_->broadcast(hosts, options)->wait(); });
  }
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    std::vector<Tensors> into;
    for (auto& one : out) into.push_back(on_hosts(one));
    auto from = on_hosts(in);
    return issue(in, c10d::OpType::ALLGATHER, [this, into, from, options]() mutable { inner_->allgather(into, from, options)->wait(); });
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) override {
    Tensors both{out, in};
    auto hosts = on_hosts(both);
    return issue(both, c10d::OpType::_ALLGATHER_BASE, [this, hosts, options]() mutable { inner_->_allgather_base(hosts[0], hosts[1], options)->wait(); });
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_split,
                                               std::vector<int64_t>& in_split, const c10d::AllToAllOptions& options) override {
    Tensors both{out, in};
    auto hosts = on_hosts(both);
    return issue(both, c10d::OpType::ALLTOALL_BASE, [this, hosts, out_split, in_split, options]() mutable {
      inner_->alltoall_base(hosts[0], hosts[1], out_split, in_split, options)->wait();
    });
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override { return inner_->barrier(options); }

 private:
  static Tensors on_hosts(const Tensors& tensors) {
    Tensors hosts;
    for (auto& tensor : tensors) {
      TORCH_CHECK(is_ours(tensor), "standin_ccl takes tensors of the stand-in device alone, not ", tensor.device());
      TORCH_CHECK(tensor.is_contiguous(), "standin_ccl takes contiguous tensors");
      hosts.push_back(on_host(tensor));
    }
    return hosts;
  }
  c10::intrusive_ptr<c10d::Work> issue(const Tensors& tensors, c10d::OpType kind, Task task) {
    auto index = tensors.at(0).device().index();
    TORCH_CHECK(index == current_device(), "standin_ccl was called in a thread whose current device is ", int(current_device()), ", with tensors of device ", int(index));
    if (!stream_) stream_ = new_stream(index);
    TORCH_CHECK(stream_->device_index() == index, "one group, one device");
    block(*stream_, record(current_stream(index)));
    put(*stream_, std::move(task));
    return c10::make_intrusive<StreamWork>(*stream_, kind, tensors);
  }
  c10::intrusive_ptr<c10d::Backend> inner_;
  std::optional<c10::Stream> stream_;
};

}  // namespace
}  // namespace standin

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace standin;
  register_hooks();
  prefer_kernels_of_the_host();
  m.def("device_count", device_count);
  m.def("current_device", [] { return int(current_device()); });
  m.def("set_device", [](int index) { set_device(c10::DeviceIndex(index)); });
  m.def("is_used", is_used);
  m.def("is_in_bad_fork", [] { try { refuse_after_fork(); return false; } catch (const std::exception&) { return true; } });
  m.def("seed", seed);
  m.def("random_state", random_state);
  m.def("set_random_state", set_random_state);
  m.def("synchronize", [] { synchronize_device(current_device()); }, pybind11::call_guard<pybind11::gil_scoped_release>());
  m.def("counts", [] { auto c = counts(); return pybind11::make_tuple(c.later, c.at_once, c.waits, c.fills); });
  m.def("collectives", [](c10::intrusive_ptr<c10d::Backend> inner) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Collectives>(std::move(inner));
  });
  m.def("raw_copy", [](const at::Tensor& into, const at::Tensor& from) {
    auto host = on_host(into); auto copy = from.clone();
    put(current_stream(into.device().index()), [host, copy]() mutable { host.copy_(copy); });
  });
}
