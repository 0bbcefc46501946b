// An accelerator that computes on the host: it shows a program's logic (which memory, which stream, which wait), not
// the numerics or the speed of a GPU.
//
// Its kernels are the CPU's, called on aliases of the device's memory, so bits must equal the CPU's. What differs from
// a CPU is what goes wrong on GPUs: every device has memory of its own, which is poisoned when it is allocated and
// freed; copies to pinned memory arrive only when the host waits for them; each wait of the host is reported; and
// vector clocks find accesses of two streams to the same memory that no event orders.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

constexpr int kDevices = 4;
constexpr int kStreams = 32; // per device; stream 0 is the default one
constexpr int kPoison = 0xFF; // NaN in every floating dtype, -1 in every integer
constexpr size_t kAlignment = 64; // the CPU allocator's, on which the rounding of some kernels depends
constexpr auto kEmulated = c10::DeviceType::PrivateUse1;

// ---- Time: one clock per stream and one for the host -----------------------------------------------------------

using Clock = std::array<uint64_t, kDevices * kStreams>;

struct Access { // of one operation to a range of bytes
  size_t begin, end;
  int stream;
  uint64_t tick;
  bool write;
  std::string operation;
};

struct Block { // one allocation on a device
  char* data;
  size_t size;
  int device, stream; // the stream that allocated it, after whose work it may be used again
  std::vector<Access> accesses;
  bool used_elsewhere = false; // record_stream was called
};

struct Pending { // a copy between a device and pinned memory that the host has not waited for
  int stream;
  uint64_t tick;
  Tensor host, values;
  bool to_host;
};

std::mutex lock;
Clock clocks[kDevices * kStreams];
Clock host_clock;
// Never destroyed: memory that is freed while the process ends still uses them.
auto& pending = *new std::vector<Pending>;
auto& freed = *new std::multimap<std::tuple<int, int, size_t>, Block*>;
auto& pinned = *new std::map<char*, size_t>;
int next_stream[kDevices];
bool hands_out_defaults = false; // how Python gets hold of the default generators

thread_local DeviceIndex current_device = 0;
thread_local int current_streams[kDevices];

// Called with the kind of each wait of the host, and with each race. They look at Python's stack, so no lock is held.
void (*report_wait)(const char*) = nullptr;
void (*report_race)(const char*) = nullptr;

void join(Clock& clock, const Clock& other) {
  for (size_t i = 0; i < clock.size(); i++) clock[i] = std::max(clock[i], other[i]);
}

int number(const Stream& stream) { return stream.device_index() * kStreams + static_cast<int>(stream.id()); }
int current(int device) { return device * kStreams + current_streams[device]; }
Stream stream_of(int number) {
  return Stream(Stream::UNSAFE, Device(kEmulated, static_cast<DeviceIndex>(number / kStreams)), number % kStreams);
}

// Start an operation: the host launches it, so it comes after everything that the host has waited for.
uint64_t launch(int stream) {
  join(clocks[stream], host_clock);
  return ++clocks[stream][stream];
}

std::string name_of(int stream) {
  return "stream " + std::to_string(stream % kStreams) + " of device " + std::to_string(stream / kStreams);
}

// Enter an access of the operation that a stream has launched last; return the race, or an empty string.
std::string enter(Block& block, size_t begin, size_t end, int stream, bool write, const std::string& operation) {
  const Clock& clock = clocks[stream];
  std::string race;
  auto overlaps = [&](const Access& a) { return a.begin < end && begin < a.end; };
  for (const Access& a : block.accesses) {
    if (overlaps(a) && (a.write || write) && clock[a.stream] < a.tick) {
      race = operation + " on " + name_of(stream) + (write ? " writes" : " reads") + " memory that " + a.operation +
          " on " + name_of(a.stream) + (a.write ? " writes" : " reads") + ", and no event orders them";
    }
  }
  // What lies inside the new range and before it in time says no more than the new entry does.
  auto replaced = [&](const Access& a) {
    return begin <= a.begin && a.end <= end && clock[a.stream] >= a.tick && (write || (!a.write && a.stream == stream));
  };
  auto& all = block.accesses;
  all.erase(std::remove_if(all.begin(), all.end(), replaced), all.end());
  all.push_back({begin, end, stream, clock[stream], write, operation});
  return race;
}

void tell(const std::string& race) {
  if (race.empty()) return;
  if (report_race) report_race(race.c_str());
}

// Complete the copies that the host has waited for by now.
void deliver() {
  std::vector<Pending> due;
  {
    std::lock_guard<std::mutex> guard(lock);
    auto is_due = [](const Pending& each) { return each.tick <= host_clock[each.stream]; };
    auto middle = std::stable_partition(pending.begin(), pending.end(), [&](auto& each) { return !is_due(each); });
    std::move(middle, pending.end(), std::back_inserter(due));
    pending.erase(middle, pending.end());
  }
  c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  for (Pending& each : due) {
    if (each.to_host) {
      each.host.copy_(each.values);
    } else if (std::memcmp(each.host.const_data_ptr(), each.values.const_data_ptr(), each.host.nbytes()) != 0) {
      tell("the host writes pinned memory that a copy on " + name_of(each.stream) + " still reads");
    }
  }
}

void wait_for(const Clock& clock, const char* kind) {
  if (report_wait && kind) report_wait(kind);
  {
    std::lock_guard<std::mutex> guard(lock);
    join(host_clock, clock);
  }
  deliver();
}

Clock clock_of(int stream) {
  std::lock_guard<std::mutex> guard(lock);
  return clocks[stream];
}

// ---- Memory ----------------------------------------------------------------------------------------------------

char* raw_memory(size_t size) {
  void* data = std::aligned_alloc(kAlignment, (size + kAlignment - 1) / kAlignment * kAlignment);
  TORCH_CHECK(data, "no memory left");
  std::memset(data, kPoison, size);
  return static_cast<char*>(data);
}

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  std::memset(block->data, kPoison, block->size);
  std::lock_guard<std::mutex> guard(lock);
  if (block->used_elsewhere) { // an allocator would wait for those streams before it used the memory again
    std::free(block->data);
    delete block;
  } else {
    freed.emplace(std::make_tuple(block->device, block->stream, block->size), block);
  }
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    int device = current_device, stream = current(device);
    size = std::max(size, size_t{1});
    Block* block = nullptr;
    std::string race;
    {
      std::lock_guard<std::mutex> guard(lock);
      // Memory is used again as soon as it is free, in the order of its stream, as caching allocators do.
      auto found = freed.find(std::make_tuple(device, stream, size));
      if (found != freed.end()) {
        block = found->second;
        freed.erase(found);
        launch(stream);
        race = enter(*block, 0, size, stream, true, "the next use");
        block->accesses.erase(block->accesses.begin(), block->accesses.end() - 1); // a race is reported once
      }
    }
    if (!block) block = new Block{raw_memory(size), size, device, stream, {}};
    tell(race);
    return {block->data, block, free_block, Device(kEmulated, static_cast<DeviceIndex>(device))};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};

void free_pinned(void* data) {
  std::lock_guard<std::mutex> guard(lock);
  pinned.erase(static_cast<char*>(data));
  std::memset(data, kPoison, 1);
  std::free(data);
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    char* data = raw_memory(std::max(size, size_t{1}));
    std::lock_guard<std::mutex> guard(lock);
    pinned[data] = std::max(size, size_t{1});
    return {data, data, free_pinned, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return free_pinned; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};

DeviceMemory device_memory;
PinnedMemory pinned_memory;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &device_memory)

// ---- Devices, streams and events -------------------------------------------------------------------------------

struct Event {
  Clock clock;
  bool asked = false;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kEmulated; }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(kEmulated, current_device); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "there is no ", device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }

  Stream getStream(Device device) const override { return stream_of(current(device.index() < 0 ? current_device : device.index())); }
  Stream getDefaultStream(Device device) const override { return stream_of(device.index() * kStreams); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device); }
  Stream getNewStream(Device device, int = 0) const override {
    int index = device.index() < 0 ? current_device : device.index();
    std::lock_guard<std::mutex> guard(lock);
    return stream_of(index * kStreams + 1 + next_stream[index]++ % (kStreams - 1));
  }
  Stream exchangeStream(Stream stream) const override {
    int& mine = current_streams[stream.device_index()];
    Stream before = stream_of(stream.device_index() * kStreams + mine);
    mine = static_cast<int>(stream.id());
    return before;
  }
  bool queryStream(const Stream& stream) const override { return has_passed(clock_of(number(stream))); }
  void synchronizeStream(const Stream& stream) const override { wait_for(clock_of(number(stream)), "stream"); }
  void synchronizeDevice(DeviceIndex device) const override {
    Clock all{};
    for (int stream = 0; stream < kStreams; stream++) join(all, clock_of(device * kStreams + stream));
    wait_for(all, "device");
  }

  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Event();
    std::lock_guard<std::mutex> guard(lock);
    launch(number(stream));
    *static_cast<Event*>(*event) = Event{clocks[number(stream)]};
  }
  void block(void* event, const Stream& stream) const override {
    if (!event) return;
    std::lock_guard<std::mutex> guard(lock);
    join(clocks[number(stream)], static_cast<Event*>(event)->clock);
  }
  // As late as allowed: the first question is answered by no, the second ends the work.
  bool queryEvent(void* event) const override {
    if (!event) return true;
    auto* asked = static_cast<Event*>(event);
    if (asked->asked) wait_for(asked->clock, nullptr);
    asked->asked = true;
    return has_passed(asked->clock);
  }
  void synchronizeEvent(void* event) const override {
    if (event) wait_for(static_cast<Event*>(event)->clock, "event");
  }
  double elapsedTime(void*, void*, DeviceIndex) const override { return 1.0; }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    auto* block = static_cast<Block*>(data.get_context());
    std::lock_guard<std::mutex> guard(lock);
    if (block && number(stream) != block->stream) block->used_elsewhere = true;
  }

 private:
  static bool has_passed(const Clock& clock) {
    std::lock_guard<std::mutex> guard(lock);
    for (size_t i = 0; i < clock.size(); i++)
      if (clock[i] > host_clock[i]) return false;
    return true;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---- Generators: the CPU's, so that a seed gives the CPU's numbers ---------------------------------------------

struct EmulatedGenerator final : c10::GeneratorImpl {
  explicit EmulatedGenerator(DeviceIndex index, at::Generator from = at::detail::createCPUGenerator())
      : GeneratorImpl(Device(kEmulated, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), cpu(from) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "no offset"); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  GeneratorImpl* clone_impl() const override { return new EmulatedGenerator(device_.index(), cpu.clone()); }
  at::Generator cpu;
};

const at::Generator& default_generator(DeviceIndex index) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (DeviceIndex i = 0; i < kDevices; i++) made.push_back(at::make_generator<EmulatedGenerator>(i));
    return made;
  }();
  return all.at(index < 0 ? current_device : index);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}
  DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(DeviceIndex device) const override { current_device = device; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return std::exchange(current_device, device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    if (hands_out_defaults) return default_generator(index);
    return at::make_generator<EmulatedGenerator>(index < 0 ? current_device : index);
  }
  Device getDeviceFromPtr(void*) const override { return Device(kEmulated, current_device); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* data) const override {
    auto* place = static_cast<char*>(const_cast<void*>(data));
    std::lock_guard<std::mutex> guard(lock);
    auto after = pinned.upper_bound(place);
    if (after == pinned.begin()) return false;
    --after;
    return place < after->first + after->second;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    c10::DeviceGuard guard(storage.device());
    auto data = device_memory.allocate(size);
    std::memcpy(data.get(), storage.data(), std::min(size, storage.nbytes()));
    auto* impl = storage.unsafeGetStorageImpl();
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(size);
  }
};

// ---- Kernels: the CPU's, on aliases of the device's memory ------------------------------------------------------

bool emulated(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kEmulated; }

std::pair<size_t, size_t> bytes_of(const Tensor& tensor) {
  if (tensor.numel() == 0) return {0, 0};
  size_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); i++) last += (tensor.size(i) - 1) * tensor.stride(i);
  size_t begin = tensor.storage_offset() * tensor.itemsize();
  return {begin, begin + (last + 1) * tensor.itemsize()};
}

// Enter what the operation that a stream has launched last does to a tensor.
void touch(const Tensor& tensor, int stream, bool write, const std::string& operation) {
  auto* block = static_cast<Block*>(tensor.storage().data_ptr().get_context());
  auto [begin, end] = bytes_of(tensor);
  if (!block || begin == end) return;
  std::string race;
  {
    std::lock_guard<std::mutex> guard(lock);
    race = enter(*block, begin, end, stream, write, operation);
  }
  tell(race);
}

Tensor tensor_on(const c10::Storage& storage, c10::DispatchKey key, const Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_storage_offset(like.storage_offset());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  return made;
}

// The operands of one call as the CPU's kernel sees them.
class Aliases {
 public:
  Tensor of(const Tensor& tensor) {
    auto* impl = tensor.storage().unsafeGetStorageImpl();
    auto found = by_storage_.find(impl);
    if (found == by_storage_.end()) {
      c10::DataPtr data(impl->mutable_data(), Device(c10::kCPU));
      c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), impl->nbytes(), std::move(data), c10::GetAllocator(c10::kCPU), true));
      found = by_storage_.emplace(impl, std::make_pair(storage, tensor)).first;
    }
    auto alias = tensor_on(found->second.first, c10::DispatchKey::CPU, tensor);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) alias.unsafeGetTensorImpl()->set_wrapped_number(true);
    return alias;
  }

  // Give a result to the device: as a view where it is one of an operand, else in memory of its own.
  Tensor back(const Tensor& result, Device device) {
    if (!result.defined() || result.device().type() == kEmulated) return result;
    for (auto& [impl, pair] : by_storage_) {
      if (pair.first.unsafeGetStorageImpl() == result.storage().unsafeGetStorageImpl())
        return tensor_on(pair.second.storage(), c10::DispatchKey::PrivateUse1, result);
    }
    c10::DeviceGuard guard(device);
    size_t size = result.storage().nbytes();
    c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), size, device_memory.allocate(size), &device_memory, true));
    if (size) std::memcpy(storage.mutable_data(), result.storage().data(), size);
    return tensor_on(storage, c10::DispatchKey::PrivateUse1, result);
  }

  // Let an operand follow its alias, which the kernel may have resized.
  static void follow(const Tensor& tensor, const Tensor& alias) {
    if (tensor.storage().data() != alias.storage().data() || tensor.storage().nbytes() != alias.storage().nbytes()) {
      size_t size = alias.storage().nbytes();
      c10::DeviceGuard guard(tensor.device());
      auto data = device_memory.allocate(size);
      std::memcpy(data.get(), alias.storage().data(), size);
      auto* impl = tensor.storage().unsafeGetStorageImpl();
      impl->set_data_ptr_noswap(std::move(data));
      impl->set_nbytes(size);
    }
    if (tensor.sizes() != alias.sizes() || tensor.strides() != alias.strides())
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides());
  }

 private:
  std::unordered_map<c10::StorageImpl*, std::pair<c10::Storage, Tensor>> by_storage_;
};

// Kernels that the CPU's dispatch must not record, cast or redirect again.
struct Below {
  c10::impl::ExcludeDispatchKeyGuard keys{
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset};
};

const std::vector<std::string> kReadsResult = { // operations whose result the host needs, such as its size
    "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique", "aten::unique", "aten::bincount",
    "aten::repeat_interleave.Tensor", "aten::masked_scatter"};

bool reads_result(const std::string& name) {
  return std::any_of(kReadsResult.begin(), kReadsResult.end(), [&](auto& each) { return name.rfind(each, 0) == 0; });
}

struct Operand {
  Tensor tensor, alias;
  bool write;
};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string name = schema.name();
  const size_t count = schema.arguments().size(), first = stack->size() - count;
  const bool indexes = name == "aten::index" || name == "aten::_index_put_impl_" || name == "aten::index_put_";
  Aliases aliases;
  std::vector<Operand> operands;
  std::vector<Tensor> from_host;
  std::optional<Device> device;
  bool masks = false;
  std::vector<c10::IValue> originals(stack->begin() + static_cast<std::ptrdiff_t>(first), stack->end());

  auto replace = [&](const Tensor& tensor, bool write) -> Tensor {
    if (!emulated(tensor)) {
      if (tensor.defined() && (tensor.dim() > 0)) from_host.push_back(tensor);
      return tensor;
    }
    TORCH_CHECK(!device || *device == tensor.device(), name, " got tensors on ", *device, " and ", tensor.device());
    device = tensor.device();
    Tensor alias = aliases.of(tensor);
    operands.push_back({tensor, alias, write});
    return alias;
  };
  for (size_t i = 0; i < count; i++) {
    c10::IValue& value = (*stack)[first + i];
    const auto* info = schema.arguments()[i].alias_info();
    bool write = info && info->isWrite();
    // Its schema does not say that it writes the running statistics.
    const auto& argument = schema.arguments()[i].name();
    if (name == "aten::native_batch_norm" && (argument == "running_mean" || argument == "running_var"))
      write = originals[5].toBool();
    if (value.isTensor()) {
      value = replace(value.toTensor(), write);
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& each : value.toTensorVector()) list.push_back(replace(each, write));
      value = list;
    } else if (value.isList() && value.toListRef().size() && schema.arguments()[i].type()->str().find("Tensor?") == 0) {
      c10::List<std::optional<Tensor>> list;
      for (const c10::IValue& each : value.toListRef()) {
        if (each.isNone()) {
          list.push_back(std::nullopt);
          continue;
        }
        Tensor index = each.toTensor();
        masks = masks || index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
        list.push_back(replace(index, write));
      }
      value = list;
    } else if (value.isDevice()) {
      if (value.toDevice().type() == kEmulated) {
        device = Device(kEmulated, value.toDevice().has_index() ? value.toDevice().index() : current_device);
        value = Device(c10::kCPU);
      }
    }
  }
  TORCH_CHECK(device, name, " was called for the emulated device without a tensor on it");
  TORCH_CHECK(from_host.empty() || indexes, name, " got tensors on ", *device, " and on the CPU");
  for (size_t i = 0; i < count; i++) { // the device's generator, if the operation may be given one
    c10::IValue& value = (*stack)[first + i];
    if (schema.arguments()[i].type()->str().find("Generator") == std::string::npos) continue;
    at::Generator given = value.isNone() ? default_generator(device->index()) : value.toGenerator();
    TORCH_CHECK(given.device() == *device, "a generator of ", given.device(), " was given for ", *device);
    value = static_cast<EmulatedGenerator*>(given.unsafeGetGeneratorImpl())->cpu;
  }

  const int stream = current(device->index());
  const bool waits = reads_result(name) || (indexes && (masks || !from_host.empty()));
  {
    std::lock_guard<std::mutex> guard(lock);
    launch(stream);
  }
  for (auto& each : operands) touch(each.tensor, stream, each.write, name);
  if (waits) wait_for(clock_of(stream), name.c_str());
  {
    Below below;
    op.callBoxed(stack);
  }
  for (auto& each : operands)
    if (each.write) Aliases::follow(each.tensor, each.alias);

  const size_t start = stack->size() - schema.returns().size();
  for (size_t i = 0; i < schema.returns().size(); i++) {
    c10::IValue& value = (*stack)[start + i];
    const auto* info = schema.returns()[i].alias_info();
    if (info && info->isWrite()) { // the operand itself is returned
      for (size_t j = 0; j < count; j++) {
        const auto* other = schema.arguments()[j].alias_info();
        if (other && other->isWrite() && other->beforeSets() == info->beforeSets()) value = originals[j];
      }
    } else if (value.isTensor()) {
      value = aliases.back(value.toTensor(), *device);
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& each : value.toTensorVector()) list.push_back(aliases.back(each, *device));
      value = list;
    }
    if (value.isTensor() && emulated(value.toTensor()) && !(info && !info->isWrite()))
      touch(value.toTensor(), stream, true, name);
  }
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) { run_on_cpu(op, stack); }

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(Device(kEmulated)));
  return at::detail::empty_generic(size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(Device(kEmulated)));
  return at::detail::empty_strided_generic(size, stride, &device_memory,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  size_t needed = at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset());
  if (needed > self.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.data() == nullptr) impl->set_sizes_contiguous(size);
  else impl->set_sizes_and_strides(size, stride);
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  int64_t size = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {size}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Scalar local_scalar(const Tensor& self) {
  int stream = current(self.device().index());
  {
    std::lock_guard<std::mutex> guard(lock);
    launch(stream);
  }
  touch(self, stream, false, "item");
  wait_for(clock_of(stream), "item");
  Aliases aliases;
  Below below;
  return aliases.of(self).item();
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  Aliases aliases;
  Below below;
  const int stream = current(emulated(from) ? from.device().index() : to.device().index());
  {
    std::lock_guard<std::mutex> guard(lock);
    // Between two devices, the copy waits for the current stream of the receiver, which then waits for the copy.
    if (emulated(from) && emulated(to)) join(clocks[stream], clocks[current(to.device().index())]);
    launch(stream);
  }
  if (emulated(from)) touch(from, stream, false, "copy");
  if (emulated(to)) touch(to, stream, true, "copy");
  if (emulated(from) && emulated(to)) {
    aliases.of(to).copy_(aliases.of(from));
    std::lock_guard<std::mutex> guard(lock);
    join(clocks[current(to.device().index())], clocks[stream]);
    return to;
  }
  const Tensor& on_host = emulated(from) ? to : from;
  const bool late = non_blocking && on_host.is_pinned();
  if (late) {
    Tensor values = emulated(from) ? aliases.of(from).clone() : from.clone();
    if (emulated(from)) std::memset(to.mutable_data_ptr(), kPoison, to.is_contiguous() ? to.nbytes() : to.itemsize());
    else aliases.of(to).copy_(from);
    std::lock_guard<std::mutex> guard(lock);
    // A source that is not contiguous is compared by its copy, which no host can write.
    Tensor host = emulated(from) || from.is_contiguous() ? on_host.detach() : values;
    pending.push_back({stream, clocks[stream][stream], host, values, emulated(from)});
    return to;
  }
  // A copy from pageable memory has read it when the call returns, so nothing waits for the device.
  if (emulated(from) || !non_blocking) wait_for(clock_of(stream), emulated(from) ? "copy to the CPU" : "copy to the device");
  if (emulated(from)) const_cast<Tensor&>(to).copy_(aliases.of(from));
  else aliases.of(to).copy_(from);
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

void record_stream(Tensor& self, Stream stream) { Guard().recordDataPtrOnStream(self.storage().data_ptr(), stream); }

// As the CPU's dropout computes it. The second result holds the factors instead of a mask.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (p == 0 || !train.value_or(true)) return {input.clone(), at::empty_like(input).fill_(1)};
  if (p == 1) return {at::empty_like(input).zero_(), at::empty_like(input).zero_()};
  Tensor noise = at::empty_like(input).bernoulli_(1 - p).div_(1 - p);
  return {input.mul(noise), noise};
}

Tensor native_dropout_backward(const Tensor& gradient, const Tensor& noise, double) { return gradient.mul(noise); }

// Convolutions have an operation of their own for backends outside of torch.
template <typename Call>
auto call_on_cpu(std::vector<Tensor> inputs, const char* name, Call call) {
  Aliases aliases;
  std::vector<Tensor> as_cpu;
  Device device = inputs[0].device();
  int stream = current(device.index());
  {
    std::lock_guard<std::mutex> guard(lock);
    launch(stream);
  }
  for (const Tensor& each : inputs) {
    if (emulated(each)) touch(each, stream, false, name);
    as_cpu.push_back(emulated(each) ? aliases.of(each) : each);
  }
  std::vector<Tensor> results;
  {
    Below below;
    results = call(as_cpu);
  }
  for (Tensor& each : results) {
    each = aliases.back(each, device);
    if (each.defined()) touch(each, stream, true, name);
  }
  return results;
}

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding, int64_t groups) {
  auto on_cpu = [&](std::vector<Tensor>& in) -> std::vector<Tensor> {
    auto given = in[2].defined() ? std::optional<Tensor>(in[2]) : std::nullopt;
    return {at::convolution(in[0], in[1], given, stride, padding, dilation, transposed, output_padding, groups)};
  };
  return call_on_cpu({input, weight, bias.value_or(Tensor())}, "convolution", on_cpu)[0];
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& gradient, const Tensor& input, const Tensor& weight,
    c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
    c10::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  auto on_cpu = [&](std::vector<Tensor>& in) -> std::vector<Tensor> {
    std::vector<int64_t> bias{weight.size(transposed ? 1 : 0) * (transposed ? groups : 1)};
    auto [a, b, c] = at::convolution_backward(in[0], in[1], in[2], c10::IntArrayRef(bias), stride, padding, dilation,
        transposed, output_padding, groups, mask);
    return {a, b, c};
  };
  auto results = call_on_cpu({gradient, input, weight}, "convolution_backward", on_cpu);
  return {results[0], results[1], results[2]};
}

int64_t attention_by_formula(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
    std::optional<double>, bool) {
  return 0; // the formula in single operations
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("native_dropout", TORCH_FN(native_dropout));
  m.impl("native_dropout_backward", TORCH_FN(native_dropout_backward));
  m.impl("convolution_overrideable", TORCH_FN(convolution));
  m.impl("convolution_backward_overrideable", TORCH_FN(convolution_backward));
}

} // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &attention_by_formula)
}

// ---- What Python calls, by ctypes -------------------------------------------------------------------------------

extern "C" {

void emulated_register(void (*wait)(const char*), void (*race)(const char*)) {
  report_wait = wait;
  report_race = race;
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  // Where torch has a kernel for CPUs and a formula for backends without one, the formula rounds differently.
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findSchema(name);
    if (!op || name.name.rfind("aten::", 0) != 0 || op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1) ||
        !op->hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
        !(op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) ||
          op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd)))
      continue;
    std::string whole = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    library.impl(whole.substr(6).c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

void emulated_hand_out_defaults(int value) { hands_out_defaults = value; }
}
