// Every stream is a thread with a queue. What is put there is done later, after a random pause: a missing wait is a
// wrong value. Everything static is leaked: a thread that outlives main must find it.
#include "streams.h"
#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <thread>
#include <unistd.h>

namespace standin {
namespace {

struct Lane {
  std::mutex mutex;
  std::condition_variable some, none;
  std::deque<Task> tasks;
  bool busy = false;
};
struct Lanes {
  std::mutex mutex;
  std::map<std::pair<int, c10::StreamId>, Lane*> by_stream;
  std::map<int, std::string> trouble;   // by device, until it is told
};
Lanes& lanes() { static auto* all = new Lanes; return *all; }

std::atomic<int64_t> next_stream{1};
std::atomic<int64_t> waits{0};
std::atomic<pid_t> used_by{0};
thread_local c10::DeviceIndex device_now = 0;
thread_local std::map<int, c10::StreamId> stream_now;

void work(Lane& lane, int device, uint64_t seed) {
  std::mt19937_64 dice(seed);
  const int longest = setting("STANDIN_PAUSE_US", 0);
  for (;;) {
    Task task;
    {
      std::unique_lock<std::mutex> lock(lane.mutex);
      lane.some.wait(lock, [&] { return !lane.tasks.empty(); });
      task = std::move(lane.tasks.front());
      lane.tasks.pop_front();
      lane.busy = true;
    }
    if (longest && dice() % 4 == 0) usleep(dice() % longest);
    try {
      task();
    } catch (const c10::Error& error) {
      std::unique_lock<std::mutex> lock(lanes().mutex);
      lanes().trouble.emplace(device, error.what_without_backtrace());
    } catch (const std::exception& error) {
      std::unique_lock<std::mutex> lock(lanes().mutex);
      lanes().trouble.emplace(device, error.what());
    }
    task = nullptr;
    std::unique_lock<std::mutex> lock(lane.mutex);
    lane.busy = false;
    if (lane.tasks.empty()) lane.none.notify_all();
  }
}

Lane& lane_of(const c10::Stream& stream) {
  refuse_after_fork();
  used_by = getpid();
  std::unique_lock<std::mutex> lock(lanes().mutex);
  auto& lane = lanes().by_stream[{stream.device_index(), stream.id()}];
  if (!lane) {
    auto* made = lane = new Lane;
    uint64_t seed = setting("STANDIN_SEED", 0) * 1000003ull + stream.device_index() * 1009 + stream.id();
    std::thread([made, device = int(stream.device_index()), seed] { work(*made, device, seed); }).detach();
  }
  return *lane;
}

void drain(Lane& lane) {
  std::unique_lock<std::mutex> lock(lane.mutex);
  lane.none.wait(lock, [&] { return lane.tasks.empty() && !lane.busy; });
}

void raise_trouble(int device) {
  std::string words;
  {
    std::unique_lock<std::mutex> lock(lanes().mutex);
    auto found = lanes().trouble.find(device);
    if (found == lanes().trouble.end()) return;
    words = found->second;
    lanes().trouble.erase(found);
  }
  TORCH_CHECK(false, "standin error: ", words);
}

struct Holder { BlockPtr block; };

void release(void* context) {
  auto* holder = static_cast<Holder*>(context);
  BlockPtr block = holder->block;
  delete holder;
  if (!block->nbytes || block->pinned || used_by != getpid()) return;
  std::vector<MomentPtr> moments;
  for (auto& stream : block->used_on) moments.push_back(record(stream));
  put(block->stream, [block, moments] {
    for (auto& moment : moments) moment->wait();
    memset(block->data, 0x7F, block->nbytes);
  });
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    auto block = std::make_shared<Block>(current_stream(device_now));
    block->nbytes = nbytes;
    if (nbytes) {
      TORCH_CHECK(!posix_memalign(&block->data, 512, nbytes), "out of memory");
      memset(block->data, 0x7F, nbytes);
    }
    return {block->data, new Holder{block}, &release, c10::Device(kDevice, device_now)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* into, const void* from, std::size_t nbytes) const override { memcpy(into, from, nbytes); }
};

struct Pinned {
  std::mutex mutex;
  std::map<const char*, size_t> spans;
};
Pinned& pinned() { static auto* all = new Pinned; return *all; }

void release_pinned(void* context) {
  auto* holder = static_cast<Holder*>(context);
  { std::unique_lock<std::mutex> lock(pinned().mutex); pinned().spans.erase(static_cast<char*>(holder->block->data)); }
  delete holder;
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    auto block = std::make_shared<Block>(c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, 0), 0));
    block->nbytes = nbytes;
    block->pinned = true;
    if (nbytes) {
      TORCH_CHECK(!posix_memalign(&block->data, 4096, nbytes), "out of memory");
      std::unique_lock<std::mutex> lock(pinned().mutex);
      pinned().spans[static_cast<char*>(block->data)] = nbytes;
    }
    return {block->data, new Holder{block}, &release_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* into, const void* from, std::size_t nbytes) const override { memcpy(into, from, nbytes); }
};

}  // namespace

void Moment::reached() { std::unique_lock<std::mutex> lock(mutex_); reached_ = true; changed_.notify_all(); }
void Moment::wait() { std::unique_lock<std::mutex> lock(mutex_); changed_.wait(lock, [&] { return reached_; }); }
bool Moment::is_reached() { std::unique_lock<std::mutex> lock(mutex_); return reached_; }

int setting(const char* name, int otherwise) { const char* text = getenv(name); return text ? atoi(text) : otherwise; }
int device_count() { return setting("STANDIN_DEVICES", 4); }
c10::DeviceIndex current_device() { return device_now; }
void set_device(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < device_count(), "there are ", device_count(), " devices, and none is ", int(index));
  device_now = index;
}
c10::Stream current_stream(c10::DeviceIndex index) {
  auto device = index < 0 ? device_now : index;
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, device), stream_now[device]);
}
c10::Stream new_stream(c10::DeviceIndex index) {
  auto device = index < 0 ? device_now : index;
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, device), next_stream++);
}
void exchange_stream(c10::Stream stream) { stream_now[stream.device_index()] = stream.id(); }

void put(const c10::Stream& stream, Task task) {
  auto& lane = lane_of(stream);
  std::unique_lock<std::mutex> lock(lane.mutex);
  lane.tasks.push_back(std::move(task));
  lane.some.notify_one();
}
MomentPtr record(const c10::Stream& stream) {
  auto moment = std::make_shared<Moment>();
  put(stream, [moment] { moment->reached(); });
  return moment;
}
void block(const c10::Stream& stream, MomentPtr moment) { put(stream, [moment] { moment->wait(); }); }
void synchronize(const c10::Stream& stream) { count_wait(); drain(lane_of(stream)); raise_trouble(stream.device_index()); }
void synchronize_device(c10::DeviceIndex index) {
  count_wait();
  std::vector<Lane*> all;
  { std::unique_lock<std::mutex> lock(lanes().mutex); for (auto& [key, lane] : lanes().by_stream) if (key.first == index) all.push_back(lane); }
  for (auto* lane : all) drain(*lane);
  raise_trouble(index);
}
bool is_idle(const c10::Stream& stream) {
  auto& lane = lane_of(stream);
  std::unique_lock<std::mutex> lock(lane.mutex);
  return lane.tasks.empty() && !lane.busy;
}
bool is_used() { return used_by != 0; }
void refuse_after_fork() {
  TORCH_CHECK(used_by == 0 || used_by == getpid(),
              "Cannot re-initialize the stand-in device in a forked process: it was used before the fork");
}

c10::Allocator* memory() { static auto* one = new Memory; return one; }
c10::Allocator* pinned_memory() { static auto* one = new PinnedMemory; return one; }
bool is_pinned(const void* data) {
  std::unique_lock<std::mutex> lock(pinned().mutex);
  auto after = pinned().spans.upper_bound(static_cast<const char*>(data));
  if (after == pinned().spans.begin()) return false;
  auto& [start, nbytes] = *std::prev(after);
  return static_cast<const char*>(data) < start + nbytes;
}
BlockPtr block_of(const c10::DataPtr& data) {
  bool known = data.get_deleter() == &release || data.get_deleter() == &release_pinned;
  return known ? static_cast<Holder*>(data.get_context())->block : nullptr;
}

at::Tensor on_host(const at::Tensor& tensor) {
  auto storage = tensor.storage();
  auto held = block_of(storage.data_ptr());
  TORCH_INTERNAL_ASSERT(held, "memory that is not the stand-in's");
  c10::DataPtr view(storage.mutable_data(), new BlockPtr(held), [](void* it) { delete static_cast<BlockPtr*>(it); },
                    c10::Device(c10::kCPU));
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(view), c10::GetCPUAllocator(), true),
      c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return made;
}

void count_wait() { waits++; }
int64_t waits_counted() { return waits; }

}  // namespace standin
