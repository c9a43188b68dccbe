// Streams, events and memory of the stand-in device. See __init__.py for what it promises.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>

namespace standin {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
using Task = std::function<void()>;

// A moment in a stream that others can wait for.
class Moment {
 public:
  void reached();
  void wait();
  bool is_reached();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
};
using MomentPtr = std::shared_ptr<Moment>;

// A piece of memory. It lives as long as a task or a tensor needs it; but as soon as no tensor does, the stream that it
// was allocated on overwrites it, as another tensor of that stream would on a device whose allocator keeps memory.
struct Block {
  void* data = nullptr;
  size_t nbytes = 0;
  c10::Stream stream;                 // that it was allocated on
  bool pinned = false;                // of the host; then the stream means nothing
  std::vector<c10::Stream> used_on;   // record_stream
  explicit Block(c10::Stream s) : stream(s) {}
  ~Block() { free(data); }
};
using BlockPtr = std::shared_ptr<Block>;

int setting(const char* name, int otherwise);
int device_count();
c10::DeviceIndex current_device();
void set_device(c10::DeviceIndex index);
c10::Stream current_stream(c10::DeviceIndex index);
c10::Stream new_stream(c10::DeviceIndex index);
void exchange_stream(c10::Stream stream);

void put(const c10::Stream& stream, Task task);      // to be done later, in order
MomentPtr record(const c10::Stream& stream);
void block(const c10::Stream& stream, MomentPtr moment);
void synchronize(const c10::Stream& stream);         // raises what failed on the device
void synchronize_device(c10::DeviceIndex index);
bool is_idle(const c10::Stream& stream);
bool is_used();                                      // whether this process has used the device
void refuse_after_fork();

c10::Allocator* memory();
c10::Allocator* pinned_memory();
bool is_pinned(const void* data);
BlockPtr block_of(const c10::DataPtr& data);         // nullptr for other memory

inline bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kDevice; }
// A CPU tensor of the same bytes, which keeps the block, and no tensor, alive.
at::Tensor on_host(const at::Tensor& tensor);

struct Counts { int64_t later = 0, at_once = 0, waits = 0, fills = 0; };
Counts counts();
void count_wait();

}  // namespace standin
